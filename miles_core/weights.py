"""New weights from the training ranks to the rollout ranks, every byte checked on every update (DESIGN 4.5).

    board = Board.create(Plan.of(model), reader_ranks, "shm")            # node leader; board.segment.path goes to the readers
    publisher.publish(version, full_tensors(model))                      # every training rank
    version = receiver.receive(named_weights(model))                     # rollout rank, between two decode steps; None: nothing new

The board is a piece of shared memory, one a node:

    header    how many publications were begun, how many are complete, and the version in each of two buffers
    acks      per reader: the last publication that it has loaded
    plan      names and shapes: each side checks the tensors that it has against them
    digests   two buffers; one digest for each tensor, or for each 32 MiB of a larger one
    payload   `shm` only: two buffers of all tensors

Publication n goes to buffer n % 2. The leader stores the count of complete publications last, by one aligned 8-byte store, so a reader
sees all of a publication or nothing (x86 keeps the order of stores). Before it writes n it waits until every reader has loaded n - 2 or
a later one: nothing is overwritten that may still be read, and no reader falls more than two behind.

`broadcast` moves the bytes through a process group instead, bucket by bucket, from one training rank to every rollout rank of all nodes.
The board still announces version and digests. Readers then join every publication in order, where those of `shm` skip to the newest.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from miles_core.digest import copy_and_digest
from miles_core.model.layers import named_weights
from miles_core.shm import Segment

BUCKET_BYTES = 32 << 20
# words of the header; VERSION takes two
PLAN_BYTES, NUM_READERS, HAS_PAYLOAD, BEGUN, COMPLETE, VERSION = range(6)
# words of a reader
ACK_NUMBER, ACK_VERSION, ACK_RANK = range(3)
_ROW = 8  # words: header and readers have cache lines of their own
_ALIGN, _PAGE = 64, 4096  # bytes
_POLL_S = 0.0005

Named = Iterable[tuple[str, torch.Tensor]]


class Part(NamedTuple):
    """Bytes [start, stop) of one tensor: what one digest covers. It stands at `offset` of a publication, inside one bucket."""

    index: int
    start: int
    stop: int
    offset: int
    bucket: int

    @property
    def end(self) -> int:
        return self.offset + self.stop - self.start


class Plan:
    """Where each byte of a publication stands: tensors in order, each part at a multiple of 64 bytes.

    `shapes` {name: shape}; `dtype` "float32" or "bfloat16", but float32 for the names in `wide`; `parts` {name: [Part]};
    `buckets` [(start, stop)]: what one broadcast carries, at most `bucket_bytes`.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], bucket_bytes: int = BUCKET_BYTES, dtype: str = "float32", wide: Sequence[str] = ()
    ):  # fmt: skip
        assert bucket_bytes % _ALIGN == 0, bucket_bytes
        self.dtype, self.wide = dtype, list(wide)
        self.shapes, self.bucket_bytes = {name: tuple(shape) for name, shape in shapes.items()}, bucket_bytes
        self.parts: dict[str, list[Part]] = {name: [] for name in shapes}
        self.buckets = [(0, 0)]
        self.nbytes = self.num_parts = 0
        for name, shape in self.shapes.items():
            size = self.dtype_of(name).itemsize * int(np.prod(shape, dtype=np.int64))
            for start in range(0, size, bucket_bytes):
                self.parts[name].append(self._place(start, min(start + bucket_bytes, size)))

    def _place(self, start: int, stop: int) -> Part:
        """The next part, in the last bucket if it still fits, else in a new one."""
        if self.nbytes + stop - start > self.buckets[-1][0] + self.bucket_bytes:
            self.buckets.append((self.nbytes, self.nbytes))
        part = Part(self.num_parts, start, stop, self.nbytes, len(self.buckets) - 1)
        self.buckets[-1] = (self.buckets[-1][0], part.end)
        self.num_parts += 1
        self.nbytes = _aligned(part.end, _ALIGN)
        return part

    def dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name in self.wide else getattr(torch, self.dtype)

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype = torch.float32) -> Plan:
        """Parameters in `dtype`; what is no parameter (a router's correction bias) stays float32."""
        wide = [name for name, _ in model.named_buffers()]
        return cls({n: w.shape for n, w in named_weights(model)}, dtype=str(dtype).removeprefix("torch."), wide=wide)


class Board:
    """Create it on the node leader, attach to it on the node's rollout ranks while the leader lives."""

    def __init__(self, segment: Segment):
        self.segment = segment
        self.header = segment.words(0, _ROW)
        self.acks = segment.words(8 * _ROW, int(self.header[NUM_READERS]), _ROW)
        plan_at = 8 * _ROW * (1 + len(self.acks))
        plan_end = plan_at + int(self.header[PLAN_BYTES])
        self.plan = Plan(**json.loads(bytes(segment.buffer[plan_at:plan_end])))
        digests_at = _aligned(plan_end, _ALIGN)
        self.digests = segment.words(digests_at, 2, self.plan.num_parts)
        self.payload: np.ndarray | None = None
        if self.header[HAS_PAYLOAD]:
            payload_at = _aligned(digests_at + self.digests.nbytes, _PAGE)
            self.payload = np.frombuffer(segment.buffer, np.uint8, 2 * self.plan.nbytes, payload_at).reshape(2, self.plan.nbytes)

    @classmethod
    def create(cls, plan: Plan, reader_ranks: Sequence[int], transport: str) -> Board:
        """`reader_ranks`: global ranks that roll out on this node. `transport`: "shm" or "broadcast"."""
        text = json.dumps({"shapes": plan.shapes, "bucket_bytes": plan.bucket_bytes, "dtype": plan.dtype, "wide": plan.wide}).encode()
        plan_at = 8 * _ROW * (1 + len(reader_ranks))
        payload_at = _aligned(_aligned(plan_at + len(text), _ALIGN) + 2 * 8 * plan.num_parts, _PAGE)
        has_payload = {"shm": True, "broadcast": False}[transport]
        segment = Segment.create("weights", payload_at + 2 * plan.nbytes * has_payload)
        header = segment.words(0, _ROW)
        header[PLAN_BYTES], header[NUM_READERS], header[HAS_PAYLOAD] = len(text), len(reader_ranks), has_payload
        acks = segment.words(8 * _ROW, len(reader_ranks), _ROW)
        acks[:, ACK_VERSION], acks[:, ACK_RANK] = -1, reader_ranks
        segment.buffer[plan_at : plan_at + len(text)] = text
        return cls(segment)

    @classmethod
    def attach(cls, path: str) -> Board:
        return cls(Segment.attach(path))


class Publisher:
    """One on each training rank. Only node leaders have a board, and only the source of broadcasts has their group."""

    def __init__(self, board: Board | None, timeout_s: float, group: dist.ProcessGroup | None = None):
        self.board, self.timeout_s = board, timeout_s
        self.pipe = _Broadcasts(board.plan, group, dist.get_rank()) if board is not None and board.payload is None else None

    def publish(self, version: int, named_tensors: Named) -> None:
        """Publish every tensor of the plan, in its order (a collective over the training ranks if `named_tensors` is one).

        Raises RuntimeError naming a tensor that is missing, extra or of another shape, before a reader sees anything; TimeoutError naming
        the reader that still holds the buffer.
        """
        if self.board is None:
            for _ in named_tensors:
                pass
            return
        header, plan = self.board.header, self.board.plan
        number, previous = int(header[BEGUN]) + 1, int(header[VERSION + int(header[BEGUN]) % 2])
        assert header[COMPLETE] == number - 1, "the last publication failed half-way"
        assert number == 1 or version > previous, f"version {version} published after version {previous}"
        self._wait_for_readers(number - 2, version)
        buffer = number % 2
        header[VERSION + buffer] = version
        header[BEGUN] = number
        planned = iter(plan.shapes.items())
        for name, tensor in named_tensors:
            expected, given = next(planned, None), (name, tuple(tensor.shape))
            if given != expected:
                raise RuntimeError(f"publishing version {version}: got tensor {given}, but {expected} comes next in the plan")
            tensor = tensor.detach().to("cpu", plan.dtype_of(name))
            source = _bytes(tensor)
            for part in plan.parts[name]:
                self.board.digests[buffer, part.index] = self._send(buffer, part, source[part.start : part.stop])
        if (rest := next(planned, None)) is not None:
            raise RuntimeError(f"publishing version {version}: tensor {rest[0]} is missing")
        header[COMPLETE] = number

    def _send(self, buffer: int, part: Part, source: np.ndarray) -> int:
        if self.pipe is not None:
            return self.pipe.send(part, source)
        return copy_and_digest(self.board.payload[buffer, part.offset : part.end], source)

    def _wait_for_readers(self, number: int, version: int) -> None:
        """Until every reader has loaded publication `number` or a later one."""
        deadline = time.monotonic() + self.timeout_s
        for ack in self.board.acks:
            while ack[ACK_NUMBER] < number:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"publishing version {version}: waited {self.timeout_s:g} s for rank {ack[ACK_RANK]}, "
                        f"{'which last loaded version ' + str(ack[ACK_VERSION]) if ack[ACK_NUMBER] else 'which has loaded no weights yet'}"
                    )
                time.sleep(_POLL_S)


class Receiver:
    """One on each rollout rank. `group` and `source` (the publishing rank) are for "broadcast" alone."""

    def __init__(self, board: Board, rank: int, timeout_s: float, group: dist.ProcessGroup | None = None, source: int | None = None):
        self.board, self.rank, self.timeout_s = board, rank, timeout_s
        self.ack = board.acks[board.acks[:, ACK_RANK].tolist().index(rank)]
        self.pipe = _Broadcasts(board.plan, group, source) if board.payload is None else None

    @property
    def version(self) -> int:
        """Version that was loaded last; -1: none yet."""
        return int(self.ack[ACK_VERSION])

    def poll(self) -> int | None:
        """The newest version to be had, or None when it is loaded already."""
        number = self._newest()
        return int(self.board.header[VERSION + number % 2]) if number > self.ack[ACK_NUMBER] else None

    def receive(self, named: Named, min_version: int | None = None) -> int | None:
        """Copy new weights into the parameters: the newest, or by broadcast the next. Returns their version, or None: nothing new.

        With `min_version` it goes on until that version, or a later one, is loaded. Raises TimeoutError when none comes, and RuntimeError
        naming the tensor when one is missing, extra, of another shape, or not byte for byte what was published. Stop then: the parameters
        are overwritten.
        """
        deadline = time.monotonic() + self.timeout_s
        parameters = None
        while True:
            number, newest = int(self.ack[ACK_NUMBER]), self._newest()
            if newest > number:
                parameters = parameters or dict(named)
                self._load(number + 1 if self.pipe else newest, parameters)
                if min_version is None or self.version >= min_version:
                    return self.version
            elif min_version is None or self.version >= min_version:
                return None
            else:
                self._sleep_until(deadline, f"weights of version {min_version}; the newest are of version {self.version}")

    def _newest(self) -> int:
        """A broadcast has to be joined before it is complete."""
        return int(self.board.header[BEGUN if self.pipe else COMPLETE])

    def _load(self, number: int, parameters: Mapping[str, torch.Tensor]) -> None:
        buffer, plan = number % 2, self.board.plan
        version = int(self.board.header[VERSION + buffer])
        _check_same(plan.shapes, parameters, f"rank {self.rank}, version {version}")
        found = np.empty(plan.num_parts, np.int64)
        for name, parts in plan.parts.items():
            parameter = parameters[name]
            landing = parameter if parameter.is_cpu else torch.empty_like(parameter, device="cpu")
            assert parameter.dtype is plan.dtype_of(name), (name, parameter.dtype, plan.dtype)
            target = _bytes(landing)
            for part in parts:
                found[part.index] = self._fetch(buffer, part, target[part.start : part.stop])
            if landing is not parameter:
                parameter.data.copy_(landing)
            torch.autograd.graph.increment_version(parameter)  # numpy wrote it: tell whoever keeps something derived from it
        deadline = time.monotonic() + self.timeout_s
        while self.board.header[COMPLETE] < number:
            self._sleep_until(deadline, f"the digests of version {version}")
        self._compare(found, buffer, version)
        self.ack[ACK_VERSION] = version
        self.ack[ACK_NUMBER] = number

    def _fetch(self, buffer: int, part: Part, target: np.ndarray) -> int:
        if self.pipe is not None:
            return self.pipe.fetch(part, target)
        return copy_and_digest(target, self.board.payload[buffer, part.offset : part.end])

    def _compare(self, found: np.ndarray, buffer: int, version: int) -> None:
        damaged = set(np.flatnonzero(found != self.board.digests[buffer]).tolist())
        names = [name for name, parts in self.board.plan.parts.items() if any(part.index in damaged for part in parts)]
        if names:
            raise RuntimeError(f"rank {self.rank}: weights of version {version} arrived damaged: {_list(names)}")

    def _sleep_until(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {self.rank} waited {self.timeout_s:g} s for {what}")
        time.sleep(_POLL_S)


class _Broadcasts:
    """Payload through a process group: parts gather in a bucket that travels when it is full. Without a group it only digests."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None, source: int | None):
        self.plan, self.group, self.source = plan, group, source
        self.bucket = torch.empty(plan.bucket_bytes, dtype=torch.uint8)

    def send(self, part: Part, source: np.ndarray) -> int:
        start, stop = self.plan.buckets[part.bucket]
        digest = copy_and_digest(self.bucket.numpy()[part.offset - start : part.end - start], source)
        if part.end == stop and self.group is not None:
            self._broadcast(part.bucket)
        return digest

    def fetch(self, part: Part, target: np.ndarray) -> int:
        start, _ = self.plan.buckets[part.bucket]
        if part.offset == start:
            self._broadcast(part.bucket)
        return copy_and_digest(target, self.bucket.numpy()[part.offset - start : part.end - start])

    def _broadcast(self, bucket: int) -> None:
        start, stop = self.plan.buckets[bucket]
        try:
            dist.broadcast(self.bucket[: stop - start], self.source, self.group)
        except RuntimeError as error:
            ranks, count = dist.get_process_group_ranks(self.group), len(self.plan.buckets)
            raise RuntimeError(f"weights from rank {self.source} to ranks {ranks}, bucket {bucket + 1} of {count}: {error}") from error


def _check_same(shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, torch.Tensor], what: str) -> None:
    """The tensors that come are exactly the parameters that are there."""
    common = shapes.keys() & parameters.keys()
    for fault, names in (
        ("missing", parameters.keys() - shapes.keys()),
        ("extra", shapes.keys() - parameters.keys()),
        ("of another shape", {name for name in common if shapes[name] != tuple(parameters[name].shape)}),
    ):
        if names:
            raise RuntimeError(f"{what}: {fault}: {_list(sorted(names))}")


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """uint8 view of a tensor on the CPU, to be used while the tensor lives."""
    assert tensor.is_cpu and tensor.is_contiguous(), (tensor.device, tensor.stride())
    # Not by `numpy()`: it pins the storage, and FSDP2 could not free the gathered weights.
    return np.ctypeslib.as_array((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()))


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
