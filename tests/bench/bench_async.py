"""Asynchronous against synchronous steps per second, on a workload whose generation and training cost about the same.

    python tests/bench/bench_async.py [--steps 30] [flags of train.py ...]

The same two ranks, one rolling out and one training, with --max-staleness 0 (each waits for the other) and 1 (both at once); and for
comparison the two as colocated data-parallel ranks. Runs alternate. From the synchronous run come r, what a step waits for generation,
and t, the rest of it; the ideal is (r + t) / max(r, t).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Temperature 3 makes the embedded policy ramble, so that answers are long enough for decoding to cost what training costs.
WORKLOAD = "--temperature 3 --max-new-tokens 48 --prompts-per-step 16 --samples-per-prompt 4 --eval-prompts 0 --save-every 0".split()
MODES = {
    "synchronous": ["--rollout-ranks-per-node", "1", "--max-staleness", "0"],
    "asynchronous": ["--rollout-ranks-per-node", "1", "--max-staleness", "1"],
    "colocated": ["--rollout-ranks-per-node", "0"],
}


def run(flags: list[str], steps: int, skip: int = 3) -> list[dict]:
    """metrics.jsonl lines of a run of two ranks, without the first ones."""
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, str(ROOT / "launch/torchrun.py"), "--standalone", "--nproc-per-node", "2", str(ROOT / "train.py")]
        command += ["--steps", str(steps), "--run-dir", run_dir, *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "USE_HUB_KERNELS": "0"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900, env=environment)
        lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "perf/step_time" in line][skip:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2)
    options, flags = parser.parse_known_args()
    lines: dict[str, list[dict]] = {mode: [] for mode in MODES}
    for _ in range(options.repeats):
        for mode, extra in MODES.items():
            lines[mode] += run([*WORKLOAD, *extra, *flags], options.steps)
    # A step's length is taken from start to start: total time over steps, since asynchronous steps are not evenly long.
    seconds = {mode: statistics.fmean(line["perf/step_time"] for line in found) for mode, found in lines.items()}
    waits = [line["perf/step_time"] * line["perf/trainer_wait_frac"] for line in lines["synchronous"]]
    generate = statistics.fmean(waits)
    train = seconds["synchronous"] - generate
    for mode, value in seconds.items():
        print(f"{mode:13s} {1 / value:6.2f} steps/s")
    print(f"r = {generate:.3f} s of generation, t = {train:.3f} s of training and weights a step")
    ratio, ideal = seconds["synchronous"] / seconds["asynchronous"], (generate + train) / max(generate, train)
    print(f"asynchronous / synchronous = {ratio:.2f}   ideal (r + t) / max(r, t) = {ideal:.2f}   reached {ratio / ideal:.0%}")


if __name__ == "__main__":
    main()
