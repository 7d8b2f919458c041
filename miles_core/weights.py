"""Weights from the training ranks to the rollout ranks: planned once, published after every optimizer step, checked on every arrival.

    publisher = Publisher(plan, segment, ...)             training ranks; the node leader owns the segment
    publisher.publish(version, full_tensors(model))       collective over the training ranks
    receiver = Receiver(plan, segment, parameters, ...)   rollout ranks
    version = receiver.receive()                          None when nothing new is there

Transports: `shm` copies through shared memory of the node, twice buffered. `broadcast` sends from the first training rank over a process
group. Both announce in the segment, with one digest for every tensor, which every receiver compares with what it has in its parameters.

Segment: words [ANNOUNCED, PLAN], one acknowledgement a receiver, then two halves of [version, digest of every tensor], then (shm) two
halves of payload. Publication number n uses half n % 2 and waits until every receiver has acknowledged n - 2 or later: one that has may at
most be reading n - 1, which lies in the other half.

Departs from DESIGN 4.5 in one word: a bucket is one tensor, so that a digest that does not match names it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from miles_core.digest import copy_and_digest, digest
from miles_core.shm import Segment

ANNOUNCED, PLAN, _NUM_WORDS = range(3)
_POLL_S = 0.0005
_MESSAGE_BYTES = 32 << 20  # broadcast: small tensors travel together


@dataclass(frozen=True)
class Plan:
    """Which tensors there are, in which order, and where they lie in the payload (bytes, aligned to 64)."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes
    num_receivers: int

    @classmethod
    def of(cls, parameters: Mapping[str, torch.Tensor], num_receivers: int) -> Plan:
        """From float32 parameters by name (a meta model will do): the same on every rank."""
        sizes = [p.numel() * 4 for p in parameters.values()]
        ends = np.cumsum([-(-size // 64) * 64 for size in sizes])
        return cls(tuple(parameters), (0, *map(int, ends[:-1])), tuple(sizes), num_receivers)

    @property
    def payload_bytes(self) -> int:
        return self.offsets[-1] + -(-self.sizes[-1] // 64) * 64

    @property
    def fingerprint(self) -> int:
        return digest(repr((self.names, self.sizes)).encode())

    def create_segment(self, transport: str) -> Segment:
        payload = 2 * self.payload_bytes if transport == "shm" else 0
        segment = Segment.create("weights", self._payload_at(0) + payload)
        segment.words(0, _NUM_WORDS)[:] = (-1, self.fingerprint)
        segment.words(8 * _NUM_WORDS, self.num_receivers)[:] = -1
        return segment

    def acks(self, segment: Segment) -> np.ndarray:
        return segment.words(8 * _NUM_WORDS, self.num_receivers)

    def half(self, segment: Segment, number: int) -> np.ndarray:
        """int64 [1 + number of tensors]: version and digests of publication `number`."""
        row = 1 + len(self.names)
        return segment.words(8 * (_NUM_WORDS + self.num_receivers + row * (number % 2)), row)

    def payload(self, segment: Segment, number: int, tensor: int) -> np.ndarray:
        start = self._payload_at(number % 2) + self.offsets[tensor]
        return np.frombuffer(segment.buffer, np.uint8, self.sizes[tensor], start)

    def _payload_at(self, half: int) -> int:
        words = _NUM_WORDS + self.num_receivers + 2 * (1 + len(self.names))
        return -(-8 * words // 4096) * 4096 + half * self.payload_bytes

    def messages(self) -> list[range]:
        """Tensors that travel together, in order, each message about 32 MiB."""
        cuts, size = [0], 0
        for i, nbytes in enumerate(self.sizes):
            if size and size + nbytes > _MESSAGE_BYTES:
                cuts.append(i)
                size = 0
            size += nbytes
        return [range(a, b) for a, b in zip(cuts, [*cuts[1:], len(self.sizes)], strict=True)]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous float32 tensor as uint8."""
    assert tensor.dtype is torch.float32 and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


class Publisher:
    """Training side. `segment` is the node leader's and None on its other ranks; `source` is true on the one rank that broadcasts."""

    def __init__(self, plan: Plan, segment: Segment | None, timeout_s: float, group: dist.ProcessGroup | None = None, source: bool = False):
        self.plan, self.segment, self.timeout_s, self.group, self.source = plan, segment, timeout_s, group, source
        self.number = -1

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send full float32 tensors, in the plan's order, as `version`. Every training rank iterates: the tensors may be gathered on the way."""
        self.number += 1
        if self.segment is not None:
            self._wait_for_readers()
        kept: list[torch.Tensor] = []
        names = iter(self.plan.names)
        for index, (name, tensor) in enumerate(named_tensors):
            expected = next(names, None)
            assert name == expected, f"weights to publish differ from the plan: got {name}, expected {expected or 'no more'}"
            assert tensor.numel() * 4 == self.plan.sizes[index], (
                f"{name} has {tensor.numel()} values, planned {self.plan.sizes[index] // 4}"
            )
            if self.segment is None:
                continue
            source = _bytes(tensor)
            if self.group is None:
                value = copy_and_digest(self.plan.payload(self.segment, self.number, index), source)
            else:
                value = digest(source)
                kept.append(tensor.detach())
            self.plan.half(self.segment, self.number)[1 + index] = value
        missing = next(names, None)
        assert missing is None, f"weights to publish lack {missing}"
        if self.segment is None:
            return
        self.plan.half(self.segment, self.number)[0] = version
        self.segment.words(0, _NUM_WORDS)[ANNOUNCED] = self.number  # last: what it announces is complete
        if self.source:
            for message in self.plan.messages():
                dist.broadcast(torch.cat([kept[i].reshape(-1) for i in message]), src=dist.get_rank(), group=self.group)

    def _wait_for_readers(self) -> None:
        acks, deadline = self.plan.acks(self.segment), time.monotonic() + self.timeout_s
        while (acks < self.number - 2).any():
            if time.monotonic() > deadline:
                late = int(acks.argmin())
                raise TimeoutError(
                    f"waited {self.timeout_s:.0f} s to publish weights: rollout rank {late} of this node has taken publication {acks[late]}, "
                    f"and the next one is {self.number}"
                )
            time.sleep(_POLL_S)


class Receiver:
    """Rollout side: writes into `parameters`, in place. `index` is this rank's among the rollout ranks of its node."""

    def __init__(
        self, plan: Plan, segment: Segment, parameters: Mapping[str, torch.Tensor], index: int, timeout_s: float,
        group: dist.ProcessGroup | None = None, source: int = 0,
    ):  # fmt: skip
        assert tuple(parameters) == plan.names, "parameters and plan name different tensors"
        theirs = int(segment.words(0, _NUM_WORDS)[PLAN])
        assert theirs == plan.fingerprint, "the training and the rollout ranks have planned different tensors"
        self.plan, self.segment, self.parameters = plan, segment, list(parameters.values())
        self.index, self.timeout_s, self.group, self.source = index, timeout_s, group, source
        self.number, self.version = -1, -1

    def receive(self, min_version: int | None = None) -> int | None:
        """Take the newest publication. Returns its version, or None when it is already here. With `min_version`, wait until that is there.

        Raises RuntimeError naming the first tensor whose digest differs from the published one.
        """
        deadline = time.monotonic() + self.timeout_s
        while (number := int(self.segment.words(0, _NUM_WORDS)[ANNOUNCED])) == self.number:
            if min_version is None or min_version <= self.version:
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"waited {self.timeout_s:.0f} s for the training ranks to publish version {min_version}; have {self.version}"
                )
            time.sleep(_POLL_S)
        # Every broadcast must be joined, and in order; in shared memory the newest is enough.
        number = self.number + 1 if self.group is not None else number
        version, *expected = self.plan.half(self.segment, number).tolist()
        received = self._copy(number) if self.group is None else self._join()
        torch.autograd.graph.increment_version(self.parameters)  # written through numpy: packed copies must notice
        for name, mine, published in zip(self.plan.names, received, expected, strict=True):
            if mine != published:
                raise RuntimeError(f"weights of version {version}: {name} arrived with digest {mine:#x}, published with {published:#x}")
        self.number, self.version = number, int(version)
        self.plan.acks(self.segment)[self.index] = number
        if min_version is not None and self.version < min_version:
            return self.receive(min_version)
        return self.version

    def _copy(self, number: int) -> list[int]:
        payloads = (self.plan.payload(self.segment, number, i) for i in range(len(self.parameters)))
        return [copy_and_digest(_bytes(p), payload) for p, payload in zip(self.parameters, payloads, strict=True)]

    def _join(self) -> list[int]:
        digests = []
        for message in self.plan.messages():
            buffer = torch.empty(sum(self.plan.sizes[i] for i in message) // 4)
            dist.broadcast(buffer, src=self.source, group=self.group)
            for i, part in zip(message, buffer.split([self.plan.sizes[i] // 4 for i in message]), strict=True):
                digests.append(copy_and_digest(_bytes(self.parameters[i]), _bytes(part)))
        return digests
