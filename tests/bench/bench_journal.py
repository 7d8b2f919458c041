"""What the journal costs: share of a step's time, bytes a token, and the rate of append against a bare write. One run.

    OMP_NUM_THREADS=1 python tests/bench/bench_journal.py [--steps 60]

The first part runs the quick start on two ranks with a clock around `Journal.append`; what that returns goes to the ring as it is, so
nothing is serialised twice. The second appends groups of long samples, with and without routes: CPU time of the thread, against write(2)
of as many bytes to another file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/core")]


def as_rank() -> None:
    """train.py with a clock around every append of this rank."""
    import train
    from miles_core import guard, journal_file
    from miles_core.journal import Journal

    append, log = Journal.append, Path(os.environ["BENCH_LOG"]).open("a", buffering=1)
    write_group, serialising = journal_file.write_group, [0.0]

    def timed_write_group(group: list, buffer: memoryview) -> int:
        started = time.perf_counter()
        digest = write_group(group, buffer)
        serialising[0] = time.perf_counter() - started
        return digest

    def timed(self: Journal, group: list, routes: list) -> object:
        started = time.perf_counter()
        data = append(self, group, routes)
        seconds = time.perf_counter() - started
        log.write(json.dumps([seconds, self.size, sum(len(t.tokens) for t in group), serialising[0]]) + "\n")
        return data

    Journal.append, journal_file.write_group = timed, timed_write_group
    guard.run(train.main)


def in_a_run(steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cwd = Path(directory)
        env = os.environ | {"BENCH_LOG": str(cwd / "log"), "BENCH_RANK": "1", "GLOO_SOCKET_IFNAME": "lo"}
        torchrun = [sys.executable, str(ROOT / "launch/torchrun.py"), "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
        flags = ["--steps", str(steps), "--eval-prompts", "0", "--run-dir", "run", "--save-every", "20"]
        subprocess.run([*torchrun, str(Path(__file__).resolve()), *flags], cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL)
        appends = [json.loads(line) for line in (cwd / "log").read_text().splitlines()]
        found = [json.loads(line) for line in (cwd / "run/metrics.jsonl").read_text().splitlines()]
        step_s = median(line["perf/step_time"] for line in found if "perf/step_time" in line)
        nbytes = sum(path.stat().st_size for path in (cwd / "run/journal").iterdir())
        kept = sum(json.loads(line)["step"] > 0 for line in (cwd / "run/steps.jsonl").read_text().splitlines())
    groups_a_step = 16
    total = median(seconds for seconds, _, _, _ in appends) * groups_a_step
    cost = median(seconds - serialising for seconds, _, _, serialising in appends) * groups_a_step
    sizes = [(b[1] - a[1], b[2]) for a, b in zip(appends, appends[1:], strict=False) if b[1] > a[1]]  # not across files
    print(f"quick start: {kept} steps, median {1000 * step_s:.0f} ms; {groups_a_step} appends take {1000 * cost:.2f} ms beside the "
          f"serialisation that the ring needs anyway: {cost / step_s:.2%} of a step (wanted: at most 2 %); with it {total / step_s:.2%}")
    tokens = sum(t for _, t in sizes)
    per_token, per_sample = sum(n for n, _ in sizes) / tokens, tokens / len(sizes) / 8
    print(f"  {per_token:.1f} bytes a token (samples of {per_sample:.0f} tokens); {nbytes / 2**20:.2f} MiB")


def alone(num_tokens: int, route_bytes: int, num_samples: int = 8, rounds: int = 30) -> None:
    import numpy as np
    from samples import trajectory

    from miles_core.journal import Journal
    from miles_core.schema import group_nbytes

    routes = [np.zeros(num_tokens * route_bytes, np.uint8) for _ in range(num_samples)]
    group = [trajectory(num_tokens // 10, num_tokens - num_tokens // 10, sample=i, route_bytes=len(routes[i])) for i in range(num_samples)]
    nbytes = group_nbytes(group) + sum(map(len, routes))
    source = np.ones(nbytes, np.uint8)
    with tempfile.TemporaryDirectory() as directory:
        writer, ratios, rates = Journal(Path(directory), 1, 0, {}), [], []
        for i in range(rounds):
            with (Path(directory) / "bare").open("ab", buffering=0) as bare:
                started = time.thread_time()
                bare.write(source)
                copied = time.thread_time()
            writer.append(group, routes)
            appended = time.thread_time()
            ratios.append((copied - started) / (appended - copied))
            rates.append(nbytes / (appended - copied) / 1e9)
            if i % 5 == 4:
                writer.rotate()
                for path in Path(directory).iterdir():
                    path.unlink()
        writer.close()
    print(f"append of {num_samples} samples of {num_tokens} tokens, {route_bytes} bytes of routes a token: {median(rates):.2f} GB/s, "
          f"{median(ratios):.2f} of a bare write; {nbytes / num_samples / num_tokens:.1f} bytes a token")


if __name__ == "__main__":
    if "BENCH_RANK" in os.environ:
        as_rank()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    in_a_run(arguments.steps)
    for tokens, nbytes in ((1024, 0), (1024, 6), (32768, 0), (32768, 480)):
        alone(tokens, nbytes)
