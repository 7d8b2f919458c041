"""No sample is older than (B + W - 2) // P versions when it is trained on. Run: python -m pytest tests/core/test_pacing.py

The real ring, and an adversary who decides what happens when. `held` holds the newest group back for as long as the trainer can go on
without it, which is the worst that can happen to the bound; `shuffled` claims, finishes, updates and trains in random order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from samples import trajectory

from miles_core.pacing import derive, last_version, staleness_bound
from miles_core.ring import Claim, Ring

SIZES = [(P, S) for P in (1, 2, 3, 7) for S in range(5)]


@dataclass
class Run:
    """One trainer and some rollout ranks around a ring; every move is a method, so that an adversary can order them."""

    groups_per_step: int
    num_slots: int
    window: int
    num_ranks: int = 2
    lag: int = 0  # versions by which the weights that ranks sample from trail what they report
    release_at_take: bool = False
    version: int = 0
    open: dict[int, tuple[Claim, int]] = field(default_factory=dict)  # group -> claim, version it is sampled from
    staleness: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ring = Ring.create(
            num_slots=self.num_slots, slot_bytes=4096, window=self.window, num_rollout_ranks=self.num_ranks, num_groups=1 << 40
        )  # fmt: skip
        self.live = [0] * self.num_ranks
        for rank in range(self.num_ranks):
            self.ring.set_live(rank, 0)

    def claim(self, rank: int) -> bool:
        if (claim := self.ring.claim(rank)) is None:
            return False
        self.open[claim.group] = (claim, max(0, self.live[rank] - self.lag))
        return True

    def claim_all(self) -> None:
        rank = 0
        while self.claim(rank):
            rank = (rank + 1) % self.num_ranks

    def finish(self, group: int) -> None:
        claim, version = self.open.pop(group)
        self.ring.put(claim, [trajectory(2, 3, group=group, version=np.array([[version, 3]], np.int32))])

    def update(self, rank: int) -> None:
        self.live[rank] = self.version
        self.ring.set_live(rank, self.version)

    def step(self) -> None:
        """take -> train -> publish -> release; `release_at_take` is the mistake."""
        refs = self.ring.take(self.groups_per_step)
        for ref in refs:
            (sample,) = self.ring.read(ref)
            self.staleness.append(self.version - sample.oldest_version)
            self.taken.append(sample.group)
        if self.release_at_take:
            self.ring.release(refs, self.version)
        self.claim_all()
        self.version += 1
        if not self.release_at_take:
            self.ring.release(refs, self.version)

    def oldest(self) -> int:
        assert min(self.staleness) >= 0, "a sample from the future"
        return max(self.staleness)


def held(run: Run, num_steps: int) -> int:
    """The adversary that holds the newest group back. Returns the largest staleness seen."""
    victim = None
    for step in range(num_steps + 1):
        run.claim_all()
        if victim is None:
            victim = max(run.open, default=None)
        for group in [g for g in run.open if g != victim or step == num_steps]:
            run.finish(group)
        if not run.ring.ready(run.groups_per_step):
            run.finish(victim)
            victim = None
        run.step()
        for rank in range(run.num_ranks):
            run.update(rank)
    return run.oldest()


def shuffled(run: Run, num_steps: int, seed: int) -> int:
    """Everything in random order; ranks load new weights whenever they like. Returns the largest staleness seen."""
    random = np.random.default_rng(seed)
    while run.version < num_steps:
        match int(random.integers(0, 4)):
            case 0:
                run.claim(int(random.integers(0, run.num_ranks)))
            case 1 if run.open:
                run.finish(int(random.choice(list(run.open))))
            case 2:
                run.update(int(random.integers(0, run.num_ranks)))
            case 3 if run.ring.ready(run.groups_per_step):
                run.step()
    return run.oldest()


@pytest.mark.parametrize(("P", "S"), SIZES)
def test_derived_sizes_give_what_was_asked_for_and_overlap(P: int, S: int) -> None:
    B, W = derive(P, S)
    assert staleness_bound(B, W, P) == S
    assert (B, W) == (P, 1) if S == 0 else B >= 2 * P
    assert 1 <= W <= B


@pytest.mark.parametrize(("P", "S"), SIZES)
def test_bound_holds_and_is_attained(P: int, S: int) -> None:
    B, W = derive(P, S)
    assert held(Run(P, B, W), 2 * S + 4) == S
    for seed in range(3):
        run = Run(P, B, W, num_ranks=1 + seed)
        assert shuffled(run, 6, seed) <= S
        assert len(set(run.taken)) == len(run.taken) == 6 * P
        assert run.ring.consumed() == sorted(run.taken)
        if W == 1:
            assert run.taken == list(range(6 * P)), "strict order"


@pytest.mark.parametrize(("P", "S"), SIZES)
def test_last_version_is_never_passed_and_is_attained(P: int, S: int) -> None:
    """When a group can be trained on at the latest: what a journalled one is measured by."""
    B, W = derive(P, S)
    late = []
    for seed in range(3):
        for run in (Run(P, B, W), Run(P, B, W, num_ranks=2)):
            held(run, 2 * S + 4) if seed == 0 else shuffled(run, 6, seed)
            late += [last_version(group, W, P) - trained_at // P for trained_at, group in enumerate(run.taken)]
    assert min(late) == 0


@pytest.mark.parametrize(("B", "W", "P"), [(4, 2, 3), (7, 3, 2), (6, 6, 4), (9, 1, 4), (6, 4, 5)])
def test_bound_is_exact_for_other_sizes_too(B: int, W: int, P: int) -> None:
    assert held(Run(P, B, W), 12) == staleness_bound(B, W, P)


@pytest.mark.parametrize(("P", "S"), SIZES)
def test_releasing_at_take_breaks_the_bound(P: int, S: int) -> None:
    assert held(Run(P, *derive(P, S), release_at_take=True), 2 * S + 4) == S + 1


@pytest.mark.parametrize(("P", "S"), SIZES)
def test_one_slot_or_one_window_place_more_breaks_the_bound(P: int, S: int) -> None:
    B, W = derive(P, S)
    assert held(Run(P, B + 1, W), 2 * S + 6) == S + 1
    if B > P:  # with B = P there is nobody who could pass
        assert held(Run(P, B, W + 1), 2 * S + 6) == S + 1


@pytest.mark.parametrize(("P", "S"), [(P, S) for P, S in SIZES if S])
def test_without_an_anchored_window_there_is_no_bound(P: int, S: int) -> None:
    B, _ = derive(P, S)
    assert held(Run(P, B, 1 << 40), 3 * S + 8) > 2 * S


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize(("P", "S"), [(1, 0), (3, 0), (4, 1), (3, 2), (2, 4)])
def test_a_rank_that_samples_from_weights_d_updates_back_adds_d(P: int, S: int, lag: int) -> None:
    assert held(Run(P, *derive(P, S), lag=lag), 2 * S + 4 + 3 * lag) == S + lag
    assert shuffled(Run(P, *derive(P, S), lag=lag), 8, seed=lag) <= S + lag


def test_a_rank_that_is_late_to_report_holds_the_slots_and_not_the_bound() -> None:
    P, S = 2, 1
    B, W = derive(P, S)
    run = Run(P, B, W)
    run.claim_all()
    for group in range(B):
        run.finish(group)
    run.step()
    run.update(0)
    assert not run.claim(0), "rank 1 still samples from version 0: a slot freed by step 1 is not free yet"
    run.update(1)
    assert run.claim(0) and run.claim(1) and not run.claim(0)
