"""Sandboxes: how long one takes to start and stop, a command in one, and 32 at once.

    python tests/bench/bench_sandbox.py [--rounds 20] [--at-once 32]

Prints medians. `start` ends when the sandbox answers, `stop` when all its processes are gone. At once: all are started from as many
threads, then each runs a command, then all are stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from miles_core.tasks.sandbox import Sandbox  # noqa: E402


def one(rounds: int) -> None:
    starts, runs, stops = [], [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        sandbox = Sandbox()
        started = time.perf_counter()
        sandbox.run("echo first")
        first = time.perf_counter()
        sandbox.run("echo second")
        ran = time.perf_counter()
        sandbox.close()
        starts.append(started - begin)
        runs.append(ran - first)
        stops.append(time.perf_counter() - ran)
    both = [1000 * (a + b) for a, b in zip(starts, stops, strict=True)]
    print(f"one: start {1000 * median(starts):.1f} ms, stop {1000 * median(stops):.1f} ms, a command {1000 * median(runs):.2f} ms")
    print(f"one: start and stop {median(both):.1f} ms median, {max(both):.1f} ms max of {rounds}")


def many(number: int) -> None:
    with ThreadPoolExecutor(number) as pool:
        begin = time.perf_counter()
        sandboxes = list(pool.map(lambda _: Sandbox(), range(number)))
        started = time.perf_counter()
        outputs = list(pool.map(lambda sandbox: sandbox.run("echo $$ > id; cat id").exit_code, sandboxes))
        ran = time.perf_counter()
        list(pool.map(Sandbox.close, sandboxes))
        ended = time.perf_counter()
    assert outputs == [0] * number, outputs
    print(
        f"{number} at once: started in {started - begin:.2f} s, a command in each {ran - started:.2f} s, stopped in {ended - ran:.2f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=32)
    arguments = parser.parse_args()
    one(arguments.rounds)
    many(arguments.at_once)
