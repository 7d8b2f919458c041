"""The shared-memory ring between the rollout and training ranks of one node, and the pacing that bounds staleness (DESIGN 4.2, 4.3).

B slots, each with room for one group. Who moves a slot on, who waits for that, and what ends the wait:

    state     moved on by                                 waited for by          until
    FREE      claim()    any rollout rank, with the lock  idle rollout ranks     the version of its release is live on every rollout rank
    WRITING   put()      the rank that claimed it         the trainer in take()  its group is generated and rewarded
    READY     take()     the node's training leader       nobody                 it is one of the P lowest ones that the window admits
    READING   release()  the same                         idle rollout ranks     the weights that were trained on it are published

A slot is released only with the weights that were trained on it, and given out again only when every rollout rank of the node reports
them live. So when a group is admitted, at most B - 1 older ones are outstanding, and at most W - 1 younger ones can pass it: take()
reaches no further than W groups from the oldest unconsumed one. Hence no sample is older than (B + W - 2) // P versions when it is
trained on, and nothing ever needs to be discarded. (Idea: windowed FIFO, MiniMax, arXiv 2605.26494, section 6.2.4.)

Any process may be killed at any instant. A slot's word is 4 * index + state, so that one aligned 8-byte store, the last of each move,
hands the slot over. Everything else follows from these words: which group is next, which ones are consumed. A writer that died is
known by its pid and start time; the next claim() takes over its slot and its group number. A generation counter, one up at every
claim, makes references to an earlier tenant useless.

The lock is a POSIX record lock: the kernel frees it with its holder, unlike a multiprocessing.Lock. It keeps claims apart, and gives
take() a view of all slots at one instant. The other moves need none: only one process can make them, and x86 keeps the order of stores.

`index` counts this ring's groups. Nodes stripe the group numbers: index i is number i * stride + offset.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from miles_core.digest import copy_and_digest, digest
from miles_core.schema import Trajectory, group_nbytes, read_group, write_group
from miles_core.shm import Segment, process_start
from miles_core.status import BLOCKED_NS, EVALUATIONS, LIVE, MADE_AGAIN, PLAYED, RESAMPLED, RESTORED, ROW, TRAINER, WAITING, StatusBoard

FREE, WRITING, READY, READING = range(4)
STATES = ("FREE", "WRITING", "READY", "READING")
# words of the header
NUM_SLOTS, SLOT_BYTES, DATA_AT, WINDOW, NUM_ROLLOUT_RANKS, NUM_ROWS, STRIDE, OFFSET, LIMIT, NUM_DONE = range(10)
ASKED, STOPPED_AT, RECLAIMED, LOCKED_BY, TIMEOUT_MS = range(10, 15)
# words of a slot; OPENS_AT is the version it was released with
WORD, GENERATION, OWNER, PID, PID_STARTED, NBYTES, CHECKSUM, OPENS_AT = range(8)
COUNTS = {"restored": RESTORED, "made_again": MADE_AGAIN, "resampled": RESAMPLED}
BOARD_AT = 8 * ROW  # byte at which the rows of the ranks begin, after the header; each row and each slot has cache lines of its own
_POLL_S = 0.0005
_DEAD_CHECK_S = 0.1  # a look at another process takes 20 us

_rings_of_this_process: weakref.WeakValueDictionary[tuple[int, int], Ring] = weakref.WeakValueDictionary()


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
    restored: int
    made_again: int
    resampled: int


class Ring:
    """Create it on the node's leader, attach to it on the other ranks. One object a process, used by one thread at a time."""

    def __init__(self, segment: Segment):
        # A process that closes any descriptor of a file loses its POSIX locks on it: two objects would undo each other's.
        key = (os.getpid(), os.fstat(segment.fd).st_ino)
        assert key not in _rings_of_this_process, f"this process already has the ring at {segment.path} open"
        _rings_of_this_process[key] = self
        self.segment = segment
        self.header = segment.words(0, ROW)
        self.num_slots, self.num_rollout_ranks = int(self.header[NUM_SLOTS]), int(self.header[NUM_ROLLOUT_RANKS])
        self.slot_bytes, self.data_at, self.window = (int(self.header[word]) for word in (SLOT_BYTES, DATA_AT, WINDOW))
        num_rows = int(self.header[NUM_ROWS])
        slots_at, done_at = _offsets(self.num_slots, num_rows)
        self.board = StatusBoard(segment.words(BOARD_AT, num_rows, ROW), self.num_rollout_ranks)
        self.slots = segment.words(slots_at, self.num_slots, ROW)
        self.done = set(segment.words(done_at, int(self.header[NUM_DONE])).tolist())  # consumed before this run started
        self.pid, self.pid_started = os.getpid(), process_start(os.getpid())
        self.timeout_s, self.next_dead_check = int(self.header[TIMEOUT_MS]) / 1000, 0.0
        self.mutex = threading.Lock()  # POSIX locks do not keep the threads of a process apart

    @classmethod
    def create(
        cls, *, num_slots: int, slot_bytes: int, window: int, num_rollout_ranks: int, num_groups: int,
        num_trainers: int = 1, done: Iterable[int] = (), stride: int = 1, offset: int = 0, timeout_s: float = 60.0,
    ) -> Ring:  # fmt: skip
        """`num_groups`: where this ring's numbering ends, so that no group is made that will never be trained on. `done`: indices that an
        earlier run consumed. `timeout_s`: of every wait. Raises ValueError when there is not enough memory."""
        done, slot_bytes = sorted(done), _page_aligned(slot_bytes)
        num_rows = num_rollout_ranks + num_trainers
        done_at = _offsets(num_slots, num_rows)[1]
        data_at = _page_aligned(done_at + 8 * len(done))
        fix = "; lower --max-context, --samples-per-prompt, --max-branches or --prompts-per-step"
        segment = Segment.create("ring", data_at + num_slots * slot_bytes, fix)
        values = {
            NUM_SLOTS: num_slots, SLOT_BYTES: slot_bytes, DATA_AT: data_at, WINDOW: window, NUM_ROLLOUT_RANKS: num_rollout_ranks,
            NUM_ROWS: num_rows, STRIDE: stride, OFFSET: offset, LIMIT: num_groups, NUM_DONE: len(done), STOPPED_AT: -1,
            TIMEOUT_MS: round(1000 * timeout_s),
        }  # fmt: skip
        segment.words(0, ROW)[list(values)] = list(values.values())
        segment.words(done_at, len(done))[:] = done
        ring = cls(segment)
        ring.board.rows[:, LIVE] = -1  # OPENS_AT is 0: nothing is admitted before the first publication is live
        ring.slots[:, WORD] = _word(-1, FREE)
        ring.board.beat(TRAINER, "starting")
        return ring

    @classmethod
    def attach(cls, path: str) -> Ring:
        return cls(Segment.attach(path))

    # ---- rollout ranks ------------------------------------------------------------------------------------------------------------

    def claim(self, rank: int) -> Claim | None:
        """The next group that has a slot, first of all one whose writer died; None when no slot is free, or all have been handed out."""
        assert os.getpid() == self.pid, "a ring does not survive a fork: attach to it in the child"
        self.board.beat(rank, "generating")
        dead = self._dead_writers()
        with self._lock():
            words = self.slots[:, WORD].copy()
            orphan = self._orphan(words, dead) if dead else None
            slot = self._free_slot(words) if orphan is None else orphan
            if slot is None:
                return None
            index = self._next_index(words) if orphan is None else int(words[slot] >> 2)
            row = self.slots[slot]
            row[GENERATION] += 1
            row[OWNER], row[PID], row[PID_STARTED] = rank, self.pid, self.pid_started
            row[WORD] = _word(index, WRITING)  # last: a claimant killed before this line has changed nothing that counts
            self.header[RECLAIMED] += orphan is not None
            return Claim(self.number(index), slot, int(row[GENERATION]))

    def put(self, claim: Claim, group: list[Trajectory]) -> None:
        """Serialise a finished group into its slot and make it READY. Raises ValueError when it is larger than a slot."""
        self._put(claim, group_nbytes(group), lambda data: write_group(group, data))

    def put_bytes(self, claim: Claim, group: np.ndarray) -> None:
        """`put` of a group that is serialised already (schema.write_group), uint8."""
        self._put(claim, len(group), lambda data: copy_and_digest(np.frombuffer(data, np.uint8), group))

    def _put(self, claim: Claim, nbytes: int, write: Callable[[memoryview], int]) -> None:
        row = self._tenant(claim, WRITING)
        if nbytes > self.slot_bytes:
            raise ValueError(f"group {claim.group} takes {nbytes} bytes, a slot of the ring has {self.slot_bytes}; raise --max-context")
        row[NBYTES], row[CHECKSUM] = nbytes, write(self._data(claim.slot, nbytes))
        row[WORD] += READY - WRITING  # last: only now can anyone see what was written

    def set_live(self, rank: int, version: int) -> None:
        """From now on this rollout rank samples from `version` or later."""
        row = self.board.rollout[rank]
        assert version >= row[LIVE], f"rollout rank {rank} went from version {row[LIVE]} back to {version}"
        row[LIVE] = version

    def add_blocked(self, rank: int, seconds: float) -> None:
        """Book time in which the rank had nothing to do because no slot was free."""
        self.board.rollout[rank, BLOCKED_NS] += int(seconds * 1e9)
        self.board.beat(rank, "waiting for a free slot")

    def count(self, rank: int, *, restored: int = 0, made_again: int = 0, resampled: int = 0) -> None:
        """Book groups taken from the journal, groups made again that stood there in vain, and samples drawn again."""
        self.board.rollout[rank, [RESTORED, MADE_AGAIN, RESAMPLED]] += restored, made_again, resampled

    def set_episodes(self, rank: int, waiting: int, played: int, evaluations: int) -> None:
        """Of a rank whose episodes other processes play: how many wait, how many are being played, how many evaluations it has done."""
        self.board.rollout[rank, [WAITING, PLAYED, EVALUATIONS]] = waiting, played, evaluations

    def episodes(self) -> list[list[int]]:
        """waiting, played and evaluations, of each rollout rank of the node."""
        return self.board.rollout[:, [WAITING, PLAYED, EVALUATIONS]].T.tolist()

    # ---- training ranks -----------------------------------------------------------------------------------------------------------

    def ready(self, count: int) -> bool:
        """Whether `take(count)` would return at once. Once true, it stays so until the leader takes."""
        return self._pick(count) is not None

    def take(self, count: int) -> list[Ref]:
        """Leader only: the next `count` groups, each the lowest-numbered ready one among the W that follow the oldest unconsumed one.

        Empty when the run is asked to stop before they are there. Raises TimeoutError when no group has become ready for `timeout_s`.
        """
        check = self.deadline(count)
        while (picked := self._pick(count)) is None:
            if self.asked:
                return []
            self.board.beat(TRAINER, "waiting for groups")
            check()
            time.sleep(_POLL_S)
        refs = []
        for slot in picked:
            row = self.slots[slot]
            row[WORD] += READING - READY
            refs.append(Ref(self.number(int(row[WORD] >> 2)), slot, int(row[GENERATION])))
        return refs

    def give_back(self, refs: Iterable[Ref]) -> None:
        """Leader only: undo `take`, of groups that will not be trained on now."""
        for ref in refs:
            self._tenant(ref, READING)[WORD] += READY - READING

    def deadline(self, count: int) -> Callable[..., None]:
        """Call it again and again while waiting for `count` groups: `check(busy)` raises TimeoutError, saying whose group is missing, when
        for so long none has become ready and nobody who waits was `busy` making one."""
        num_ready, until = -1, 0.0

        def check(busy: bool = False) -> None:
            nonlocal num_ready, until
            now_ready = self.status().ready
            if busy or now_ready != num_ready:
                num_ready, until = now_ready, time.monotonic() + self.timeout_s
            elif time.monotonic() > until:
                raise TimeoutError(f"waited {self.timeout_s:g} s for {self._describe_wait()}; {num_ready} of {count} groups are ready")

        return check

    def read(self, ref: Ref) -> list[Trajectory]:
        """The group behind a reference, as views of the slot, valid until its release. Raises RuntimeError when its bytes are damaged."""
        row = self._tenant(ref, READING)
        data = self._data(ref.slot, int(row[NBYTES]))
        if digest(data) != row[CHECKSUM]:
            raise RuntimeError(f"group {ref.group} in slot {ref.slot} is corrupt: its checksum does not match")
        return read_group(data)

    def release(self, refs: Iterable[Ref], version: int) -> None:
        """Leader only: the slots may be claimed as soon as every rollout rank of the node samples from `version` or later."""
        for ref in refs:
            row = self._tenant(ref, READING)
            row[OPENS_AT] = version
            row[WORD] += FREE - READING  # last: the slot is free for claim() from here on

    def ask_to_stop(self, at_once: bool = False) -> None:
        """Any rank of the node: this is to be the last step; `at_once`: nor should it be finished."""
        self.header[ASKED] = max(self.header[ASKED], 1 + at_once)

    @property
    def asked(self) -> int:
        """0: nobody has; 1: no step should begin; 2: nor be finished."""
        return int(self.header[ASKED])

    def stop(self, version: int) -> None:
        """Training ranks: tell the rollout ranks that nothing more is wanted, after this version."""
        self.header[STOPPED_AT] = version

    @property
    def stopped_at(self) -> int | None:
        """The last version of this run, once it is known."""
        return None if self.header[STOPPED_AT] < 0 else int(self.header[STOPPED_AT])

    def consumed(self) -> list[int]:
        """Indices of all groups taken so far, by this run and before it: what `done` of the next run must be."""
        with self._lock():
            words = self.slots[:, WORD].copy()
        waiting = words[np.isin(words & 3, (WRITING, READY))] >> 2
        return sorted(({*range(int(words.max() >> 2) + 1)} | self.done) - set(waiting.tolist()))

    # ---- what is going on ---------------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        states = self.slots[:, WORD] & 3
        return Status(
            ready=int((states == READY).sum()), in_flight=int((states == WRITING).sum()), reclaimed=int(self.header[RECLAIMED]),
            bytes=int(self.slots[states >= READY, NBYTES].sum()), blocked_s=float(self.board.rollout[:, BLOCKED_NS].sum()) / 1e9,
            **{name: int(self.board.rollout[:, word].sum()) for name, word in COUNTS.items()},
        )  # fmt: skip

    def number(self, index: int) -> int:
        """Global group number of this ring's `index`-th group."""
        return index * int(self.header[STRIDE]) + int(self.header[OFFSET])

    # ---- inside -------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _lock(self) -> Iterator[None]:
        deadline = time.monotonic() + self.timeout_s  # it is held for microseconds
        with self.mutex:
            while True:
                try:
                    fcntl.lockf(self.segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        who = f"process {self.header[LOCKED_BY]}"
                        raise TimeoutError(f"waited {self.timeout_s:g} s for the ring's lock: is {who} stopped?") from None
                    time.sleep(2e-5)
            self.header[LOCKED_BY] = self.pid
            try:
                yield
            finally:
                fcntl.lockf(self.segment.fd, fcntl.LOCK_UN)

    def _next_index(self, words: np.ndarray) -> int:
        """The group to admit next. Words keep the index of their last tenant, so the largest is the last one admitted."""
        index = int(words.max() >> 2) + 1
        while index in self.done:
            index += 1
        return index

    def _free_slot(self, words: np.ndarray) -> int | None:
        """A slot for the next group, if one is free and there is a next group."""
        free = np.flatnonzero((words & 3 == FREE) & (self.slots[:, OPENS_AT] <= self.board.rollout[:, LIVE].min()))
        return int(free[0]) if len(free) and self._next_index(words) < self.header[LIMIT] else None

    def _dead_writers(self) -> set[tuple[int, int]]:
        """(pid, start time) of writers that no longer exist. Looks again at once where it found one: it may have had more slots."""
        now = time.monotonic()
        if now < self.next_dead_check:
            return set()
        writing = self.slots[self.slots[:, WORD] & 3 == WRITING]
        writers = set(map(tuple, writing[:, [PID, PID_STARTED]].tolist())) - {(self.pid, self.pid_started)}
        dead = {(pid, started) for pid, started in writers if process_start(pid) != started}
        if not dead:
            self.next_dead_check = now + _DEAD_CHECK_S
        return dead

    def _orphan(self, words: np.ndarray, dead: set[tuple[int, int]]) -> int | None:
        """The slot with the oldest group of a dead writer. Nobody has taken it over if it still bears the dead one's pid and start time."""
        for slot in np.argsort(words).tolist():
            if words[slot] & 3 == WRITING and tuple(self.slots[slot, [PID, PID_STARTED]].tolist()) in dead:
                return slot
        return None

    def _pick(self, count: int) -> list[int] | None:
        """Slots of the next `count` groups, or None when they are not all ready.

        Admission is in order, so a group below a READY one is consumed, READY or WRITING. The oldest unconsumed group that taking READY
        ones cannot consume is the oldest WRITING one: the window reaches W from there, and up to its end the lowest go first.
        """
        with self._lock():  # else a group claimed and finished while we look could be seen without an older one claimed just before
            words = self.slots[:, WORD].copy()
        index, state = words >> 2, words & 3
        end = index[state == WRITING].min(initial=np.iinfo(np.int64).max - self.window) + self.window
        ready = np.flatnonzero((state == READY) & (index < end))
        return ready[np.argsort(index[ready])][:count].tolist() if len(ready) >= count else None

    def _tenant(self, ticket: Claim | Ref, state: int) -> np.ndarray:
        """The row of a slot, which must still be as its claim or reference says."""
        row = self.slots[ticket.slot]
        word, generation = int(row[WORD]), int(row[GENERATION])
        assert (word & 3, self.number(word >> 2), generation) == (state, ticket.group, ticket.generation), (
            f"{ticket} is stale: slot {ticket.slot} holds group {self.number(word >> 2)}, generation {generation}, {STATES[word & 3]}"
        )
        return row

    def _data(self, slot: int, nbytes: int) -> memoryview:
        start = self.data_at + slot * self.slot_bytes
        return self.segment.buffer[start : start + nbytes]

    def _describe_wait(self) -> str:
        """The group that take() waits for, whose it is, and when every rollout rank was last heard of."""
        words = self.slots[:, WORD].copy()
        writing = np.flatnonzero(words & 3 == WRITING)
        if len(writing):
            slot = int(writing[np.argmin(words[writing])])
            row = self.slots[slot]
            wait = f"group {self.number(int(words[slot] >> 2))} (slot {slot}, WRITING, rollout rank {row[OWNER]}, pid {row[PID]})"
        else:
            live = self.board.rollout[:, LIVE].tolist()
            wait = f"group {self.number(self._next_index(words))}, which no rank has claimed (live versions: {live})"
        return "; ".join([wait, *map(self.board.describe, range(self.num_rollout_ranks))])


def _word(index: int, state: int) -> int:
    return 4 * index + state


def _offsets(num_slots: int, num_rows: int) -> tuple[int, int]:
    """Bytes at which the rows of the slots and the list of groups done begin; before them stand the header and the rows of the ranks."""
    slots_at = BOARD_AT + 8 * ROW * num_rows
    return slots_at, slots_at + 8 * ROW * num_slots


def _page_aligned(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096
