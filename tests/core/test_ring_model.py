"""Ring, pacing and consumption against a model of a dozen lines, under any order of moves that hypothesis can think of.

    python -m pytest tests/core/test_ring_model.py

Moves: claim, finish, new weights on a rank, take and train, a writer that dies, and the death of the whole job: then a new ring begins with
what the last checkpoint had consumed, and what was journalled by then is put instead of made, if it may be. The model knows what has to
hold whatever the order: strict numbering, one tenant a slot, the staleness bound, and that the groups trained on in the weights that are
kept are {0 .. n-1}, each once.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from samples import trajectory

from miles_core import ring as ring_module
from miles_core.pacing import derive, last_version
from miles_core.ring import OWNER, PID, PID_STARTED, Claim, Ring

NUM_RANKS = 2


class Job(RuleBasedStateMachine):
    """One run with all its lives."""

    @initialize(P=st.integers(1, 4), S=st.integers(0, 3))
    def begin(self, P: int, S: int) -> None:
        self.P, self.S = P, S
        self.B, self.W = derive(P, S)
        self.incarnation = 0
        self.journal: dict[int, tuple[int, int]] = {}  # group -> (incarnation, version): the newest record
        self.saved: tuple[int, frozenset[int], int] = (0, frozenset(), 1)  # version, consumed groups, incarnation that saved it
        self.ends: dict[int, int] = {}  # incarnation -> last version that counts
        self.dead_pids = 0
        self.start_life()

    def start_life(self) -> None:
        version, consumed, parent = self.saved
        self.incarnation += 1
        # everything that the dead incarnations did after the version that is kept is erased
        self.ends = {i: min(end, version) for i, end in self.ends.items() if i <= parent} | {self.incarnation: 1 << 60}
        self.version, self.consumed = version, set(consumed)
        self.ring = Ring.create(
            num_slots=self.B, slot_bytes=4096, window=self.W, num_rollout_ranks=NUM_RANKS, num_groups=1 << 40, done=consumed
        )  # fmt: skip
        self.live = [version] * NUM_RANKS
        self.open: dict[int, tuple[Claim, int, int]] = {}  # group -> claim, rank, version it is sampled from
        for rank in range(NUM_RANKS):
            self.ring.set_live(rank, version)

    def usable(self, group: int) -> bool:
        if group not in self.journal:
            return False
        incarnation, version = self.journal[group]
        return version <= self.ends.get(incarnation, -1) and last_version(group, self.W, self.P) - version <= self.S

    # ---- moves

    @rule(rank=st.integers(0, NUM_RANKS - 1), times=st.integers(1, 4))
    def claim(self, rank: int, times: int) -> None:
        for _ in range(times):
            known = self.consumed | self.open.keys() | self.ready()
            claim = self.ring.claim(rank)
            if claim is None:
                return
            assert claim.group not in known, "handed out twice"
            assert claim.group == next(g for g in range(1 << 40) if g not in known), "the lowest number that is free"
            if self.usable(claim.group):
                self.put(claim, self.journal[claim.group][1])
            else:
                self.open[claim.group] = (claim, rank, self.live[rank])

    def put(self, claim: Claim, version: int) -> None:
        self.ring.put(claim, [trajectory(2, 3, group=claim.group, version=np.array([[version, 3]], np.int32))])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.open)))
        claim, _, version = self.open.pop(group)
        self.journal[group] = (self.incarnation, version)
        self.put(claim, version)

    @rule(rank=st.integers(0, NUM_RANKS - 1))
    def new_weights(self, rank: int) -> None:
        self.live[rank] = self.version
        self.ring.set_live(rank, self.version)

    @precondition(lambda self: self.ring.ready(self.P))
    @rule()
    def step(self) -> None:
        refs = self.ring.take(self.P)
        assert [ref.group for ref in refs] == sorted(ref.group for ref in refs)
        for ref in refs:
            (sample,) = self.ring.read(ref)
            assert sample.group == ref.group and ref.group not in self.consumed, "trained on twice"
            assert 0 <= self.version - sample.oldest_version <= self.S, "the staleness bound"
            assert last_version(ref.group, self.W, self.P) >= self.version
            self.consumed.add(ref.group)
        self.version += 1
        self.ring.release(refs, self.version)

    @precondition(lambda self: self.ring.ready(self.P))
    @rule()
    def take_and_give_back(self) -> None:
        self.ring.give_back(self.ring.take(self.P))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def a_writer_dies(self, data: st.DataObject) -> None:
        """All groups of one rank lose their writer; whoever claims next gets them first."""
        rank = data.draw(st.sampled_from(sorted({rank for _, rank, _ in self.open.values()})))
        self.dead_pids += 1
        for claim, owner, _ in list(self.open.values()):
            if owner == rank:
                self.ring.slots[claim.slot, [PID, PID_STARTED]] = -self.dead_pids, 1
                del self.open[claim.group]
        self.ring.next_dead_check = 0.0

    @rule()
    def checkpoint(self) -> None:
        assert set(self.ring.consumed()) == self.consumed
        self.saved = (self.version, frozenset(self.consumed), self.incarnation)

    @rule()
    def the_job_dies(self) -> None:
        del self.ring
        self.start_life()

    # ---- what always holds

    def ready(self) -> set[int]:
        words = self.ring.slots[:, ring_module.WORD]
        return {int(w >> 2) for w in words if w & 3 != ring_module.FREE} - self.open.keys() - self.orphans()

    def orphans(self) -> set[int]:
        rows = self.ring.slots
        return {int(r[ring_module.WORD] >> 2) for r in rows if r[ring_module.WORD] & 3 == ring_module.WRITING and r[PID] < 0}

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "ring"):
            return
        assert len(self.consumed) == self.version * self.P, "every version has trained on P groups more"
        status = self.ring.status()
        assert status.in_flight == len(self.open) + len(self.orphans())
        for claim, rank, _ in self.open.values():
            assert self.ring.slots[claim.slot, OWNER] == rank
        highest = max(self.consumed, default=-1)
        missing = [g for g in range(highest) if g not in self.consumed]
        assert len(missing) <= self.B + self.W, "what is not consumed yet below the highest one fits into the ring"

    def teardown(self) -> None:
        """From wherever we are: nobody dies any more, and the run comes to its end. Then nothing is lost and nothing doubled."""
        if not hasattr(self, "ring"):
            return
        for _ in range(4 * (self.S + 2)):
            for rank in range(NUM_RANKS):
                self.new_weights(rank)
                self.claim(rank, self.B)
            for group in sorted(self.open):
                claim, _, version = self.open.pop(group)
                self.put(claim, version)
            assert self.ring.ready(self.P), "no deadlock"
            self.step()
        below = min(set(range(1 << 20)) - self.consumed)
        assert below >= len(self.consumed) - self.B - self.W, "no number is skipped for ever"
        del self.ring


def run(max_examples: int, **changes: object) -> None:
    options = {"stateful_step_count": 60, "derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(Job, settings=settings(max_examples=max_examples, **options, **changes))


def test_any_order_of_moves() -> None:
    run(30)


def test_the_model_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these mistakes in the ring is found by it."""
    def released_at_once(self: Ring, refs: list, version: int) -> None:
        release(self, refs, 0)

    release, mistakes = Ring.release, {"release": released_at_once, "_next_index": lambda self, words: int(words.max() >> 2) + 1}
    for name, mistake in mistakes.items():  # slots open before the weights are live; what was consumed is forgotten
        with monkeypatch.context() as patched, pytest.raises(AssertionError):
            patched.setattr(Ring, name, mistake)
            run(300, report_multiple_bugs=False, phases=[Phase.generate])
