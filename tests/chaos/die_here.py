"""train.py that kills itself at given lines of given functions, one in each life of a job.

    CHAOS="1 journal:Journal._write 7; 0 train:score 40 SIGTERM" python die_here.py ARGUMENTS OF train.py

The k-th start of the job (TORCHELASTIC_RESTART_COUNT) takes the k-th entry: rank, function, and after how many lines executed inside that
function the process gets a signal, SIGKILL if none is named. Lines are counted by a trace function, so it comes between any two lines, in
whatever thread.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def die_at(code: CodeType, lines: int, number: signal.Signals) -> None:
    """Send this process a signal when `code` has executed so many lines, all calls together."""
    left = [lines]
    lock = threading.Lock()

    def inside(frame: FrameType, event: str, _: object) -> object:
        if event == "line":
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), number)
        return inside

    def at_call(frame: FrameType, event: str, _: object) -> object:
        return inside if frame.f_code is code else None

    threading.settrace(at_call)
    sys.settrace(at_call)


def find(name: str) -> CodeType:
    """"ring:Ring.claim" -> its code."""
    module, _, path = name.partition(":")
    function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    return function.__code__


points = [point.split() for point in os.environ.get("CHAOS", "").split(";") if point.strip()]
life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

import train  # noqa: E402
from miles_core import guard  # noqa: E402

if life < len(points) and points[life][0] == os.environ.get("RANK", "0"):
    die_at(find(points[life][1]), int(points[life][2]), signal.Signals[(*points[life], "SIGKILL")[3]])
guard.run(train.main)
