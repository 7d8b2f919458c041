"""One Ctrl-C ends a rank, also when something swallows the exception.

    python -m pytest tests/core/test_guard.py
"""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEAF = """
import time
from miles_core import guard

def main():
    for _ in range(2):
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            pass
    print("ready", flush=True)
    time.sleep(60)

guard.run(main)
"""


def test_an_interrupt_that_was_swallowed_comes_again() -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "ready\nready\n", "rank 0: interrupted\n")
