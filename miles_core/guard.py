"""How a rank ends: exit code 0, 2 for the user's mistakes (one sentence), 130 for Ctrl-C, 1 with a traceback for our own.

When one rank fails, every other rank soon fails too, with a complaint about its lost peer. The first cause must be what a person
reads first, so a rank that only lost a peer waits before it speaks; torchrun usually ends it before that.

    guard.run(main)                                   # the whole life of a process
    guard.stop_on_signals(dead_peers, on_ask)         # from here on SIGTERM and the first Ctrl-C only ask; `asked()` says so
    guard.explain_failures(describe)                  # what to print below an error

SIGTERM asks for an orderly end: SLURM sends it before it takes a node away. But torchrun sends it, too, when another rank has died, and the
kernel when torchrun has (`die_with_parent`): then there is nothing to wait for, and the rank leaves at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_GRACE_S = 5.0  # torchrun looks at its children ten times a second and ends the others; slow start-up of a rank is the rest
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Application timeout", "Read error")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LAUNCHER = "MILES_LAUNCHER"  # environment: pid of launch/torchrun.py, which wants to know of mistakes that no restart would mend
_OURS = Path(__file__).resolve().parents[1]


class PeerLost(RuntimeError):
    """Another rank has ended, so this one cannot go on. That one has said why."""


_asked: list[str] = []  # names of the signals that have asked for an end
_explanations: list[Callable[[], str]] = []


def asked() -> str:
    """The signal that has asked this rank to stop, "" if none has."""
    return _asked[0] if _asked else ""


def stop_on_signals(dead_peers: Callable[[], list[int]], on_ask: Callable[[bool], None]) -> None:
    """From now on the first Ctrl-C asks for an end after this step, SIGTERM for one at once, because who sends it kills soon:
    `on_ask(at_once)` tells the other ranks. A second Ctrl-C interrupts.

    `dead_peers()`: ranks of this node whose process has ended.
    """
    parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def ask(number: int, _: object) -> None:
        if number == signal.SIGTERM and (parent not in (None, os.getppid()) or dead_peers()):
            os._exit(128 + number)  # the one that died has said why
        if number == signal.SIGINT and signal.SIGINT.name in _asked:
            _interrupt()
        _asked.append(signal.Signals(number).name)
        on_ask(number == signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)


def explain_failures(describe: Callable[[], str]) -> None:
    """Print `describe()` below the error when this process fails."""
    _explanations.append(describe)


def adopt_orphans() -> None:
    """Become the parent of every process that this one's descendants leave behind, so that `kill_tree` finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(pid: int, but: int = 0) -> None:
    """Kill every descendant of a process, whatever group or session it has gone to, but not the process itself (nor `but`)."""
    deadline = time.monotonic() + 5.0
    while (living := [child for child in _descendants(pid) if child != but]) and time.monotonic() < deadline:
        for child in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.001)  # what was being forked meanwhile is seen next time; what sits in a driver dies when that lets go of it


def _descendants(pid: int) -> list[int]:
    """Living ones; a zombie has nothing left to kill."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(parent), []).append(int(entry.name) if state not in "ZX" else -int(entry.name))
    found, queue = [], [pid]
    while queue:
        mine = children.get(queue.pop(), [])
        queue += map(abs, mine)
        found += [child for child in mine if child > 0]
    return found


def _raised_by_us(error: BaseException) -> bool:
    """True when the innermost frame is code of this project: only then is a ValueError a sentence for the user."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).resolve().is_relative_to(_OURS) and "site-packages" not in frame.filename.removeprefix(str(_OURS))


def die_with_parent(with_signal: signal.Signals) -> None:
    """Have the kernel send this process a signal when the one that started it ends, however that ends: no orphans."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, with_signal) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _interrupt(*_: object) -> None:
    """Ctrl-C. Asks again every second until `run` has heard it: library code that clears exceptions now and then clears this one too."""
    signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(1)
    raise KeyboardInterrupt


def run(main: Callable[[], None]) -> NoReturn:
    """Run `main` and exit. Leaves by `os._exit` after a failure, so that no destructor waits for a lost peer."""
    rank = int(os.environ.get("RANK", 0))
    code = 0
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM)  # torchrun puts each rank into a session of its own, so nothing else would end it
    signal.signal(signal.SIGINT, _interrupt)
    try:
        main()
    except KeyboardInterrupt:
        signal.alarm(0)
        print(f"rank {rank}: interrupted", file=sys.stderr)
        code = 130
    except ValueError as error:
        # Every rank finds a wrong flag at the same time; rank 0 says it and the others wait to be ended. Its own mistake a rank says late.
        time.sleep(_GRACE_S if rank else 0)
        if _raised_by_us(error):
            print(f"error: {error}", file=sys.stderr)
            code = _users_mistake()
        else:
            traceback.print_exc()
            code = 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            with contextlib.suppress(OSError):  # the log may lie on the same disk
                print(f"error: {error}: make room on the disk of --run-dir, then resume the run from its last checkpoint", file=sys.stderr)
            os._exit(_users_mistake())
        if isinstance(error, PeerLost) or any(text in str(error) for text in _PEER_LOST):
            time.sleep(_GRACE_S)
            print(f"rank {rank}: lost another rank; the first failure is above, or in the log of another node", file=sys.stderr)
        traceback.print_exc()
        for describe in _explanations:
            print(describe(), file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _users_mistake() -> int:
    """Exit code 2, and a word to the launcher: the same would happen again after a restart."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    if os.environ.get(LAUNCHER) == str(os.getppid()):
        os.kill(os.getppid(), signal.SIGUSR1)
    return 2
