"""A publication arrives whole, once, and byte for byte, or the run stops and names the tensor.

Writer and reader are in one process here; tests/dist/test_weights_dist.py has them in several.

    python -m pytest tests/core/test_weights.py
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from miles_core.weights import Board, Part, Plan, Publisher, Receiver

SHAPES = {"a.weight": (40, 33), "a.bias": (33,), "scale": (), "b.weight": (5, 7, 3), "c": (1000,)}


def make(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Node:
    """A board with its leader and its readers, ranks 4, 5, ..."""

    def __init__(self, num_readers: int = 1, timeout_s: float = 5.0, bucket_bytes: int = 1024):
        self.board = Board.create(Plan(SHAPES, bucket_bytes), range(4, 4 + num_readers), "shm")
        self.publisher = Publisher(self.board, timeout_s)
        attached = [Board.attach(self.board.segment.path) for _ in range(num_readers)]
        self.readers = [Receiver(board, 4 + i, timeout_s) for i, board in enumerate(attached)]


@pytest.mark.parametrize("bucket_bytes", [64, 1024, 1 << 20])
def test_plan_places_every_byte_once(bucket_bytes: int) -> None:
    plan = Plan(SHAPES, bucket_bytes)
    parts: list[Part] = [part for name in SHAPES for part in plan.parts[name]]
    assert [part.index for part in parts] == list(range(plan.num_parts))
    for name, shape in SHAPES.items():
        cuts = [plan.parts[name][0].start, *(part.stop for part in plan.parts[name])]
        assert cuts[0] == 0 and cuts[-1] == 4 * int(np.prod(shape)) and [p.start for p in plan.parts[name]] == cuts[:-1]
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        start, stop = plan.buckets[part.bucket]
        assert part.offset % 64 == 0 and start <= part.offset < part.end <= stop <= start + bucket_bytes
        assert part.end <= (following.offset if following else plan.nbytes)
        if following is None or following.bucket != part.bucket:
            assert part.end == stop, "a bucket ends with its last part"
            assert following is None or (following.bucket == part.bucket + 1 and following.end > start + bucket_bytes), "and is full"


def test_what_is_published_arrives_bit_for_bit_and_once() -> None:
    node, model = Node(), blank()
    assert node.readers[0].poll() is None and node.readers[0].receive(model.items()) is None
    for version in (0, 1, 5):
        node.publisher.publish(version, make(version).items())
        assert node.readers[0].poll() == version
        assert node.readers[0].receive(model.items()) == version and same(model, make(version))
        assert node.readers[0].poll() is None and node.readers[0].receive(model.items()) is None


def test_a_board_of_bfloat16_halves_the_bytes_and_rounds_once() -> None:
    plan = Plan(SHAPES, 1024, "bfloat16")
    assert sum(part.stop - part.start for parts in plan.parts.values() for part in parts) == sum(2 * t.numel() for t in make(0).values())
    board = Board.create(plan, [4], "shm")
    Publisher(board, 5.0).publish(3, make(3).items())
    model = {name: tensor.bfloat16() for name, tensor in blank().items()}
    assert Receiver(Board.attach(board.segment.path), 4, 5.0).receive(model.items()) == 3
    assert same(model, {name: tensor.bfloat16() for name, tensor in make(3).items()})


def test_special_values_keep_their_bits() -> None:
    node, model = Node(), blank()
    tensors = make(0)
    tensors["c"][:4] = torch.tensor([torch.nan, -torch.inf, -0.0, 1e-45])
    node.publisher.publish(0, tensors.items())
    node.readers[0].receive(model.items())
    assert torch.equal(model["c"].view(torch.int32), tensors["c"].view(torch.int32))


def test_a_loaded_parameter_counts_as_changed() -> None:
    """Packed copies of a weight know by its `_version` that they are stale."""
    node, model = Node(), {name: nn.Parameter(tensor) for name, tensor in blank().items()}
    before = {name: p._version for name, p in model.items()}
    node.publisher.publish(0, make(0).items())
    node.readers[0].receive(model.items())
    assert all(p._version > before[name] for name, p in model.items())


def test_a_reader_skips_to_the_newest() -> None:
    node, model = Node(), blank()
    node.publisher.publish(0, make(0).items())
    node.publisher.publish(1, make(1).items())
    assert node.readers[0].receive(model.items()) == 1 and same(model, make(1))


def test_waiting_for_a_version() -> None:
    node, model = Node(timeout_s=0.3), blank()
    node.publisher.publish(3, make(3).items())
    assert node.readers[0].receive(model.items(), min_version=2) == 3
    assert node.readers[0].receive(model.items(), min_version=3) is None, "it is loaded already"
    with pytest.raises(TimeoutError, match=r"rank 4 waited 0.3 s for weights of version 4; the newest are of version 3"):
        node.readers[0].receive(model.items(), min_version=4)
    node.readers[0].timeout_s = 20.0
    later = threading.Timer(0.1, node.publisher.publish, (4, make(4).items()))
    later.start()
    assert node.readers[0].receive(model.items(), min_version=4) == 4 and same(model, make(4))
    later.join()


def test_a_writer_ahead_waits_and_names_the_reader() -> None:
    node, models = Node(num_readers=2, timeout_s=0.3), [blank(), blank()]
    for version in (0, 1):
        node.publisher.publish(version, make(version).items())
    node.readers[0].receive(models[0].items())
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"publishing version 2: waited 0.3 s for rank 5, which has loaded no weights yet"):
        node.publisher.publish(2, make(2).items())
    assert time.monotonic() - start >= 0.3
    node.readers[1].receive(models[1].items())
    for version in (2, 3):
        node.publisher.publish(version, make(version).items())
        node.readers[1].receive(models[1].items())
    with pytest.raises(TimeoutError, match=r"publishing version 4: waited 0.3 s for rank 4, which last loaded version 1"):
        node.publisher.publish(4, make(4).items())
    assert node.readers[0].receive(models[0].items()) == 3 and same(models[0], make(3)), "a refused publication changes nothing"


def test_a_buffer_is_never_overwritten_while_it_is_read() -> None:
    """The reader stops in the middle of every load; the writer, always ready, publishes the next two meanwhile and no more."""
    node, model = Node(timeout_s=20.0), blank()
    last = 12

    def write() -> None:
        for version in range(last + 1):
            node.publisher.publish(version, make(version).items())

    fetch, loads = node.readers[0]._fetch, []

    def slow_fetch(buffer: int, part: Part, target: np.ndarray) -> int:
        if part.index == 1:
            time.sleep(0.02)
        return fetch(buffer, part, target)

    node.readers[0]._fetch = slow_fetch
    writer = threading.Thread(target=write)
    writer.start()
    while not loads or loads[-1] < last:
        version = node.readers[0].receive(model.items())
        if version is not None:
            loads.append(version)
            assert same(model, make(version))
    writer.join()
    assert loads == sorted(set(loads)) and loads[-1] == last
    assert max(np.diff([-1, *loads])) <= 2, "no reader is ever more than two behind"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("where", ["payload", "digest"])
def test_one_flipped_byte_stops_the_run_and_names_the_tensor(name: str, where: str) -> None:
    node = Node()
    node.publisher.publish(0, make(0).items())
    node.readers[0].receive(blank().items())
    node.publisher.publish(1, make(1).items())
    part = node.board.plan.parts[name][-1]
    if where == "payload":
        node.board.payload[0, part.end - 1] ^= 1
    else:
        node.board.digests[0, part.index] ^= 1
    with pytest.raises(RuntimeError, match=rf"^rank 4: weights of version 1 arrived damaged: {name}$"):
        node.readers[0].receive(blank().items())
    assert node.readers[0].version == 0, "damaged weights are not acknowledged"


def test_a_tensor_missing_extra_or_misshaped_at_the_writer() -> None:
    for change, message in (
        (lambda t: t.pop("scale"), r"version 0: got tensor \('b.weight', \(5, 7, 3\)\), but \('scale', \(\)\) comes next"),
        (lambda t: t.pop("c"), r"version 0: tensor c is missing"),
        (lambda t: t.update(d=torch.zeros(1)), r"version 0: got tensor \('d', \(1,\)\), but None comes next"),
        (lambda t: t.update(c=torch.zeros(999)), r"version 0: got tensor \('c', \(999,\)\), but \('c', \(1000,\)\) comes next"),
    ):
        node, tensors = Node(), make(0)
        change(tensors)
        with pytest.raises(RuntimeError, match=message):
            node.publisher.publish(0, tensors.items())
        assert node.readers[0].poll() is None, "half a publication is invisible"
        with pytest.raises(AssertionError, match="half-way"):
            node.publisher.publish(1, make(1).items())


def test_a_tensor_missing_extra_or_misshaped_at_the_reader() -> None:
    for change, message in (
        (lambda t: t.pop("scale"), "rank 4, version 0: extra: scale"),
        (lambda t: t.update(d=torch.zeros(1), e=torch.zeros(1)), "rank 4, version 0: missing: d, e"),
        (lambda t: t.update(c=torch.zeros(1, 1000)), "rank 4, version 0: of another shape: c"),
    ):
        node, model = Node(), blank()
        change(model)
        node.publisher.publish(0, make(0).items())
        with pytest.raises(RuntimeError, match=f"^{message}$"):
            node.readers[0].receive(model.items())


def test_a_version_is_published_once_and_never_goes_back() -> None:
    node = Node()
    node.publisher.publish(3, make(3).items())
    for version in (3, 2):
        with pytest.raises(AssertionError, match=f"version {version} published after version 3"):
            node.publisher.publish(version, make(version).items())


def test_a_rank_without_a_board_still_takes_part_in_the_gathering() -> None:
    iterator = iter(make(0).items())
    Publisher(None, 1.0).publish(0, iterator)
    assert next(iterator, None) is None
