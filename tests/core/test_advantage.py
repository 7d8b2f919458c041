"""Advantages against numbers worked out by hand, and what masked samples may not do.

    python -m pytest tests/core/test_advantage.py
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from samples import step_of, trajectory

from miles_core.advantage import ADVANTAGES, WHITENED, whiten, whitening_sums

GROUP_BASELINES = sorted(set(ADVANTAGES) - WHITENED)
ALL_OK = np.ones(4, bool)


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        # mean 1/2; std = sqrt(4 * (1/2)^2 / 3) = 0.5773503; 0.5 / (0.5773503 + 1e-6) = 0.8660239
        ("grpo", [1, 0, 0, 1], [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
        # mean 2; std = sqrt((4 + 0 + 0 + 4) / 3) = 1.6329932; 2 / 1.6329942 = 1.2247441
        ("grpo", [0, 2, 2, 4], [-1.2247441, 0, 0, 1.2247441]),
        ("grpo_no_std", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("grpo_no_std", [3, 0, 0, 1], [2, -1, -1, 0]),
        # the others' means: 1/3, 2/3, 2/3, 1/3
        ("rloo", [1, 0, 0, 1], [0.6666667, -0.6666667, -0.6666667, 0.6666667]),
        # the others' means: 1/3, 4/3, 4/3, 1
        ("rloo", [3, 0, 0, 1], [2.6666667, -1.3333333, -1.3333333, 0]),
        ("reinforce_pp", [3, 0, -2, 1], [3, 0, -2, 1]),
    ],
)
def test_formula(name: str, rewards: list[float], expected: list[float]) -> None:
    advantages = ADVANTAGES[name](np.array(rewards, np.float32), ALL_OK)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("masked_reward", [0.0, 1e6, math.nan])
def test_masked_samples_get_zero_and_influence_nobody(name: str, masked_reward: float) -> None:
    rewards, ok = np.array([1.0, masked_reward, 0.0, 0.5]), np.array([True, False, True, True])
    advantages = ADVANTAGES[name](rewards, ok)
    assert advantages[1] == 0.0
    assert np.array_equal(advantages[ok], ADVANTAGES[name](rewards[ok], np.ones(3, bool)))


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_fewer_than_two_valid_rewards_give_nothing(name: str) -> None:
    for ok in ([False] * 4, [False, True, False, False]):
        assert np.array_equal(ADVANTAGES[name](np.array([1.0, 5.0, 0.0, 1.0]), np.array(ok)), np.zeros(4, np.float32))


@pytest.mark.parametrize("name", GROUP_BASELINES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7])
def test_equal_rewards_give_exactly_zero(name: str, reward: float) -> None:
    rewards = np.full(7, reward, np.float32)
    assert np.array_equal(ADVANTAGES[name](rewards, np.ones(7, bool)), np.zeros(7, np.float32))


def test_a_valid_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        ADVANTAGES["grpo"](np.array([1.0, math.nan]), np.array([True, True]))


def test_whitening_by_hand() -> None:
    # Tokens carry 1, 0, 0, 0: mean 1/4, variance 1/4 - 1/16 = 3/16, std 0.4330127; 0.75 / std = 1.7320508, -0.25 / std = -0.5773503.
    step = [trajectory(3, 1, advantage=1.0), trajectory(2, 3, sample=1), trajectory(2, 9, sample=2, advantage=5.0, verdict=1)]
    assert whitening_sums(step) == (4.0, 1.0, 1.0)
    first, second, masked = whiten(step, whitening_sums(step))
    assert (first.advantage, second.advantage) == pytest.approx((1.7320508, -0.5773503), abs=1e-7)
    assert masked is step[2]
    assert step[0].advantage == 1.0, "the record in the ring must stay as it was"


def test_whitening_does_not_depend_on_how_the_step_is_split_over_ranks() -> None:
    step = step_of(6, 4)
    whole = whiten(step, whitening_sums(step))
    shares = [step[:5], step[5:6], [], step[6:]]
    sums = np.sum([whitening_sums(share) for share in shares], axis=0)
    split = [t for share in shares for t in whiten(share, sums)]
    assert [t.advantage for t in split] == pytest.approx([t.advantage for t in whole], abs=1e-12)
    tokens = np.array([t.loss_mask.sum() for t in whole if t.verdict == 0])
    advantages = np.array([t.advantage for t in whole if t.verdict == 0])
    assert np.average(advantages, weights=tokens) == pytest.approx(0.0, abs=1e-9)
    assert np.average(advantages**2, weights=tokens) == pytest.approx(1.0, abs=1e-9)


def test_whitening_of_nothing_and_of_equal_rewards() -> None:
    masked = [trajectory(2, 3, verdict=2)]
    assert whiten(masked, whitening_sums(masked)) == masked
    equal = [trajectory(2, n, sample=n, advantage=0.1) for n in (1, 2, 3)]
    assert max(abs(t.advantage) for t in whiten(equal, whitening_sums(equal))) < 1e-9
