"""Packing: every sampled token has one row, one position before it; nothing lost, nothing dependent on arrival order.

    python -m pytest tests/core/test_pack.py
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from samples import step_of, trajectory

from miles_core import pack
from miles_core.schema import Batch, group_nbytes, read_group, write_group


def test_fields_by_hand() -> None:
    """Two sequences, the longer first. Turns of the first: prompt 10 11, answer 12 13, tool output 14, answer 15."""
    multi_turn = trajectory(
        2, 4, tokens=np.arange(10, 16, dtype=np.int32), loss_mask=np.array([0, 0, 1, 1, 0, 1], np.uint8),
        turns=np.array([2, 2, 1, 1], np.int32), logp_roll=np.array([0, 0, -1, -2, 0, -3], np.float32),
        version=np.array([[4, 2], [5, 1]], np.int32), advantage=0.5, temperature=0.7,
    )  # fmt: skip
    masked = trajectory(
        1, 1, sample=1, tokens=np.array([20, 21], np.int32), logp_roll=np.array([0, -4], np.float32), version=np.array([[5, 1]], np.int32),
        verdict=3, top_p=0.9, top_k=8,
    )  # fmt: skip
    (batch,) = pack.pack([masked, multi_turn], max_tokens=8)
    expected = {
        "tokens_T": [10, 11, 12, 13, 14, 15, 20, 21],
        "positions_T": [0, 1, 2, 3, 4, 5, 0, 1],
        "cu_seqlens_S1": [0, 6, 8],
        "rows_M": [1, 2, 4, 6],
        "targets_M": [12, 13, 15, 21],
        "sequence_M": [0, 0, 0, 1],
        "logp_roll_M": [-1, -2, -3, -4],
        "advantage_M": [0.5, 0.5, 0.5, 0],
        "version_M": [4, 4, 5, 5],
        "keep_M": [1, 1, 1, 0],
        "temperature_M": [0.7, 0.7, 0.7, 1.0],
        "top_p_M": [1, 1, 1, 0.9],
        "top_k_M": [0, 0, 0, 8],
        "weight_S": [3, 0],
        "episode_S": [3, 0],
        "ids_S3": [[0, 0, 0], [0, 1, 0]],
    }
    for name, values in expected.items():
        tensor = getattr(batch, name)
        assert torch.equal(tensor, torch.tensor(values, dtype=tensor.dtype)), (name, tensor)
    floats = {"logp_roll_M", "advantage_M", "keep_M", "temperature_M", "top_p_M", "weight_S", "episode_S"}
    for name in expected:
        wanted = torch.float32 if name in floats else torch.int32 if name == "cu_seqlens_S1" else torch.int64
        assert getattr(batch, name).dtype == wanted, name
    assert pack.count([masked, multi_turn]) == pack.Counts(loss_tokens=3, loss_episodes=1, tokens=8, sequences=2)


def _sequences(batches: list[Batch]) -> Counter:
    """Multiset of the sequences in the batches, with everything that belongs to them."""
    found: Counter = Counter()
    for b in batches:
        for s in range(b.num_sequences):
            start, end = b.cu_seqlens_S1[s : s + 2].tolist()
            of_s = b.sequence_M == s
            found[tuple(b.tokens_T[start:end].tolist()), tuple(b.logp_roll_M[of_s].tolist()), tuple((b.rows_M[of_s] - start).tolist())] += 1
    return found


@pytest.mark.parametrize("max_tokens", [31, 64, 100, 10_000])
def test_every_sequence_is_packed_once_and_no_budget_is_exceeded(max_tokens: int) -> None:
    step = step_of(6, 4)
    batches = pack.pack(step, max_tokens)
    assert all(b.num_tokens <= max_tokens for b in batches)
    sampled = [np.flatnonzero(t.loss_mask) for t in step]
    expected = [(t.tokens, t.logp_roll[at], at - 1) for t, at in zip(step, sampled, strict=True)]
    assert _sequences(batches) == Counter(tuple(tuple(array.tolist()) for array in arrays) for arrays in expected)
    assert sum(b.keep_M.sum().item() for b in batches) == sum(b.weight_S.sum().item() for b in batches) == pack.count(step).loss_tokens
    # First-fit: any two micro-batches together exceed the budget, so there are less than twice as many as needed.
    sizes = sorted(b.num_tokens for b in batches)
    assert len(sizes) == 1 or sizes[0] + sizes[1] > max_tokens


def test_arrival_order_does_not_matter() -> None:
    step = step_of(6, 4)
    shuffled = step.copy()
    random.Random(1).shuffle(shuffled)
    for first, second in zip(pack.pack(step, 64), pack.pack(shuffled, 64), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(vars(first).values(), vars(second).values(), strict=True) if a is not None)
    names = [[(t.group, t.sample) for t in share] for share in pack.balance(step, 3)]
    assert names == [[(t.group, t.sample) for t in share] for share in pack.balance(shuffled, 3)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_balance_deals_every_trajectory_once_and_nearly_equal_tokens(num_ranks: int) -> None:
    step = step_of(12, 4)
    shares = pack.balance(step, num_ranks)
    assert sorted((t.group, t.sample) for share in shares for t in share) == sorted((t.group, t.sample) for t in step)
    loads = [sum(len(t.tokens) for t in share) for share in shares]
    fullest = loads.index(max(loads))  # was the emptiest when it got its last, hence shortest, trajectory
    assert max(loads) - min(loads) <= min(len(t.tokens) for t in shares[fullest]), loads
    assert max(loads) <= 1.05 * sum(loads) / num_ranks, loads


def test_more_ranks_than_trajectories_leaves_empty_ranks_that_still_have_a_batch() -> None:
    shares = pack.balance([trajectory(3, 4)], 3)
    assert [len(share) for share in shares] == [1, 0, 0]
    assert pack.count(shares[1]) == pack.Counts(0, 0, 0, 0)
    (batch,) = pack.pack(shares[1], 64)
    assert (batch.num_tokens, batch.num_sequences, len(batch.rows_M)) == (1, 1, 1)
    assert batch.keep_M.sum() == batch.weight_S.sum() == 0
    padded = pack.pad([batch], 3)
    assert len(padded) == 3 and all(b.keep_M.sum() == 0 for b in padded)


def test_batch_outlives_the_ring_slot() -> None:
    group = [trajectory(3, 5, sample=i) for i in range(2)]
    slot = memoryview(bytearray(group_nbytes(group)))
    write_group(group, slot)
    (batch,), (expected,) = pack.pack(read_group(slot), 64), pack.pack(group, 64)
    slot[:] = bytes(len(slot))
    assert all(torch.equal(a, b) for a, b in zip(vars(batch).values(), vars(expected).values(), strict=True) if a is not None)


def test_trajectory_longer_than_the_budget_names_the_flag() -> None:
    with pytest.raises(ValueError, match="--micro-batch-tokens 8 cannot hold a trajectory of 9 tokens"):
        pack.pack([trajectory(3, 6)], 8)


def test_a_sampled_first_token_is_refused() -> None:
    with pytest.raises(AssertionError, match="no predecessor"):
        pack.pack([trajectory(0, 3)], 8)


@pytest.mark.parametrize(
    ("rewards", "verdicts", "expected"),
    [
        ([1, 1, 1], [0, 0, 0], True),
        ([1, 0, 1], [0, 0, 0], False),
        ([1, 0, 1], [0, 2, 0], True),  # the odd one is not valid
        ([1, 0, 1], [0, 2, 1], True),  # one valid reward: nothing to compare
        ([1, 0, 1], [3, 2, 1], True),
    ],
)
def test_zero_std(rewards: list[float], verdicts: list[int], expected: bool) -> None:
    group = [trajectory(2, 2, sample=i, reward=float(r), verdict=v) for i, (r, v) in enumerate(zip(rewards, verdicts, strict=True))]
    assert pack.zero_std(group) is expected
