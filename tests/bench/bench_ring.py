"""The ring against memcpy of as many bytes, in one run and one thread.

    python tests/bench/bench_ring.py [--mib 1] [--rounds 30]

A round handles 32 different records, more memory than a core's own caches hold, from ordinary arrays into shared memory whose pages
are mapped already. The sources of memcpy are 32 arrays of a record's size: one large array would lie in huge pages, which samples
do not, and be copied faster. Each measurement runs right after the memcpy that it is compared with. Printed are medians over rounds:
GB/s of CPU time of the thread, and the ratio to memcpy. `put` makes one copy and a checksum; `read` verifies the checksum and copies
nothing; a ring in use does both at the same time, on different ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "core")]

from samples import trajectory  # noqa: E402

from miles_core.ring import Claim, Ref, Ring  # noqa: E402
from miles_core.schema import Trajectory, group_nbytes, trajectory_nbytes  # noqa: E402
from miles_core.shm import Segment  # noqa: E402

NUM_GROUPS = 32


def make_group(number: int, num_samples: int, nbytes: int) -> list[Trajectory]:
    """`num_samples` samples that fill `nbytes` together; a tenth of each is prompt."""
    tokens = (nbytes // num_samples - trajectory_nbytes(0, 1, 2)) // 9 - 4
    return [trajectory(tokens // 10, tokens - tokens // 10, group=number, sample=i) for i in range(num_samples)]


def seconds(work: Callable[..., None], *args: object) -> float:
    """CPU time of the thread."""
    start = time.thread_time()
    work(*args)
    return time.thread_time() - start


def bench(num_samples: int, nbytes: int, rounds: int) -> None:
    groups = [make_group(g, num_samples, nbytes) for g in range(NUM_GROUPS)]
    record = group_nbytes(groups[0])
    random = np.random.default_rng(0)
    plain = [random.integers(0, 256, record, np.uint8) for _ in range(NUM_GROUPS)]
    segment = Segment.create("bench", NUM_GROUPS * record)
    target = np.frombuffer(segment.buffer, np.uint8).reshape(NUM_GROUPS, record)
    ring = Ring.create(num_slots=NUM_GROUPS, slot_bytes=record, window=1, num_rollout_ranks=1, num_groups=1 << 40)
    ring.set_live(0, 0)

    def memcpy() -> None:
        for i in range(NUM_GROUPS):
            target[i] = plain[i]

    def put(claims: list[Claim]) -> None:
        for claim, group in zip(claims, groups, strict=True):
            ring.put(claim, group)

    def read(refs: list[Ref]) -> None:
        for ref in refs:
            ring.read(ref)

    speeds: dict[str, list[float]] = {"memcpy": [], "put": [], "read": [], "put + read": []}
    ratios: dict[str, list[float]] = {"put": [], "read": [], "put + read": []}
    for number in range(rounds + 2):  # the first two touch the pages
        claims = [ring.claim(0) for _ in range(NUM_GROUPS)]
        copy_s, put_s = seconds(memcpy), seconds(put, claims)
        refs = ring.take(NUM_GROUPS)
        copy_again_s, read_s = seconds(memcpy), seconds(read, refs)
        ring.release(refs, 0)
        if number >= 2:
            total = NUM_GROUPS * record / 1e9
            copies_s = (copy_s + copy_again_s) / 2
            for name, took, copied in (("put", put_s, copy_s), ("read", read_s, copy_again_s), ("put + read", put_s + read_s, copies_s)):
                speeds[name].append(total / took)
                ratios[name].append(copied / took)
            speeds["memcpy"].append(total / copies_s)
    parts = [f"{name} {median(speeds[name]):.1f} GB/s = {median(values):.2f} x memcpy" for name, values in ratios.items()]
    print(f"{record / 2**20:.2f} MiB in {num_samples} samples | memcpy {median(speeds['memcpy']):.1f} GB/s | {' | '.join(parts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=1.0, help="size of a record")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    for num_samples in (1, 2, 8):
        bench(num_samples, int(args.mib * 2**20), args.rounds)


if __name__ == "__main__":
    main()
