"""The scheduler without a model: a memory of (version, prefix) marks stands for the KV cache, so that every stale, foreign or missing
position that a forward would read is seen.

    python -m pytest tests/core/test_scheduler.py
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from test_cache import check

from kernels.attention import PAGE
from miles_core.engine.cache import PagePool
from miles_core.engine.scheduler import Scheduler
from miles_core.engine.sequence import MIXED, Counters, Request, SamplingParams, Sequence, Table

EMPTY = (-9, 0)


@dataclass
class Driver:
    """Runs a scheduler as the engine does. The 'model' samples token position * 7 + sample, so answers are known beforehand."""

    num_pages: int
    max_batch_tokens: int = 64
    lanes: int = 8
    memory: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    done: dict[int, Sequence] = field(default_factory=dict)
    computed: int = 0  # tokens of all forwards

    def __post_init__(self):
        self.counters, self.table, self.pool = Counters(), Table(self.lanes, self.num_pages * PAGE + 1), PagePool(self.num_pages)
        self.scheduler = Scheduler(self.table, self.pool, self.max_batch_tokens, self.counters, version=0)
        self.added = 0

    def add(self, prompt: np.ndarray, sample: int, max_new_tokens: int) -> None:
        request = Request(0, sample, np.asarray(prompt, np.int32), SamplingParams(1.0, 1.0, 0, max_new_tokens, ()))
        self.scheduler.add(Sequence.of(request, self.added))
        self.added += 1

    def mark(self, lane: int, position: int) -> tuple[int, int]:
        return self.scheduler.version, hash(self.table.tokens[lane, : position + 1].tobytes())

    def read(self, lane: int, position: int) -> tuple[int, int]:
        return self.memory.get((int(self.table.pages[lane, position // PAGE]), position % PAGE), EMPTY)

    def copy(self, copies) -> None:
        for source, target, count in copies:
            for offset in range(count):
                self.memory[target, offset] = self.memory.get((source, offset), EMPTY)

    def step(self) -> None:
        table, plan = self.table, self.scheduler.schedule()
        assert plan.counts.sum() <= self.max_batch_tokens and (plan.counts > 0).all()
        assert len(set(plan.lanes.tolist())) == len(plan.lanes)
        self.memory = {slot: mark for slot, mark in self.memory.items() if slot[0] not in plan.new_pages}
        self.copy(plan.copies)
        for lane, count in zip(plan.lanes.tolist(), plan.counts.tolist(), strict=True):
            start = int(table.computed[lane])
            for position in range(start, start + count):
                page = int(table.pages[lane, position // PAGE])
                assert position // PAGE < table.num_pages[lane] and self.pool.refs[page] >= 1
                self.memory[page, position % PAGE] = self.mark(lane, position)
        for lane in self.scheduler.running:
            if lane in plan.lanes:
                self.check_context(lane, int(table.computed[lane] + plan.counts[plan.lanes == lane][0]))
        self.copy(fork.tail for fork in plan.forks if fork.tail)
        sampling = [lane for lane, count in zip(plan.lanes, plan.counts, strict=True) if table.computed[lane] + count == table.length[lane]]
        self.scheduler.complete()
        for fork in plan.forks:
            assert table.computed[fork.leader] >= table.prompt[fork.leader], "forked from an unfinished prompt"
            self.check_context(fork.lane, int(table.computed[fork.lane]))
        self.computed += int(plan.counts.sum())
        check(self.pool, [table.pages[lane, : table.num_pages[lane]].tolist() for lane in self.scheduler.running])
        self.sample(np.array(sampling + [fork.lane for fork in plan.forks], np.int64))

    def check_context(self, lane: int, context: int) -> None:
        """What the forward of this lane reads is its own prefix, computed under the right weights."""
        mixed = self.table.kv_version[lane] == MIXED
        for position in range(context):
            version, prefix = self.read(lane, position)
            assert prefix == self.mark(lane, position)[1], f"lane {lane} position {position}: another prefix"
            assert mixed or version == self.scheduler.version, f"lane {lane} position {position}: KV of version {version}"

    def sample(self, lanes: np.ndarray) -> None:
        if len(lanes):
            at = self.table.length[lanes]
            tokens = 1000 + at * 7 + self.table.sample[lanes]
            self.table.append(lanes, tokens, (tokens / 8).astype(np.float32), self.scheduler.version)
            self.counters.tokens_sampled += len(lanes)
            for lane in lanes[self.table.length[lanes] == self.table.limit[lanes]].tolist():
                sequence = self.scheduler.leave(lane)
                self.done[sequence.number] = sequence

    def drain(self) -> None:
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
        assert len(self.done) == self.added
        assert self.pool.available == self.num_pages and not any(self.pool.refs), "pages leaked"
        assert len(self.scheduler.free_lanes) == self.lanes and not self.scheduler.leaders
        for sequence in self.done.values():
            prompt = sequence.prompt
            expected = 1000 + np.arange(prompt, len(sequence.tokens)) * 7 + sequence.request.sample
            assert np.array_equal(sequence.tokens[:prompt], sequence.request.tokens)
            assert len(expected) == sequence.request.params.max_new_tokens and np.array_equal(sequence.tokens[prompt:], expected)
            assert np.array_equal(sequence.logp[prompt:], (expected / 8).astype(np.float32)), "a sampled log-prob was overwritten"
            assert (np.diff(sequence.version[prompt:]) >= 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_reads_only_its_own_prefixes_and_leaks_nothing(seed):
    rng = np.random.default_rng(seed)
    driver = Driver(num_pages=int(rng.integers(5, 20)), max_batch_tokens=int(rng.choice([1, 7, 64, 300])), lanes=int(rng.integers(1, 9)))
    prompts = [np.repeat(rng.integers(0, 2, 4), PAGE)[:length] for length in (3, 50, 64, 65, 128, 200)]
    version = 0
    for _ in range(14):
        prompt = prompts[rng.integers(len(prompts))]
        for sample in range(rng.integers(1, 5)):
            driver.add(prompt, sample, int(rng.integers(1, 90)))
        for _ in range(rng.integers(0, 40)):
            driver.step() if driver.scheduler.running or driver.scheduler.waiting else None
        if rng.random() < 0.3:
            version += int(rng.integers(0, 2))  # weights may be announced twice under one number
            driver.scheduler.set_version(version, recompute=bool(rng.integers(2)))
            driver.memory = {slot: (-1, mark[1]) for slot, mark in driver.memory.items()}  # whatever is there now is of other weights
    driver.drain()


@pytest.mark.parametrize("length", [1, 30, 64, 100, 128])
def test_a_group_prefills_its_prompt_once(length):
    driver = Driver(num_pages=64, max_batch_tokens=1000)
    for sample in range(8):
        driver.add(np.arange(length), sample, 5)
    driver.step()
    assert driver.counters.tokens_sampled == 8, "all samples get their first token from the forward that completes the prompt"
    driver.drain()
    assert driver.counters.prompt_tokens_computed == length
    assert driver.counters.prompt_tokens_cached == 7 * length
    assert [driver.done[i].cached for i in range(8)] == [0] + [length] * 7
    assert driver.computed == length + 8 * 4, "the last token of an answer is never computed"


def test_a_sample_that_comes_later_computes_only_the_last_prompt_token():
    driver = Driver(num_pages=64, lanes=1)
    for sample in range(3):
        driver.add(np.arange(100), sample, 2)
    driver.drain()
    assert [driver.done[i].cached for i in range(3)] == [0, 99, 99]
    assert driver.counters.prompt_tokens_computed == 102


def test_siblings_wait_for_a_chunked_prefill_and_strangers_do_not():
    driver = Driver(num_pages=64, max_batch_tokens=40)
    for prompt in (np.arange(100), np.arange(100), np.arange(1000, 1010)):
        driver.add(prompt, 0, 3)
    driver.step()
    driver.step()
    assert len(driver.scheduler.running) == 1 and driver.counters.tokens_sampled == 0
    driver.step()  # 20 tokens left of the first prompt, 10 of the stranger's
    assert driver.counters.tokens_sampled == 3
    driver.drain()


def test_decode_goes_first_and_prefill_takes_what_is_left_of_the_budget():
    driver = Driver(num_pages=64, max_batch_tokens=10)
    for i in range(3):
        driver.add([i], i, 50)
    driver.step()
    driver.add(np.arange(100), 0, 1)
    driver.step()
    assert sorted(driver.scheduler.plan.counts.tolist()) == [1, 1, 1, 7]
    driver.drain()


def test_the_youngest_is_preempted_and_comes_back_with_what_it_sampled():
    driver = Driver(num_pages=5)
    for i in range(3):
        driver.add(np.arange(60) + 100 * i, i, 80)  # each ends with three pages
    preempted = []
    while driver.scheduler.waiting or driver.scheduler.running:
        before = {driver.table.sequences[lane].number for lane in driver.scheduler.running}
        driver.step()
        after = {driver.table.sequences[lane].number for lane in driver.scheduler.running} | set(driver.done)
        preempted += sorted(before - after)
    assert driver.counters.preemptions == len(preempted) > 0 and 0 not in preempted
    assert preempted[0] == 2
    assert driver.counters.tokens_recomputed > 0 and driver.counters.prompt_tokens_computed == 180
    assert list(driver.done) == [0, 1, 2]
    driver.drain()


def test_one_sequence_always_fits_even_beside_cached_pages():
    driver = Driver(num_pages=1, lanes=4)
    for sample in range(5):
        driver.add(np.arange(10), sample, PAGE - 10 + 1)
    driver.drain()
    # the only page is the one to copy from, so its space is taken and the prompt computed again
    assert driver.counters.prompt_tokens_computed == 50


def test_recompute_prefills_everything_again_and_shares_the_prompt():
    driver = Driver(num_pages=64, max_batch_tokens=1000)
    for sample in range(4):
        driver.add(np.arange(30), sample, 20)
    for _ in range(6):
        driver.step()
    driver.scheduler.set_version(1, recompute=True)
    driver.drain()
    # one prefills 30 + 6 tokens; three find the prompt in the tree and prefill their 6; the sixth was never computed before
    assert driver.counters.tokens_recomputed == 35 + 3 * 5
    for sequence in driver.done.values():
        assert sequence.version[30:].tolist() == [0] * 6 + [1] * 14


def test_keep_leaves_pages_alone_and_shares_them_with_nobody_new():
    driver = Driver(num_pages=64, max_batch_tokens=1000)
    driver.add(np.arange(70), 0, 100)
    for _ in range(3):
        driver.step()
    driver.scheduler.set_version(1, recompute=False)
    driver.add(np.arange(70), 1, 100)
    driver.drain()
    assert driver.counters.tokens_recomputed == 0
    assert [driver.done[i].cached for i in range(2)] == [0, 0]
    assert driver.done[0].version[70:].tolist() == [0] * 3 + [1] * 97
