"""torchrun that ends with the exit code of the rank that failed first, and says which one that was.

    python launch/torchrun.py --nproc-per-node 2 train.py ...        every argument of torchrun works

torchrun itself ends with 1 whatever a rank's code was, and prints its own stack below the rank's message. Here 2 (a mistake of the
user) stays 2, and a rank killed by signal n gives 128 + n, as in a shell.

SIGTERM and Ctrl-C go on to the ranks, which save and end with 0, and so does the job. torchrun would kill them after 30 seconds and
end with an error. With --max-restarts the ranks are started again when one of them dies; not after a mistake of the user, which a rank
tells by SIGUSR1, and not once the job has been asked to stop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main

KILL_S = 5.0


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


class _Remarks(logging.Handler):
    """torchrun's remarks are the only place where it says what it is about to do: which rank has failed, and that it starts all again.

    A rank that it ends, and that does not listen because it is stopped or hangs in a driver, is killed after KILL_S, not after 30 seconds.
    """

    def __init__(self, asked: list[int]):
        super().__init__()
        self.asked, self.reason = asked, "a rank failed"

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Sending process"):
            timer = threading.Timer(KILL_S, _kill, [record.args[0]])
            timer.daemon = True
            timer.start()
        elif str(record.msg).startswith("failed (exitcode"):
            code, local_rank, pid = record.args[:3]
            if self.asked:
                raise _Ended(exit_code(code))  # through torchrun, which ends the other ranks on its way out
            self.reason = f"local rank {local_rank} (pid {pid}) {describe_code(code)}"
        elif "attempts left" in str(record.msg):
            left, most = record.args[2:4]
            print(f"torchrun: {self.reason}; starting all ranks again, restart {most - left + 1} of {most}", file=sys.stderr, flush=True)
        elif "new nodes" in str(record.msg):  # of a fixed number: they have been here, and have lost a rank
            print("torchrun: a rank of another node failed; starting all ranks again", file=sys.stderr, flush=True)
            for pid in _ranks():  # they wait for the dead, and would take torchrun's SIGTERM for an orderly end
                os.kill(pid, signal.SIGKILL)


def _ranks() -> list[int]:
    """Processes that this one has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _kill(pid: int) -> None:
    if pid in _ranks():
        os.kill(pid, signal.SIGKILL)


def _pass_on_signals() -> list[int]:
    """SIGTERM and SIGINT to the ranks. Returns the list of those that have come, which grows."""
    asked: list[int] = []

    def ask(number: int, _: object) -> None:
        asked.append(number)
        if not (ranks := _ranks()):
            raise _Ended(128 + number)  # the nodes are still looking for each other
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def mistake(*_: object) -> None:
        raise _Ended(2)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    signal.signal(signal.SIGUSR1, mistake)
    os.environ["MILES_LAUNCHER"] = str(os.getpid())
    return asked


def launch(argv: list[str]) -> int:
    """Run torchrun with `argv` and return the exit code of the whole job."""
    remarks = _Remarks(_pass_on_signals())
    if "LOGLEVEL" not in os.environ:  # shown as they are, they would bury the rank's own message
        # The node that keeps the rendezvous may end first, and another one cannot say goodbye to it then.
        logging.getLogger("torch.distributed.elastic.rendezvous.dynamic_rendezvous").setLevel(logging.ERROR)
        for name in ("multiprocessing.api", "agent.server.api"):
            logger = logging.getLogger(f"torch.distributed.elastic.{name}")
            logger.handlers, logger.propagate = [remarks], False
            logger.setLevel(logging.INFO)
    try:
        main(["--signals_to_handle", "SIGHUP,SIGQUIT", *argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != 2:  # 2: the rank printed one sentence for the user, and there is nothing to add
            print(f"torchrun: {describe(rank, failure)}", file=sys.stderr)
        return exit_code(failure.exitcode)
    except SignalException as caught:
        return 128 + caught.sigval
    except RendezvousError as error:
        print(f"torchrun: the nodes did not meet, or another one has ended the job: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except _Ended as ended:
        return ended.args[0]
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
