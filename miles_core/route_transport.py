"""How recorded routes get from the rollout rank that holds them to the training rank that packs their trajectory, over the process group.

    kept = RouteStore(rank, group)                       # rollout rank
    kept.keep(trajectory, payload)                       # a finished trajectory: bytes stay here, the ring carries owner, size and digest
    kept.serve(mailbox.poll(index))                      # between decode steps: send, or drop, what the trainers ask for

    wanted = plan(shares, trainers, dropped)             # training leader, once a step: who needs what
    mailbox.post(wanted, timeout_s)
    fetch = Fetch(mine, store, group, moe, timeout_s)    # each training rank: receives are posted at once ...
    batch = fetch.attach(batch)                          # ... and waited for when a micro-batch needs them

The mailbox is shared memory of a node: for every rollout rank one list of requests, replaced when the rank has served it. A colocated rank
needs none: every rank knows the plan and serves it before it waits. Two ranks exchange their messages in order of (group, sample,
sibling) on both sides, which is all that NCCL can tell them apart by.

Nothing here ever routes anew: what is missing, damaged or of another size stops the run before anything was trained on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from miles_core.digest import digest
from miles_core.model.moe import MoEConfig
from miles_core.routing import decode
from miles_core.schema import NO_OWNER, Batch, Trajectory, name_of
from miles_core.shm import Segment

Key = tuple[int, int, int]  # Trajectory.key
DROP = -1  # as destination: nobody trains on it
POSTED, SERVED, COUNT = range(3)  # words of a rollout rank in the mailbox
_ROW = 8
_POLL_S = 0.0005


class Want(NamedTuple):
    """Rank `destination` wants the routes of a trajectory, so many bytes, that rank `owner` holds; or DROP."""

    group: int
    sample: int
    sibling: int
    owner: int
    destination: int
    nbytes: int


def plan(shares: Sequence[Sequence[Trajectory]], trainers: Sequence[int], dropped: Iterable[Trajectory]) -> list[Want]:
    """Every request of a step, in order of (group, sample, sibling). `shares[i]` is what rank `trainers[i]` packs."""
    pairs = [(rank, t) for rank, share in zip(trainers, shares, strict=True) for t in share] + [(DROP, t) for t in dropped]
    wanted = (Want(*t.key, t.route_owner, rank, t.route_bytes) for rank, t in pairs)
    return sorted(want for want in wanted if want.owner != NO_OWNER)


class Mailbox:
    """Create it on the node's training leader, attach to it on its rollout ranks (global ranks `owners`)."""

    def __init__(self, segment: Segment):
        self.segment = segment
        num_owners, self.capacity = segment.words(0, 2).tolist()
        self.words = segment.words(8 * _ROW, num_owners, _ROW)
        self.owners = segment.words(8 * _ROW * (1 + num_owners), num_owners).tolist()
        self.entries = segment.words(8 * (_ROW * (1 + num_owners) + num_owners), num_owners, self.capacity, len(Want._fields))

    @classmethod
    def create(cls, owners: Sequence[int], capacity: int) -> Mailbox:
        """`capacity`: trajectories of a step."""
        words = _ROW * (1 + len(owners)) + len(owners) * (1 + capacity * len(Want._fields))
        segment = Segment.create("routes", 8 * words)
        segment.words(0, 2)[:] = len(owners), capacity
        segment.words(8 * _ROW * (1 + len(owners)), len(owners))[:] = owners
        return cls(segment)

    @classmethod
    def attach(cls, path: str) -> Mailbox:
        return cls(Segment.attach(path))

    def post(self, wanted: Sequence[Want], timeout_s: float) -> None:
        """Leader only. Raises TimeoutError naming the rollout rank that has not served the last list."""
        deadline = time.monotonic() + timeout_s
        for owner, words, entries in zip(self.owners, self.words, self.entries, strict=True):
            mine = [want for want in wanted if want.owner == owner]
            while words[SERVED] < words[POSTED]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {timeout_s:g} s for rollout rank {owner} to serve {words[COUNT]} requests for routes")
                time.sleep(_POLL_S)
            entries[: len(mine)] = np.array(mine, np.int64).reshape(-1, len(Want._fields))
            words[COUNT] = len(mine)
            words[POSTED] += 1  # last: only now does the rank look

    def poll(self, rank: int) -> list[Want] | None:
        """The requests to this rank that it has not seen yet."""
        index = self.owners.index(rank)
        words = self.words[index]
        if words[SERVED] == words[POSTED]:
            return None
        wanted = [Want(*entry) for entry in self.entries[index, : words[COUNT]].tolist()]
        words[SERVED] += 1
        return wanted


class RouteStore:
    """The routes of this rank's trajectories, on its device, from their end until they are fetched."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None):
        self.rank, self.group = rank, group
        self.rows: dict[Key, torch.Tensor] = {}
        self.sending: list[tuple[dist.Work, torch.Tensor]] = []

    def keep(self, trajectory: Trajectory, payload: torch.Tensor) -> None:
        """Hold these bytes, and say so in the trajectory."""
        self.rows[trajectory.key] = payload
        trajectory.route_owner, trajectory.route_bytes = self.rank, len(payload)
        trajectory.route_digest = digest(payload.cpu().numpy())

    def serve(self, wanted: Sequence[Want] | None) -> None:
        """Send or drop what is asked of this rank; what a rank asks of itself stays for `Fetch` to take."""
        if wanted is None:
            return
        for work, _ in self.sending:  # of the step before, whose receivers have gone on since
            work.wait()
        self.sending = []
        for want in wanted:
            if want.owner != self.rank or want.destination == self.rank:
                continue
            payload = self.take((want.group, want.sample, want.sibling))
            if want.destination != DROP:
                assert len(payload) == want.nbytes, (want, len(payload))  # the receiver has made room for so many
                self.sending.append((dist.isend(payload, want.destination, self.group), payload))

    def take(self, key: Key) -> torch.Tensor:
        payload = self.rows.pop(key, None)
        if payload is None:
            raise RuntimeError(f"rank {self.rank} has no routes of {name_of(*key)}")
        return payload


class Fetch:
    """The routes of the trajectories that this rank trains on: received in the background, checked when they are used."""

    def __init__(
        self, mine: Sequence[Trajectory], store: RouteStore | None, group: dist.ProcessGroup, moe: MoEConfig, device: torch.device,
        timeout_s: float,
    ):  # fmt: skip
        self.moe, self.timeout_s, self.waited_s = moe, timeout_s, 0.0
        self.trajectories = {t.key: (len(t.tokens), t.route_owner, t.route_digest) for t in mine}
        self.arriving: dict[Key, tuple[torch.Tensor, dist.Work | None]] = {}
        for t in sorted(mine, key=attrgetter("key")):
            if t.route_owner == NO_OWNER:
                raise RuntimeError(f"{t.name} came without routes while --routing-replay is on: nothing was trained on it")
            if store is not None and t.route_owner == store.rank:
                self.arriving[t.key] = (store.take(t.key), None)
                continue
            payload = torch.empty(t.route_bytes, dtype=torch.uint8, device=device)
            with self._arrival(t.key, t.route_owner):  # which also fails here, where the owner is known to have died
                self.arriving[t.key] = (payload, dist.irecv(payload, t.route_owner, group))

    def attach(self, batch: Batch) -> Batch:
        """The batch with its routes; a dummy batch has none. Raises RuntimeError naming the trajectory whose rows are late or damaged."""
        if not self.trajectories or int(batch.ids_S3[0, 0]) < 0:
            return batch
        lengths_S = batch.cu_seqlens_S1.diff().tolist()
        rows, recorded = zip(*(self._rows(tuple(key), n) for key, n in zip(batch.ids_S3.tolist(), lengths_S, strict=True)), strict=True)
        return replace(batch, routes_TLK=torch.cat(rows), routed_T=torch.cat(recorded))

    def drop(self) -> None:
        """Receive what has not been used, and forget it."""
        for key, (_, work) in self.arriving.items():
            if work is not None:
                with self._arrival(key, self.trajectories[key][1]):
                    work.wait(timedelta(seconds=self.timeout_s))
        self.arriving.clear()

    def _rows(self, key: Key, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload, work = self.arriving.pop(key)
        length, owner, expected = self.trajectories[key]
        what, started = _name(key, owner), time.perf_counter()
        assert length == num_tokens, (what, length, num_tokens)
        if work is not None:
            with self._arrival(key, owner):
                work.wait(timedelta(seconds=self.timeout_s))
        self.waited_s += time.perf_counter() - started
        if digest(payload.cpu().numpy()) != expected:
            raise RuntimeError(f"{what} arrived damaged: the checksum does not match; nothing was trained on it")
        try:
            return decode(payload, num_tokens, self.moe)
        except ValueError as error:
            raise RuntimeError(f"{what}: {error}") from error

    @contextmanager
    def _arrival(self, key: Key, owner: int) -> Iterator[None]:
        """Say whose routes they are that could not be received."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"{_name(key, owner)} did not arrive (the deadline is {self.timeout_s:g} s): {error}") from error


def _name(key: Key, owner: int) -> str:
    return f"routes of {name_of(*key)} from rank {owner}"
