"""How a rank ends: exit code 0, 2 for the user's mistakes (one sentence), 130 for Ctrl-C, 1 with a traceback for our own.

When one rank fails, every other rank soon fails too, with a complaint about its lost peer. The first cause must be what a person
reads first, so a rank that only lost a peer waits before it speaks; torchrun usually ends it before that.
"""

from __future__ import annotations

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
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_OURS = Path(__file__).resolve().parents[1]


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
            code = 2
        else:
            traceback.print_exc()
            code = 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            print(f"error: {error}: make room on the disk of --run-dir, then resume the run from its last checkpoint", file=sys.stderr)
            os._exit(2)
        if any(text in str(error) for text in _PEER_LOST):
            time.sleep(_GRACE_S)
            print(f"rank {rank}: lost another rank; the first failure is above", file=sys.stderr)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
