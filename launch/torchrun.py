"""torchrun that ends with the exit code of the rank that failed first, and says which one that was.

    python launch/torchrun.py --nproc-per-node 2 train.py ...        every argument of torchrun works

torchrun itself ends with 1 whatever a rank's code was, and prints its own stack below the rank's message. Here 2 (a mistake of the
user) stays 2, and a rank killed by signal n gives 128 + n, as in a shell.

SIGTERM and Ctrl-C go on to the ranks, which finish their step, save, and end with 0, and so does the job. torchrun would kill them after
30 seconds and end with an error. With --max-restarts the ranks are started again when one of them dies; not after a mistake of the user,
which a rank tells by SIGUSR1, and not once the job has been asked to stop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main


def exit_code(code: int) -> int:
    """A process's return code (-n for signal n) as a shell would give it."""
    return 128 - code if code < 0 else code


def describe_code(code: int) -> str:
    """How a process ended."""
    if code < 0:
        hint = " (out of memory? see dmesg)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"failed first, with exit code {code}; what it said is above"


def describe(rank: int, failure: ProcessFailure) -> str:
    ended = "; the other ranks were ended" * (failure.exitcode < 0)
    return f"rank {rank} (pid {failure.pid}) {describe_code(failure.exitcode)}{ended}"


class _Ended(Exception):
    """The ranks are to be ended, and not to be started again: the exit code of the job."""


class _Restarts(logging.Handler):
    """Says which rank failed where torchrun starts all of them again. Its own remarks are the only place where it says so."""

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("failed (exitcode") and len(record.args) >= 3:
            code, local_rank, pid = record.args[:3]
            self.reason = f"local rank {local_rank} (pid {pid}) {describe_code(code)}"
        elif "will restart worker group" in str(record.msg) and len(record.args) >= 3:
            print(f"torchrun: {getattr(self, 'reason', 'a rank failed')}; starting all ranks again, {record.args[2]} times more at most",
                  file=sys.stderr, flush=True)


def _ranks() -> set[int]:
    """Processes that this one has started."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(stat.parent.name))
    return found


def _pass_on_signals() -> None:
    """SIGTERM and SIGINT to the ranks; from then on a restart ends the job."""
    asked: set[int] = set()

    def ask(number: int, _: object) -> None:
        asked.update(_ranks())
        for pid in _ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        signal.signal(signal.SIGALRM, lambda *_: watch(number))
        watch(number)

    def watch(number: int) -> None:
        if not _ranks() <= asked:
            raise _Ended(128 + number)
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    def mistake(*_: object) -> None:
        raise _Ended(2)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    signal.signal(signal.SIGUSR1, mistake)
    os.environ["MILES_LAUNCHER"] = str(os.getpid())


def launch(argv: list[str]) -> int:
    """Run torchrun with `argv` and return the exit code of the whole job."""
    if "LOGLEVEL" not in os.environ:  # the agent's remarks about signals it sends would bury the rank's own message
        restarts = _Restarts()
        for name in ("multiprocessing.api", "agent.server.api"):
            logger = logging.getLogger(f"torch.distributed.elastic.{name}")
            logger.handlers, logger.propagate = [restarts], False
            logger.setLevel(logging.INFO)
    _pass_on_signals()
    try:
        main(["--signals_to_handle", "SIGHUP,SIGQUIT", *argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != 2:  # 2: the rank printed one sentence for the user, and there is nothing to add
            print(f"torchrun: {describe(rank, failure)}", file=sys.stderr)
        return exit_code(failure.exitcode)
    except SignalException as caught:
        return 128 + caught.sigval
    except _Ended as ended:
        return ended.args[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
