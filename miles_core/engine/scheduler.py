"""Which tokens the next forward computes. Policy and page bookkeeping, no tensors.

One rule covers prefill and decode: a running sequence has tokens whose KV is not computed yet; each step computes some of them, and
samples the next token from the last one once none is left. Order within the budget of `max_batch_tokens`:

1. sequences with one token left (decode), oldest first;
2. sequences with more (prefill, or prefill again), in chunks, oldest first;
3. waiting sequences, oldest first, while a lane is free and the pages for all their tokens are there.

When a running sequence needs a page and there is none, the youngest goes back to wait and is computed again later; what it has sampled
stays as sampled. The oldest always advances, and alone it always fits (`Engine.add` checks), so nothing can deadlock.

Siblings (equal prompts) never prefill side by side: the first does, the others fork from it in the step that completes its prompt, or are
matched to its pages later.

Departs from nano-vllm's Scheduler: prefill and decode in one forward, forks, columns instead of objects in the hot path.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kernels.attention import PAGE
from miles_core.engine.cache import ROOT, Key, PagePool
from miles_core.engine.sequence import MIXED, Counters, Sequence, Table


class Copy(NamedTuple):
    """The first `count` positions of page `source` go to page `target`."""

    source: int
    target: int
    count: int


class Save(NamedTuple):
    """The routes of the first `reached` tokens of a sequence stand in `pages` that it has just given back."""

    sequence: Sequence
    pages: np.ndarray
    reached: int


class Restore(NamedTuple):
    """The routes that a sequence has already go to its new pages, from position `start` on."""

    sequence: Sequence
    lane: int
    start: int


class Fork(NamedTuple):
    """`lane` samples its first token from the row of `leader`'s last prompt token, and gets a copy of its prompt's tail afterwards."""

    lane: int
    leader: int
    tail: Copy | None


@dataclass
class Plan:
    """One forward: `counts` tokens of each of `lanes` (int64 [S]), starting at the first one not computed.

    Before it, `new_pages` are cleared and `copies` and `restores` made; after it, `forks`.
    """

    lanes: np.ndarray
    counts: np.ndarray
    new_pages: list[int] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    decodes: bool = False  # whether every one of `lanes` computes its last token, which no sequence has computed before
    recycled: bool = False  # whether a page was given back whose tokens another page holds too


class Scheduler:
    """Waiting and running sequences. `schedule`, then the forward, then `complete`; `leave` for those that ended.

    With `keep_rows` the routes of a sequence that must wait are saved (`saves`, to be carried out before anything is written to a page).
    With `replay_rows` they decide when it is prefilled again, and its keys and values then depend on the versions that they are from.
    """

    def __init__(
        self, table: Table, pool: PagePool, max_batch_tokens: int, counters: Counters, version: int,
        *, keep_rows: bool = False, replay_rows: bool = False,
    ):  # fmt: skip
        self.table, self.pool, self.max_batch_tokens, self.counters, self.version = table, pool, max_batch_tokens, counters, version
        self.keep_rows, self.replay_rows = keep_rows, replay_rows
        self.saves: list[Save] = []
        self.mixed = False  # whether a running sequence may be MIXED
        self.waiting: list[Sequence] = []  # by number
        self.running: list[int] = []  # lanes, by number
        self.free_lanes = list(range(table.lanes))[::-1]
        self.leaders: dict[bytes, int] = {}  # prompt -> the lane that is computing it now
        self.reserve = 0  # pages that `_admit` leaves: see there
        self.plan = Plan(np.empty(0, np.int64), np.empty(0, np.int64))

    def add(self, sequence: Sequence) -> None:
        sequence.key = self._key(sequence)
        self.waiting.append(sequence)

    def identity(self, tokens: np.ndarray, row_version: np.ndarray | None, reached: int) -> np.ndarray:
        """int64 [T]: what keys and values are a function of, under given weights: the tokens and, where rows are replayed, who routed each.

        Rows that are not there yet will be of the current version.
        """
        if not self.replay_rows:
            return tokens
        versions = np.full(len(tokens), self.version, np.int64)
        if row_version is not None:
            versions[:reached] = row_version[:reached]
        return tokens | versions << 32

    def _key(self, sequence: Sequence) -> bytes:
        prompt = sequence.prompt
        return self.identity(sequence.tokens[:prompt], sequence.row_version, min(sequence.reached, prompt)).tobytes()

    def schedule(self) -> Plan:
        """Choose the next forward. Empty only when there is nothing left to do."""
        self.plan = Plan(np.empty(0, np.int64), np.empty(0, np.int64))
        self._grow()
        lanes = np.array(self.running, np.int64)
        left = self.table.length[lanes] - self.table.computed[lanes]
        counts = dict.fromkeys(lanes[left == 1][: self.max_batch_tokens].tolist(), 1)
        num_decoding = len(counts)
        budget = self.max_batch_tokens - num_decoding
        for lane in lanes[left > 1].tolist():
            budget -= self._chunk(lane, budget, counts)
        if self.waiting and self.free_lanes:
            self._admit(budget, counts)
        self.plan.lanes, self.plan.counts = np.array(list(counts), np.int64), np.array(list(counts.values()), np.int64)
        self.plan.decodes = len(counts) == num_decoding
        assert len(self.plan.lanes) or not (self.running or self.waiting), "unfinished sequences, and none can advance"
        return self.plan

    def complete(self) -> None:
        """The forward of the plan is done: its tokens are computed."""
        table, lanes = self.table, self.plan.lanes
        before, prompt, reached = table.computed[lanes], table.prompt[lanes], table.reached[lanes]
        after, new = before + self.plan.counts, np.maximum(before, reached)
        if self.replay_rows:
            self._date_rows(lanes, new, after)
        self.counters.prompt_tokens_computed += int(np.maximum(np.minimum(after, prompt) - new, 0).sum())
        self.counters.tokens_recomputed += int(np.maximum(np.minimum(after, reached) - before, 0).sum())
        table.computed[lanes] = after
        table.reached[lanes] = np.maximum(after, reached)
        prompt_done = (before < prompt) & (after >= prompt)
        for lane in lanes[prompt_done | (after // PAGE > table.shared[lanes])].tolist():
            self._enter_pages(lane)
        for lane in lanes[prompt_done].tolist():
            self._enter_tail(lane, int(table.prompt[lane]))
            self._stop_leading(lane)
        for copy in self.plan.copies:
            self.pool.release([copy.source])

    def leave(self, lane: int) -> Sequence:
        """Take a sequence out of its lane, because it has ended or must wait; its pages stay in the tree until their space is needed."""
        self._stop_leading(lane)
        self._enter_tail(lane, int(self.table.computed[lane]))
        self.pool.release(self.table.pages[lane, : self.table.num_pages[lane]].tolist())
        self.running.remove(lane)
        self.free_lanes.append(lane)
        return self.table.save(lane)

    def drop(self, number: int) -> Sequence | None:
        """Forget a sequence, waiting or running. None if there is none of this number."""
        for index, sequence in enumerate(self.waiting):
            if sequence.number == number:
                return self.waiting.pop(index)
        lane = next((lane for lane in self.running if self._number(lane) == number), None)
        return None if lane is None else self.leave(lane)

    def set_version(self, version: int, recompute: bool) -> None:
        """New weights are in place: see Engine.set_version."""
        assert version >= self.version, f"weights of version {version} after version {self.version}"
        self.version = version
        for lane in self.running[::-1]:
            # A prompt of which nothing is sampled begins again in any case: half of it under old weights, its answer would be of none.
            if recompute or self.table.length[lane] == self.table.prompt[lane]:
                self._wait_again(lane)
        self.table.kv_version[self.running] = MIXED
        self.mixed = bool(self.running)
        self.pool.forget()  # after they have left: their pages must not stay in the tree either
        self.leaders.clear()
        if self.replay_rows:
            for sequence in self.waiting:
                sequence.key = self._key(sequence)

    def _date_rows(self, lanes: np.ndarray, start: np.ndarray, stop: np.ndarray) -> None:
        """Note which weights have routed the tokens start .. stop - 1 of each lane."""
        table = self.table
        if self.plan.decodes and not self.mixed:
            table.row_version[lanes, start] = self.version
            return
        for lane, first, last in zip(lanes.tolist(), start.tolist(), stop.tolist(), strict=True):
            # Routed on keys and values of several versions, a row is equal to no other sequence's.
            version = self.version if table.kv_version[lane] != MIXED else -1 - table.sequences[lane].number
            table.row_version[lane, first:last] = version

    def _chunk(self, lane: int, budget: int, counts: dict[int, int]) -> int:
        count = min(budget, int(self.table.length[lane] - self.table.computed[lane]))
        if count:
            counts[lane] = count
        return count

    def _grow(self) -> None:
        """Give every running sequence the pages for the tokens it has, oldest first, at the expense of the youngest."""
        table, pool = self.table, self.pool
        lanes = np.array(self.running, np.int64)
        for lane in lanes[table.num_pages[lanes] * PAGE < table.length[lanes]].tolist():
            while lane in self.running and not pool.available:
                self.counters.preemptions += 1
                self._wait_again(self.running[-1])
            if lane in self.running:
                self._set_pages(lane, self._allocate(1), int(table.num_pages[lane]))

    def _admit(self, budget: int, counts: dict[int, int]) -> None:
        table, at = self.table, 0
        # each sequence that may yet want a page is left room for one, or newcomers would soon be preempted for its sake
        self.reserve = int((table.num_pages[self.running] * PAGE < table.limit[self.running] - 1).sum())
        while at < len(self.waiting) and self.free_lanes:
            sequence = self.waiting[at]
            leader = self.leaders.get(sequence.key)
            if leader is not None:
                done = table.computed[leader] + counts.get(leader, 0) >= sequence.prompt
                if not (done and sequence.untouched):
                    at += 1  # comes in when its sibling's pages can be found in the tree
                    continue
                if not self._fork(sequence, leader):
                    break
            else:
                lane = self._start(sequence) if budget else None
                if lane is None:
                    break
                budget -= self._chunk(lane, budget, counts)
            del self.waiting[at]

    def _start(self, sequence: Sequence) -> int | None:
        """Bring a waiting sequence in, on whatever the tree has of it. Returns its lane, None when there are not enough pages."""
        pool, length = self.pool, len(sequence.tokens)
        identity = self.identity(sequence.tokens, sequence.row_version, sequence.reached)
        pages, source, count = pool.match(self.version, identity)
        new = -(-length // PAGE) - len(pages)
        pool.share(pages)
        spare = pool.available - new - self.reserve
        if spare < 0:
            pool.release(pages)
            return None
        if count and spare == 0 and pool.refs[source] == 0:
            count = 0  # the page to copy from is the very space that is needed
        if count:
            pool.share([source])  # until the copy is made
        fresh = self._allocate(new)
        if count:
            self.plan.copies.append(Copy(source, fresh[0], count))
        lane = self._enter(sequence, pages + fresh, len(pages) * PAGE + count)
        self.table.shared[lane] = len(pages)
        if self.table.computed[lane] < sequence.prompt:
            self.leaders[sequence.key] = lane
        return lane

    def _fork(self, sequence: Sequence, leader: int) -> bool:
        """Bring in a sibling of `leader`, whose prompt is complete after this step: nothing is left to compute but its first token."""
        whole, tail = divmod(sequence.prompt, PAGE)
        if self.pool.available < bool(tail) + self.reserve:
            return False
        source = int(self.table.pages[leader, whole]) if tail else ROOT
        pages = self.table.pages[leader, :whole].tolist()
        self.pool.share(pages)
        fresh = self._allocate(1) if tail else []
        lane = self._enter(sequence, pages + fresh, sequence.prompt)
        self.plan.forks.append(Fork(lane, leader, Copy(source, fresh[0], tail) if tail else None))
        return True

    def _enter(self, sequence: Sequence, pages: list[int], computed: int) -> int:
        """Put a sequence with its pages into a free lane."""
        table, lane = self.table, self.free_lanes.pop()
        table.load(lane, sequence)
        table.row_version[lane, sequence.reached : computed] = self.version  # as `identity` says of what was found in the tree
        if self.replay_rows and computed < sequence.reached:
            self.plan.restores.append(Restore(sequence, lane, computed))
        self._set_pages(lane, pages, 0)
        table.shared[lane], table.computed[lane], table.kv_version[lane] = 0, computed, self.version
        table.reached[lane] = max(computed, sequence.reached)
        self.reserve += len(pages) * PAGE < sequence.limit - 1
        if sequence.cached < 0:
            sequence.cached = min(computed, sequence.prompt)
            self.counters.prompt_tokens_cached += sequence.cached
        bisect.insort(self.running, lane, key=self._number)
        return lane

    def _number(self, lane: int) -> int:
        return self.table.sequences[lane].number

    def _allocate(self, count: int) -> list[int]:
        pages = self.pool.allocate(count)
        self.plan.new_pages += pages
        return pages

    def _set_pages(self, lane: int, pages: list[int], at: int) -> None:
        self.table.pages[lane, at : at + len(pages)] = pages
        self.table.num_pages[lane] = at + len(pages)

    def _enter_pages(self, lane: int) -> None:
        """Enter the pages that have become full into the prefix tree."""
        table, pool = self.table, self.pool
        if table.kv_version[lane] != self.version:
            return
        computed, pages = int(table.computed[lane]), table.pages[lane]
        tokens = self.identity(table.tokens[lane, :computed], table.row_version[lane], computed)
        full = computed // PAGE
        for i in range(int(table.shared[lane]), full):
            page, parent = int(pages[i]), int(pages[i - 1]) if i else ROOT
            known = pool.insert(Key(self.version, parent, tokens[i * PAGE : (i + 1) * PAGE].tobytes()), page)
            if known != page:  # computed twice, to the same bits: keep one, so that whoever holds a page holds its parents in the tree
                pool.share([known])
                pool.release([page])
                pages[i] = known
                self.plan.recycled = True
        table.shared[lane] = full

    def _enter_tail(self, lane: int, stop: int) -> None:
        """Enter the last of the first `stop` tokens, if they end inside a page."""
        table = self.table
        whole, tail = divmod(stop, PAGE)
        if tail and table.kv_version[lane] == self.version:
            pages = table.pages[lane]
            tokens = self.identity(table.tokens[lane, :stop], table.row_version[lane], stop)[whole * PAGE :]
            self.pool.insert(Key(self.version, int(pages[whole - 1]) if whole else ROOT, tokens.tobytes()), int(pages[whole]))

    def _stop_leading(self, lane: int) -> None:
        key = self.table.sequences[lane].key
        if self.leaders.get(key) == lane:
            del self.leaders[key]

    def _wait_again(self, lane: int) -> None:
        pages = self.table.pages[lane, : self.table.num_pages[lane]].copy()
        sequence = self.leave(lane)
        if self.keep_rows and sequence.reached:
            self.saves.append(Save(sequence, pages, sequence.reached))
        sequence.key = self._key(sequence)
        bisect.insort(self.waiting, sequence, key=lambda sequence: sequence.number)
