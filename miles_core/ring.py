"""The shared-memory ring between the rollout and training ranks of one node, and the pacing that bounds staleness (DESIGN 4.2, 4.3).

B slots, each with room for one group. A slot's state, who moves it on, and what that needs:

    FREE     -> WRITING   claim()    a rollout rank admits the next group number; nothing is generated without a slot
    WRITING  -> READY     put()      the same rank; record and checksum are written before the state
    READY    -> READING   take()     the node's training leader: the lowest-numbered ready group among the W that follow the oldest unconsumed
    READING  -> FREE      claim()    after release(version), once every rollout rank reports that version live

Releasing only when the new weights are live is what bounds staleness. When a group is admitted, at most B - 1 older ones are outstanding,
and at most W - 1 younger ones can pass it, so no sample is older than (B + W - 2) // P versions when it is trained on, and nothing
ever needs to be discarded. (Idea: windowed FIFO, MiniMax, arXiv 2605.26494, section 6.2.4.)

Concurrency: one POSIX lock guards the moves out of FREE and READING. The kernel frees it when its holder dies, unlike a multiprocessing
lock. All other moves have one possible mover. State words are aligned 8-byte stores, written last; x86 keeps the order of stores. A
writer that died is found by its pid and start time: the next claim() takes over its slot and its group number. A generation counter
makes a reference to an earlier tenant of a slot useless.

Nodes stripe the group numbers: this ring's i-th group is number i * stride + offset.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from miles_core.digest import digest
from miles_core.schema import Trajectory, group_nbytes, read_group, write_group
from miles_core.shm import Segment

FREE, WRITING, READY, READING = range(4)
STATES = ("FREE", "WRITING", "READY", "READING")
# words of the header
NUM_SLOTS, SLOT_BYTES, WINDOW, NUM_ROLLOUT_RANKS, STRIDE, OFFSET, LIMIT, NEXT, HEAD, STOPPED, RECLAIMED, NUM_DONE = range(12)
# words of a slot; INDEX is the group's place in this ring's order, FREE_AT the version whose arrival frees the slot (-1: not yet known)
STATE, GENERATION, INDEX, OWNER, PID, PID_STARTED, NBYTES, CHECKSUM, FREE_AT = range(9)
# words of a rollout rank
LIVE, HEARTBEAT, BLOCKED_NS = range(3)
_ROW = 16  # words: a slot and a rank each have cache lines of their own
_POLL_S = 0.0005
_DEAD_CHECK_S = 1.0


def derive(groups_per_step: int, max_staleness: int) -> tuple[int, int]:
    """(B slots, W window) for P groups a step and the staleness that was asked for.

    S = 0: strict order, B = P. S >= 1: B is at least 2 P, so that a step's worth of groups is made while another is trained on; of the
    slack beyond that half goes into the window, so that a slow group does not hold up finished ones.
    """
    window = 1 + groups_per_step * max(0, max_staleness - 1) // 2
    return groups_per_step * (max_staleness + 1) + 1 - window, window


def staleness_bound(num_slots: int, window: int, groups_per_step: int) -> int:
    """Oldest version that a sample can have when it is trained on, in versions back: attained by some order of completion."""
    return (num_slots + window - 2) // groups_per_step


class Claim(NamedTuple):
    """The right, and the duty, to make one group."""

    group: int
    slot: int
    generation: int


class Ref(NamedTuple):
    """One taken group: readable by every rank of the node until it is released."""

    group: int
    slot: int
    generation: int


class Status(NamedTuple):
    ready: int
    in_flight: int
    reclaimed: int
    bytes: int
    blocked_s: float


class Ring:
    """Create it on the node's leader, attach to it on the other ranks."""

    def __init__(self, segment: Segment):
        self.segment = segment
        self.header = segment.words(0, _ROW)
        self.num_slots, self.num_rollout_ranks = int(self.header[NUM_SLOTS]), int(self.header[NUM_ROLLOUT_RANKS])
        self.slot_bytes = int(self.header[SLOT_BYTES])
        done_at = 8 * _ROW * (1 + self.num_rollout_ranks + self.num_slots)
        self.ranks = segment.words(8 * _ROW, self.num_rollout_ranks, _ROW)
        self.slots = segment.words(8 * _ROW * (1 + self.num_rollout_ranks), self.num_slots, _ROW)
        num_done = int(self.header[NUM_DONE])
        self.done = set(segment.words(done_at, num_done).tolist())  # consumed before this run started
        self.data_at = _page_aligned(done_at + 8 * num_done)
        self.taken: set[int] = set()  # on the leader: consumed in this run, beyond the head
        self.last_dead_check = 0.0
        self.pid_started = _pid_started(os.getpid())

    @classmethod
    def create(
        cls, *, num_slots: int, slot_bytes: int, window: int, num_rollout_ranks: int, num_groups: int,
        done: Iterable[int] = (), stride: int = 1, offset: int = 0,
    ) -> Ring:  # fmt: skip
        """`num_groups`: how many groups this ring hands out in all, so that none is made that will never be trained on. `done`: those
        consumed by an earlier run, as indices into this ring's order."""
        done = sorted(done)
        slot_bytes = _page_aligned(slot_bytes)
        header_bytes = _page_aligned(8 * (_ROW * (1 + num_rollout_ranks + num_slots) + len(done)))
        segment = Segment.create("ring", header_bytes + num_slots * slot_bytes)
        header = segment.words(0, _ROW)
        values = {
            NUM_SLOTS: num_slots, SLOT_BYTES: slot_bytes, WINDOW: window, NUM_ROLLOUT_RANKS: num_rollout_ranks, STRIDE: stride,
            OFFSET: offset, LIMIT: num_groups, NUM_DONE: len(done),
        }  # fmt: skip
        for word, value in values.items():
            header[word] = value
        segment.words(8 * _ROW, num_rollout_ranks, _ROW)[:, LIVE] = -1
        segment.words(8 * _ROW * (1 + num_rollout_ranks + num_slots), len(done))[:] = done
        return cls(segment)

    @classmethod
    def attach(cls, path: str) -> Ring:
        return cls(Segment.attach(path))

    # ---- rollout ranks ------------------------------------------------------------------------------------------------------------

    def claim(self, rank: int) -> Claim | None:
        """The next group number with a slot for it, or None: no slot is free, or every group has been handed out. Never waits long."""
        self.ranks[rank, HEARTBEAT] = time.monotonic_ns()
        with self._lock():
            slot = self._take_over_dead()
            if slot is None:
                slot = self._admit()
            if slot is None:
                return None
            row = self.slots[slot]
            row[OWNER], row[PID], row[PID_STARTED], row[FREE_AT] = rank, os.getpid(), self.pid_started, -1
            row[GENERATION] += 1
            row[STATE] = WRITING
            return Claim(self.number(int(row[INDEX])), slot, int(row[GENERATION]))

    def put(self, claim: Claim, group: list[Trajectory]) -> None:
        """Serialise a finished group into its slot and make it READY. Raises ValueError when it is larger than a slot."""
        row, nbytes = self.slots[claim.slot], group_nbytes(group)
        assert row[STATE] == WRITING and row[GENERATION] == claim.generation, f"{claim} is not ours any more: {self._describe(claim.slot)}"
        if nbytes > self.slot_bytes:
            raise ValueError(f"group {claim.group} takes {nbytes} bytes, a slot has {self.slot_bytes}; raise --max-context")
        data = self._data(claim.slot, nbytes)
        write_group(group, data)
        row[NBYTES], row[CHECKSUM] = nbytes, digest(data)
        row[STATE] = READY

    def set_live(self, rank: int, version: int) -> None:
        """This rollout rank now samples from `version`."""
        self.ranks[rank, LIVE] = version

    def add_blocked(self, rank: int, seconds: float) -> None:
        """Book time in which the rank had nothing to do because no slot was free."""
        self.ranks[rank, BLOCKED_NS] += int(seconds * 1e9)

    # ---- training ranks -----------------------------------------------------------------------------------------------------------

    def ready(self, count: int) -> bool:
        """Whether `take(count)` would return at once."""
        return self._pick(count) is not None

    def take(self, count: int, timeout_s: float) -> list[Ref]:
        """Leader only: the next `count` groups, each the lowest-numbered ready one among the W that follow the oldest unconsumed one."""
        deadline = time.monotonic() + timeout_s
        while (picked := self._pick(count)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:.0f} s for group {self.number(int(self.header[HEAD]))}: {self._why_waiting()}")
            time.sleep(_POLL_S)
        slots, self.taken, self.header[HEAD] = picked
        for slot in slots:
            self.slots[slot, STATE] = READING
        return [Ref(self.number(int(self.slots[s, INDEX])), s, int(self.slots[s, GENERATION])) for s in slots]

    def read(self, ref: Ref) -> list[Trajectory]:
        """The group behind a reference, as views of the slot (valid until it is released)."""
        row = self.slots[ref.slot]
        assert row[STATE] == READING and row[GENERATION] == ref.generation, f"{ref} is stale: {self._describe(ref.slot)}"
        data = self._data(ref.slot, int(row[NBYTES]))
        if digest(data) != row[CHECKSUM]:
            raise RuntimeError(f"group {ref.group} in slot {ref.slot} is corrupt: its checksum does not match")
        return read_group(data)

    def release(self, refs: Iterable[Ref], version: int) -> None:
        """Leader only: the slots become free as soon as every rollout rank of the node samples from `version` or later."""
        for ref in refs:
            row = self.slots[ref.slot]
            assert row[STATE] == READING and row[GENERATION] == ref.generation, f"{ref} is stale: {self._describe(ref.slot)}"
            row[FREE_AT] = version

    def stop(self) -> None:
        self.header[STOPPED] = 1

    @property
    def stopped(self) -> bool:
        return bool(self.header[STOPPED])

    def consumed(self) -> list[int]:
        """Leader only: indices of all groups taken so far, by this run and before it."""
        return sorted({*range(int(self.header[HEAD])), *self.taken, *self.done})

    def status(self) -> Status:
        states = self.slots[:, STATE]
        return Status(
            ready=int((states == READY).sum()), in_flight=int((states == WRITING).sum()), reclaimed=int(self.header[RECLAIMED]),
            bytes=int(self.slots[states >= READY, NBYTES].sum()), blocked_s=float(self.ranks[:, BLOCKED_NS].sum()) / 1e9,
        )  # fmt: skip

    # ---- inside -------------------------------------------------------------------------------------------------------------------

    def number(self, index: int) -> int:
        """Global group number of this ring's `index`-th group."""
        return index * int(self.header[STRIDE]) + int(self.header[OFFSET])

    @contextmanager
    def _lock(self) -> Iterator[None]:
        # Per process and inode: the kernel frees it when the holder dies. No other descriptor of this file is closed meanwhile.
        fcntl.lockf(self.segment.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.segment.fd, fcntl.LOCK_UN)

    def _admit(self) -> int | None:
        """A free slot, now tenanted by the next group number. Locked."""
        header, slots = self.header, self.slots
        live = int(self.ranks[:, LIVE].min())
        released = (slots[:, STATE] == READING) & (slots[:, FREE_AT] >= 0) & (slots[:, FREE_AT] <= live)
        slots[released, STATE] = FREE
        while int(header[NEXT]) in self.done:
            header[NEXT] += 1
        free = np.flatnonzero(slots[:, STATE] == FREE)
        if not len(free) or header[NEXT] >= header[LIMIT]:
            return None
        slots[free[0], INDEX] = header[NEXT]
        header[NEXT] += 1
        return int(free[0])

    def _take_over_dead(self) -> int | None:
        """A slot whose writer no longer exists, looked for once a second. Its group number is made again. Locked."""
        now = time.monotonic()
        if now - self.last_dead_check < _DEAD_CHECK_S:
            return None
        for slot in np.flatnonzero(self.slots[:, STATE] == WRITING):
            if _pid_started(int(self.slots[slot, PID])) != self.slots[slot, PID_STARTED]:
                self.header[RECLAIMED] += 1
                return int(slot)  # look again at once: it may have had more
        self.last_dead_check = now
        return None

    def _pick(self, count: int) -> tuple[list[int], set[int], int] | None:
        """(slots, consumed beyond the new head, new head) of the next `count` groups, or None when they are not all ready."""
        ready = {int(self.slots[s, INDEX]): int(s) for s in np.flatnonzero(self.slots[:, STATE] == READY)}
        head, taken, picked = int(self.header[HEAD]), set(self.taken), []
        for _ in range(count):
            while head in taken or head in self.done:
                taken.discard(head)
                head += 1
            index = next((i for i in range(head, head + int(self.header[WINDOW])) if i in ready), None)
            if index is None:
                return None
            picked.append(ready.pop(index))
            taken.add(index)
        return picked, taken, head

    def _data(self, slot: int, nbytes: int) -> memoryview:
        start = self.data_at + slot * self.slot_bytes
        return self.segment.buffer[start : start + nbytes]

    def _describe(self, slot: int) -> str:
        row = self.slots[slot]
        return f"slot {slot} holds group {self.number(int(row[INDEX]))}, generation {row[GENERATION]}, {STATES[row[STATE]]}"

    def _why_waiting(self) -> str:
        head = int(self.header[HEAD])
        slots = np.flatnonzero((self.slots[:, INDEX] == head) & (self.slots[:, STATE] != FREE))
        beats = [
            f"rank {r} {(time.monotonic_ns() - int(b)) / 1e9:.1f} s ago" if b else f"rank {r} never"
            for r, b in enumerate(self.ranks[:, HEARTBEAT])
        ]
        signs = "last sign of life of the rollout ranks: " + ", ".join(beats)
        if not len(slots):
            return f"no rollout rank has claimed it; {signs}"
        row = self.slots[slots[0]]
        return f"rollout rank {row[OWNER]} (pid {row[PID]}) holds it in slot {slots[0]}, state {STATES[row[STATE]]}; {signs}"


def _page_aligned(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def _pid_started(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if there is none: with the pid it names a process for ever."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold spaces
    return 0 if fields[0] == "Z" else int(fields[19])
