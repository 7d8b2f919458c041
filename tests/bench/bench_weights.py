"""What a weight update costs, as a ratio to plain memory copies of the same bytes in the same run.

    python tests/bench/bench_weights.py [megabytes]

Two ranks, one thread each, one after the other: rank 0 publishes (copy + digest), rank 1 receives (copy + digest + comparison), then rank 0
copies the same bytes twice by memcpy: tensor by tensor, and as one block, for which the C library has a faster path from about 100 MB on.
Best of the rounds after a warm-up that touches both buffers. The target: two copies in at least half of the time that an update takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
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


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def body(megabytes: int, transport: str) -> list[list[float]]:
    """Seconds of each measured round: on rank 0 [publish, two copies by tensor, two copies as one block], on rank 1 [receive]."""
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    tensors = {name: torch.rand(shape) for name, shape in shapes(megabytes).items()}
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    block, block_copy = (np.ones(megabytes * 1_000_000, np.uint8) for _ in range(2))
    board = Board.create(Plan({name: t.shape for name, t in tensors.items()}), [1], transport) if rank == 0 else None
    paths = [None, None]
    dist.all_gather_object(paths, board.segment.path if board else None)
    publisher = Publisher(board, 60.0, group) if rank == 0 else None
    receiver = Receiver(Board.attach(paths[0]), 1, 60.0, group, 0) if rank == 1 else None

    def copy() -> None:
        for name, tensor in tensors.items():
            np.copyto(copies[name].flatten().view(torch.uint8).numpy(), tensor.flatten().view(torch.uint8).numpy())

    seconds = []
    for version in range(ROUNDS + WARM_UP):
        dist.barrier()
        if rank == 0:
            seconds.append([timed(lambda version=version: publisher.publish(version, tensors.items()))])
        if transport == "shm":
            dist.barrier()
        if rank == 1:
            seconds.append([timed(lambda version=version: receiver.receive(copies.items(), min_version=version))])
        dist.barrier()
        if rank == 0:
            seconds[-1] += [timed(copy) + timed(copy), 2 * timed(lambda: np.copyto(block_copy, block))]
        dist.barrier()
    return seconds[WARM_UP:]


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    for transport in ("shm", "broadcast"):
        writer, reader = run_ranks(2, body, megabytes, transport, timeout=600.0)
        publish, by_tensor, as_block = (min(row[i] for row in writer) for i in range(3))
        receive = min(row[0] for row in reader)
        total = publish + receive if transport == "shm" else max(publish, receive)  # both ends of a broadcast run at the same time
        print(
            f"{transport:9}  {megabytes} MB: publish {publish:.3f} s, receive {receive:.3f} s, together {total:.3f} s; two memcpys "
            f"{by_tensor:.3f} s by tensor, {as_block:.3f} s as one block; {by_tensor / total:.0%} and {as_block / total:.0%} of memcpy"
        )


if __name__ == "__main__":
    main()
