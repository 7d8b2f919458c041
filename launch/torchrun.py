"""torchrun that ends with the exit code of the rank that failed first, and says which one that was.

    python launch/torchrun.py --nproc-per-node 2 train.py ...        every argument of torchrun works

torchrun itself ends with 1 whatever a rank's code was, and prints its own stack below the rank's message. Here 2 (a mistake of the
user) stays 2, and a rank killed by signal n gives 128 + n, as in a shell.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main


def exit_code(code: int) -> int:
    """A process's return code (-n for signal n) as a shell would give it."""
    return 128 - code if code < 0 else code


def describe(rank: int, failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (out of memory? see dmesg)" if failure.exitcode == -signal.SIGKILL else ""
        return f"rank {rank} (pid {failure.pid}) was killed by {name}{hint}; the other ranks were ended"
    return f"rank {rank} (pid {failure.pid}) failed first, with exit code {failure.exitcode}; what it said is above"


def launch(argv: list[str]) -> int:
    """Run torchrun with `argv` and return the exit code of the whole job."""
    if "LOGLEVEL" not in os.environ:  # the agent's remarks about signals it sends would bury the rank's own message
        for name in ("multiprocessing.api", "agent.server.api"):
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        main(argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != 2:  # 2: the rank printed one sentence for the user, and there is nothing to add
            print(f"torchrun: {describe(rank, failure)}", file=sys.stderr)
        return exit_code(failure.exitcode)
    except SignalException as caught:
        return 128 + caught.sigval
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
