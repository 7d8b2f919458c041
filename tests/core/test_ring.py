"""What the ring promises, seen from one process. Run: python -m pytest tests/core/test_ring.py

Killed writers, many processes and the lock are in test_ring_processes.py, the staleness bound in test_pacing.py.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import time

import numpy as np
import pytest
from samples import trajectory

from miles_core import ring as ring_module
from miles_core import status
from miles_core.guard import PeerLost
from miles_core.ring import TRAINER, Claim, Ref, Ring
from miles_core.schema import FIELDS, Trajectory, group_nbytes, write_group


def make(num_slots: int = 4, *, live: int | None = 0, **changes: object) -> Ring:
    """A ring of one rollout rank, which reports version `live`."""
    values = {"slot_bytes": 4096, "window": 1, "num_rollout_ranks": 1, "num_groups": 1000, "timeout_s": 1.0}
    ring = Ring.create(num_slots=num_slots, **{**values, **changes})
    for row in range(ring.num_rollout_ranks + 1):
        ring.board.join(row, row, trains=row == ring.num_rollout_ranks)
    if live is not None:
        for rank in range(ring.num_rollout_ranks):
            ring.set_live(rank, live)
    return ring


def group_of(number: int, num_samples: int = 2) -> list[Trajectory]:
    return [trajectory(3 + number % 4, 5, group=number, sample=i, reward=float(i)) for i in range(num_samples)]


def assert_equal(mine: list[Trajectory], theirs: list[Trajectory]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        for f in FIELDS:
            assert np.array_equal(getattr(a, f.name), getattr(b, f.name)), f.name


def put_all(ring: Ring) -> list[int]:
    numbers = []
    while (claim := ring.claim(0)) is not None:
        ring.put(claim, group_of(claim.group))
        numbers.append(claim.group)
    return numbers


def test_group_numbers_are_handed_out_in_order_and_only_with_a_slot() -> None:
    ring = make(3)
    claims = [ring.claim(0) for _ in range(4)]
    assert [c and c.group for c in claims] == [0, 1, 2, None]
    assert len({c.slot for c in claims[:3]}) == 3
    for claim in (claims[2], claims[0], claims[1]):
        ring.put(claim, group_of(claim.group))
    assert ring.claim(0) is None, "READY groups keep their slots"
    refs = ring.take(2)
    assert ring.claim(0) is None, "and so do taken ones"
    ring.release(refs, 1)
    assert ring.claim(0) is None, "until the weights trained on them are live"
    ring.set_live(0, 1)
    assert [ring.claim(0).group, ring.claim(0).group, ring.claim(0)] == [3, 4, None]


def test_nothing_is_admitted_before_every_rank_has_its_first_weights() -> None:
    ring = make(live=None, num_rollout_ranks=2)
    assert ring.claim(0) is None
    ring.set_live(0, 0)
    assert ring.claim(0) is None
    ring.set_live(1, 0)
    assert ring.claim(1).group == 0


def test_a_group_comes_back_bit_for_bit_as_views_of_the_slot() -> None:
    ring = make()
    group = group_of(0)
    ring.put(ring.claim(0), group)
    (ref,) = ring.take(1)
    serialised = np.zeros(group_nbytes(group), np.uint8)
    write_group(group, memoryview(serialised))
    ring.put_bytes(ring.claim(0), serialised)
    assert_equal(group, ring.read(ring.take(1)[0]))
    for _ in range(2):  # any reader of the node may read it, as often as it likes
        back = ring.read(pickle.loads(pickle.dumps(ref)))
        assert_equal(group, back)
    segment = np.frombuffer(ring.segment.buffer, np.uint8)
    assert all(np.shares_memory(t.tokens, segment) for t in back)


def test_take_is_strict_with_a_window_of_one_and_passes_the_head_with_a_larger_one() -> None:
    ring = make(4)
    claims = [ring.claim(0) for _ in range(4)]
    for i in (1, 2, 3):
        ring.put(claims[i], group_of(i))
    assert not ring.ready(1), "group 0 is not there yet"
    ring.put(claims[0], group_of(0))
    assert [r.group for r in ring.take(3)] == [0, 1, 2]

    ring = make(6, window=3)
    claims = [ring.claim(0) for _ in range(6)]
    for i in (5, 4, 3, 2):
        ring.put(claims[i], group_of(i))
    assert ring.ready(1) and not ring.ready(2), "group 0 is the oldest unconsumed: the window is 0, 1, 2"
    assert [r.group for r in ring.take(1)] == [2]
    assert not ring.ready(1), "the window does not move while group 0 is missing"
    ring.put(claims[0], group_of(0))
    assert ring.ready(2), "0, then 3: the window is 1, 2, 3"
    assert not ring.ready(3)
    ring.put(claims[1], group_of(1))
    assert [r.group for r in ring.take(4)] == [0, 1, 3, 4]
    assert ring.consumed() == [0, 1, 2, 3, 4]


def test_no_more_groups_than_will_be_trained_on() -> None:
    ring = make(4, num_groups=6)
    assert put_all(ring) == [0, 1, 2, 3]
    ring.release(ring.take(4), 1)
    ring.set_live(0, 1)
    assert put_all(ring) == [4, 5]
    ring.release(ring.take(2), 2)
    ring.set_live(0, 2)
    assert ring.claim(0) is None
    assert ring.consumed() == list(range(6))


def test_a_resumed_ring_skips_what_was_consumed_and_makes_the_rest() -> None:
    first = make(6, window=3)
    claims = [first.claim(0) for _ in range(6)]
    for i in (0, 1, 3, 4):
        first.put(claims[i], group_of(i))
    first.take(3)
    done = first.consumed()
    assert done == [0, 1, 3]
    second = make(6, window=3, num_groups=9, done=done, live=7)
    assert second.consumed() == done
    assert put_all(second) == [2, 4, 5, 6, 7, 8]
    assert [r.group for r in second.take(6)] == [2, 4, 5, 6, 7, 8]
    assert second.consumed() == list(range(9))
    assert make(done=range(1000)).claim(0) is None


def test_nodes_stripe_the_group_numbers() -> None:
    rings = [make(4, stride=3, offset=node, num_groups=5, done=[0] if node == 1 else []) for node in range(3)]
    numbers = [put_all(ring) for ring in rings]
    assert numbers == [[0, 3, 6, 9], [4, 7, 10, 13], [2, 5, 8, 11]]
    refs = rings[1].take(2)
    assert [r.group for r in refs] == [4, 7]
    assert rings[1].consumed() == [0, 1, 2], "indices of this ring"
    rings[1].release(refs, 0)
    assert put_all(rings[1]) == [], "the numbering ends at index 5"


def test_stale_references_and_claims_are_refused() -> None:
    ring = make(1)
    claim = ring.claim(0)
    ring.put(claim, group_of(0))
    with pytest.raises(AssertionError, match="is stale: slot 0 holds group 0, generation 1, READY"):
        ring.put(claim, group_of(0))
    with pytest.raises(AssertionError, match="READY"):
        ring.read(Ref(*claim))
    (ref,) = ring.take(1)
    ring.release([ref], 0)
    with pytest.raises(AssertionError, match="FREE"):
        ring.release([ref], 0)
    second = ring.claim(0)
    ring.put(second, group_of(1))
    ring.take(1)
    with pytest.raises(AssertionError, match="slot 0 holds group 1, generation 2, READING"):
        ring.read(ref)
    with pytest.raises(AssertionError, match="is stale"):
        ring.read(Ref(1, 0, 1))


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    ring = make()
    ring.put(ring.claim(0), group_of(0))
    (ref,) = ring.take(1)
    record = np.frombuffer(ring.segment.buffer, np.uint8)[ring.data_at :][: group_nbytes(group_of(0))]
    for place in range(len(record)):
        record[place] ^= 1 << (place % 8)
        with pytest.raises(RuntimeError, match="group 0 in slot 0 is corrupt"):
            ring.read(ref)
        record[place] ^= 1 << (place % 8)
    ring.read(ref)


def test_a_group_that_does_not_fit_names_the_flag_and_leaves_the_ring_usable() -> None:
    ring = make(slot_bytes=100)  # rounded up to a page
    claim = ring.claim(0)
    big = [trajectory(10, 500, group=0)]
    message = f"takes {group_nbytes(big)} bytes, a slot of the ring has 4096; raise --max-context"
    with pytest.raises(ValueError, match=message):
        ring.put(claim, big)
    ring.put(claim, group_of(0))
    assert ring.ready(1)


def test_an_overdue_take_names_the_group_its_maker_and_everybodys_last_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make(4, num_rollout_ranks=2, stride=2, offset=1, timeout_s=0.05)
    with pytest.raises(TimeoutError, match=re.escape("waited 0.05 s for group 1, which no rank has claimed (live versions: [0, 0])")):
        ring.take(1)
    claims = [ring.claim(i % 2) for i in range(3)]
    ring.put(claims[0], group_of(1))
    ring.put(claims[2], group_of(5))
    with pytest.raises(TimeoutError) as caught:
        ring.take(3)
    pid = os.getpid()
    assert f"waited 0.05 s for group 3 (slot {claims[1].slot}, WRITING, rollout rank 1, pid {pid})" in str(caught.value)
    assert "2 of 3 groups are ready" in str(caught.value)
    for rank in range(2):
        assert re.search(rf"rank {rank} \(rollout, pid {pid}\) was generating \d+\.\d s ago", str(caught.value))
    monkeypatch.setattr(status, "process_start", lambda pid: 0)
    with pytest.raises(TimeoutError, match=rf"rank 0 \(rollout, pid {pid}, which has ended\)"):
        ring.take(3)
    assert [ring.ready(1), ring.ready(2)] == [True, False], "a take that failed took nothing"


def test_the_deadline_of_take_starts_anew_with_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make(4)
    claims = [ring.claim(0) for _ in range(4)]
    clock = [0.0]

    def sleep(_: float) -> None:
        clock[0] += 0.9
        if claims:
            claim = claims.pop(0)
            ring.put(claim, group_of(claim.group))

    monkeypatch.setattr(ring_module.time, "sleep", sleep)
    monkeypatch.setattr(ring_module.time, "monotonic", lambda: clock[0])
    assert [r.group for r in ring.take(4)] == [0, 1, 2, 3]
    assert clock[0] > 3.0


def test_a_rank_without_a_slot_can_tell_that_the_trainer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make(num_rollout_ranks=1)
    ring.board.expect_trainer(60.0)
    ring.board.beat(TRAINER, "training", 7)
    time.sleep(0.02)
    with pytest.raises(TimeoutError, match=rf"rank 1 \(training leader, pid {os.getpid()}\) was training \(step 7\) \d+\.\d s ago"):
        ring.board.expect_trainer(0.01)
    monkeypatch.setattr(status, "process_start", lambda pid: 0)
    with pytest.raises(PeerLost, match=r"no slot of the ring will become free: rank 1 \(training leader, pid \d+, which has ended\)"):
        ring.board.expect_trainer(60.0)


def test_status_counts() -> None:
    ring = make(4, num_rollout_ranks=2)
    claims = [ring.claim(0) for _ in range(3)]
    for claim in claims[:2]:
        ring.put(claim, group_of(claim.group))
    ring.add_blocked(0, 0.25)
    ring.add_blocked(1, 0.5)
    ring.add_blocked(1, 1.0)
    nbytes = [group_nbytes(group_of(i)) for i in range(2)]
    ring.count(0, restored=1, resampled=3)
    ring.count(1, restored=2, made_again=4)
    counts = {"reclaimed": 0, "blocked_s": 1.75, "restored": 3, "made_again": 4, "resampled": 3}
    assert ring.status()._asdict() == {"ready": 2, "in_flight": 1, "bytes": sum(nbytes)} | counts
    refs = ring.take(1)
    assert ring.status()._asdict() == {"ready": 1, "in_flight": 1, "bytes": sum(nbytes)} | counts
    ring.release(refs, 0)
    assert ring.status()._asdict() == {"ready": 1, "in_flight": 1, "bytes": nbytes[1]} | counts


def test_a_run_is_asked_to_stop_and_says_where_it_did() -> None:
    ring = make(4)
    claims = [ring.claim(0) for _ in range(3)]
    for claim in claims[:2]:
        ring.put(claim, group_of(claim.group))
    refs = ring.take(2)
    ring.give_back(refs)
    assert ring.consumed() == [] and [r.group for r in ring.take(1)] == [0], "what was given back can be taken again"
    assert not ring.asked
    ring.ask_to_stop()
    assert ring.asked == 1 and ring.take(2) == [], "nobody waits for a group that is not there"
    ring.ask_to_stop(at_once=True)
    ring.ask_to_stop()
    assert ring.asked == 2, "the most urgent counts"
    assert ring.stopped_at is None
    ring.stop(0)
    assert ring.stopped_at == 0


def test_live_versions_never_go_back() -> None:
    ring = make(live=3)
    with pytest.raises(AssertionError, match="from version 3 back to 2"):
        ring.set_live(0, 2)


def test_a_process_opens_a_ring_once_so_that_no_closing_drops_its_lock() -> None:
    ring = make()
    path = ring.segment.path
    with pytest.raises(AssertionError, match="already has the ring"):
        Ring.attach(path)
    del ring
    gc.collect()
    with pytest.raises(RuntimeError, match="has ended"):
        Ring.attach(path)


def test_slots_take_no_memory_before_they_are_written() -> None:
    ring = make(64, slot_bytes=16 * 2**20)
    header = ring.data_at
    claim = ring.claim(0)
    assert isinstance(claim, Claim)
    ring.put(claim, group_of(0))
    assert os.fstat(ring.segment.fd).st_blocks * 512 <= header + 4096


def test_a_ring_that_does_not_fit_names_the_flags() -> None:
    with pytest.raises(ValueError, match=r"memory are free; lower --max-context, --samples-per-prompt, --max-branches or --prompts-per"):
        make(1 << 20, slot_bytes=1 << 30)
