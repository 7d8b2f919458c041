"""What a weight update costs, as a ratio to plain memory copies of the same bytes in the same run.

    python tests/bench/bench_weights.py [megabytes]

Two ranks, one thread each: rank 0 publishes (copy + digest), then rank 1 receives (copy + digest + comparison), then one of them copies the
same bytes twice. The target is two copies in at least half of the time that the update takes. Medians of the rounds after a warm-up.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "dist"), str(Path(__file__).resolve().parents[2])]
from launcher import run_ranks  # noqa: E402

from miles_core.weights import Board, Plan, Publisher, Receiver  # noqa: E402

ROUNDS, WARM_UP = 7, 2  # two rounds touch both buffers


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """Like a small model: one large embedding, then matrices and vectors."""
    width = 576
    found: dict[str, tuple[int, ...]] = {"embed": (megabytes * 1_000_000 // 5 // (4 * width), width)}
    left = megabytes * 1_000_000 - 4 * found["embed"][0] * width
    for layer in range(left // (4 * width * (2 * 2 * width + 1))):
        found |= {f"{layer}.up": (2 * width, width), f"{layer}.down": (width, 2 * width), f"{layer}.norm": (width,)}
    return found


def timed(function) -> float:  # noqa: ANN001
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def body(megabytes: int, transport: str) -> list[float]:
    """Seconds of every measured round: on rank 0 of a publication and of two plain copies, on rank 1 of a load."""
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    tensors = {name: torch.rand(shape) for name, shape in shapes(megabytes).items()}
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    board = Board.create(Plan({name: t.shape for name, t in tensors.items()}), [1], transport) if rank == 0 else None
    paths = [None, None]
    dist.all_gather_object(paths, board.segment.path if board else None)
    publisher = Publisher(board, 60.0, group) if rank == 0 else None
    receiver = Receiver(Board.attach(paths[0]), 1, 60.0, group, 0) if rank == 1 else None

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    seconds = []
    for version in range(ROUNDS + WARM_UP):
        dist.barrier()
        if rank == 0:
            seconds.append([timed(lambda version=version: publisher.publish(version, tensors.items()))])
        if transport == "shm":
            dist.barrier()  # one at a time: neither shares the memory bus
        if rank == 1:
            seconds.append([timed(lambda version=version: receiver.receive(copies.items(), min_version=version))])
        dist.barrier()
        if rank == 0:
            seconds[-1].append(timed(copy) + timed(copy))
        dist.barrier()
    return seconds[WARM_UP:]


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    for transport in ("shm", "broadcast"):
        writer, reader = run_ranks(2, body, megabytes, transport, timeout=600.0)
        publish, copies = (statistics.median(row[i] for row in writer) for i in (0, 1))
        load = statistics.median(row[0] for row in reader)
        total = publish + load if transport == "shm" else max(publish, load)  # both ends of a broadcast run at the same time
        print(
            f"{transport:9}  {megabytes} MB: publish {publish:.3f} s, receive {load:.3f} s, together {total:.3f} s; "
            f"two memcpys {copies:.3f} s ({2 * megabytes / 1000 / copies:.1f} GB/s); {copies / total:.0%} of memcpy"
        )


if __name__ == "__main__":
    main()
