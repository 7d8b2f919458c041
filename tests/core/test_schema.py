"""The one serialisation of trajectories. Run: python -m pytest tests/core/test_schema.py"""

from dataclasses import replace

import numpy as np
import pytest

from miles_core.digest import digest
from miles_core.schema import DRIFTS, FIELDS, Trajectory, group_nbytes, read_group, write_group


def random_trajectory(rng: np.random.Generator, group: int, sample: int, num_prompt: int, num_answer: int) -> Trajectory:
    first = int(rng.integers(0, num_answer + 1))
    runs = [(3, first), (4, num_answer - first)] if 0 < first < num_answer else [(3, num_answer)]
    mask = np.r_[np.zeros(num_prompt), np.ones(num_answer)].astype(np.uint8)
    return Trajectory(
        group=group,
        sample=sample,
        tokens=rng.integers(0, 50000, num_prompt + num_answer).astype(np.int32),
        loss_mask=mask,
        logp_roll=(rng.normal(size=len(mask)) * mask).astype(np.float32),
        version=np.array(runs, np.int32),
        turns=np.array([num_prompt, num_answer], np.int32),
        finish=1,
        sibling=sample % 3,
        episode_tokens=num_answer + sample,
        branches_dropped=sample,
        cached=num_prompt // 2,
        cached_later=num_prompt // 4,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        reward=float(np.float32(rng.normal())),
        verdict=2,
        advantage=float(np.float32(rng.normal())),
        drift=rng.integers(0, 9, len(DRIFTS) * (sample % 2)).astype(np.int32),
    )


def test_a_group_comes_back_bit_for_bit_and_without_a_copy():
    rng = np.random.default_rng(0)
    group = [random_trajectory(rng, 2**40 + 7, i, 1 + 3 * i, 5 * i + 1) for i in range(4)]
    buffer = np.full(group_nbytes(group) + 64, 0xAB, np.uint8)
    assert write_group(group, memoryview(buffer)) == digest(memoryview(buffer)[: group_nbytes(group)])
    assert (buffer[group_nbytes(group) :] == 0xAB).all()
    back = read_group(memoryview(buffer))
    for mine, theirs in zip(group, back, strict=True):
        for f in FIELDS:
            a, b = np.asarray(getattr(mine, f.name), f.dtype), np.asarray(getattr(theirs, f.name), f.dtype)
            assert a.tobytes() == b.tobytes() and a.shape == b.shape, f.name
    assert np.shares_memory(back[2].tokens, buffer)


def test_fields_that_disagree_are_refused():
    trajectory = random_trajectory(np.random.default_rng(1), 0, 0, 4, 6)
    trajectory.logp_roll = trajectory.logp_roll[:-1]
    with pytest.raises(AssertionError, match="differ in length"):
        write_group([trajectory], memoryview(bytearray(4096)))
    trajectory = random_trajectory(np.random.default_rng(1), 3, 1, 4, 6)
    trajectory.episode_tokens = 5
    with pytest.raises(AssertionError, match="group 3 sample 1 sibling 1 trains 6 tokens, its episode 5"):
        trajectory.check()


def test_an_episode_of_one_trajectory_has_its_tokens():
    trajectory = random_trajectory(np.random.default_rng(1), 0, 0, 4, 6)
    assert replace(trajectory, episode_tokens=0).episode_tokens == 6 and replace(trajectory, episode_tokens=9).episode_tokens == 9


def test_versions_expand_over_sampled_tokens_only():
    trajectory = random_trajectory(np.random.default_rng(2), 0, 0, 4, 6)
    trajectory.version = np.array([[5, 2], [7, 4]], np.int32)
    assert trajectory.version_M.tolist() == [5, 5, 7, 7, 7, 7]
    assert trajectory.oldest_version == 5
