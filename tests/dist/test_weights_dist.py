"""Weights between processes: from sharded training ranks to rollout ranks, through shared memory and through a process group.

    python -m pytest tests/dist/test_weights_dist.py
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launcher import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from miles_core.model.parallel import full_tensors, shard
from miles_core.weights import Board, Plan, Publisher, Receiver

NUM_VERSIONS = 8
BUCKET_BYTES = 4096  # several to a tensor, and several tensors to one


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(37, 37) for _ in range(3))
        self.norm, self.head = nn.Parameter(torch.zeros(37)), nn.Linear(37, 101, bias=False)


def fill(model: nn.Module, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def share(path: str | None) -> list[str | None]:
    paths: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(paths, path)
    return paths


def make_board(reader_ranks: list[int], transport: str) -> Board:
    shapes = {name: p.shape for name, p in Model().named_parameters()}
    return Board.create(Plan(shapes, BUCKET_BYTES), reader_ranks, transport)


def read_all(receiver: Receiver, pause_s: float) -> list[int]:
    """Poll like a rollout rank until the last version; every load must be exactly that version."""
    model, seen = Model(), []
    while not seen or seen[-1] < NUM_VERSIONS - 1:
        version = receiver.receive(model.named_parameters())
        if version is not None:
            seen.append(version)
            assert all(torch.equal(p, want) for p, want in zip(model.parameters(), fill(Model(), version).values(), strict=True)), version
        time.sleep(pause_s)
    return seen


def two_trainers_two_readers() -> list[int] | None:
    """Ranks 0 and 1 train, sharded; 2 and 3 roll out, one of them slowly."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_group = dist.new_group([0, 1])
    board = make_board([2, 3], "shm") if rank == 0 else None
    path = share(board.segment.path if board else None)[0]
    if rank >= 2:
        seen = read_all(Receiver(Board.attach(path), rank, 20.0), 0.03 * (rank - 2))
        dist.barrier()
        return seen
    publisher = Publisher(board, 20.0)
    for version in range(NUM_VERSIONS):
        model = Model()
        fill(model, version)
        shard(model, DeviceMesh.from_group(train_group, "cpu", mesh_dim_names=("fsdp",)))
        publisher.publish(version, full_tensors(model))
    dist.barrier()
    return None


def test_sharded_training_ranks_to_readers_of_any_speed() -> None:
    *_, fast, slow = run_ranks(4, two_trainers_two_readers)
    for seen in (fast, slow):
        assert seen == sorted(set(seen)) and seen[-1] == NUM_VERSIONS - 1


def broadcast_two_nodes() -> list[int] | None:
    """Node A: rank 0 trains and is the source, 2 rolls out. Node B: rank 1 trains and only announces, 3 rolls out."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group([0, 2, 3])
    board = make_board([rank + 2], "broadcast") if rank < 2 else None
    paths = share(board.segment.path if board else None)
    if rank >= 2:
        seen = read_all(Receiver(Board.attach(paths[rank - 2]), rank, 20.0, group, 0), 0.02 * (rank - 2))
    else:
        assert board.segment.nbytes < 64 * 1024, "no room for tensors"
        publisher, seen = Publisher(board, 20.0, group if rank == 0 else None), None
        for version in range(NUM_VERSIONS):
            publisher.publish(version, fill(Model(), version).items())
    dist.barrier()
    return seen


def test_broadcast_reaches_the_readers_of_every_node_in_order() -> None:
    assert run_ranks(4, broadcast_two_nodes) == [None, None, list(range(NUM_VERSIONS)), list(range(NUM_VERSIONS))]


def broadcast_damaged() -> str | None:
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    board = make_board([1], "broadcast") if rank == 0 else None
    path = share(board.segment.path if board else None)[0]
    if rank == 0:
        Publisher(board, 20.0, group).publish(0, fill(Model(), 0).items())
        return None
    receiver = Receiver(Board.attach(path), 1, 20.0, group, 0)
    receive_bucket = receiver.pipe._broadcast

    def flip_a_byte(bucket: int) -> None:
        receive_bucket(bucket)
        if bucket == 1:
            receiver.pipe.bucket[5] ^= 1

    receiver.pipe._broadcast = flip_a_byte
    with pytest.raises(RuntimeError) as error:
        receiver.receive(Model().named_parameters(), min_version=0)
    return str(error.value)


def test_a_byte_flipped_on_the_way_names_the_tensor() -> None:
    assert run_ranks(2, broadcast_damaged)[1] == "rank 1: weights of version 0 arrived damaged: layers.0.weight"


def reader_dies(transport: str, record: Path) -> None:
    """Rank 1 is killed in its second load; rank 0 goes on publishing."""
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    board = make_board([1], transport) if rank == 0 else None
    path = share(board.segment.path if board else None)[0]
    if rank == 0:
        publisher = Publisher(board, 0.4, group)
        publisher.publish(0, fill(Model(), 0).items())
        dist.barrier()
        try:
            for version in range(1, 6):
                publisher.publish(version, fill(Model(), version).items())
        except (TimeoutError, RuntimeError) as error:
            record.write_text(f"{type(error).__name__}: {error}")
            raise
    receiver = Receiver(Board.attach(path), 1, 20.0, group, 0)
    receiver.receive(Model().named_parameters(), min_version=0)
    dist.barrier()
    receiver._fetch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    receiver.receive(Model().named_parameters(), min_version=1)


@pytest.mark.parametrize(
    ("transport", "message"),
    [
        ("shm", "TimeoutError: publishing version 3: waited 0.4 s for rank 1, which last loaded version 0"),
        ("broadcast", "RuntimeError: weights from rank 0 to ranks [0, 1], bucket "),
    ],
    ids=["shm", "broadcast"],
)
def test_a_reader_that_dies_stops_the_publisher_and_is_named(transport: str, message: str, tmp_path: Path) -> None:
    record = tmp_path / "error.txt"
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed first"):
        run_ranks(2, reader_dies, transport, record)
    assert record.read_text().startswith(message), record.read_text()
