"""Episodes of several branches after the engine: one weight for an episode wherever its siblings land, and metrics that count episodes.

    python -m pytest tests/core/test_branches.py
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import step_of, trajectory
from test_loss import PARAMS
from test_loss_invariance import AGGREGATIONS, on_ranks, scores

from miles_core import advantage, pack
from miles_core.loss import policy_loss
from miles_core.report import rollout_metrics
from miles_core.schema import DRIFTS, Trajectory


def masked(t: Trajectory, trained_T: np.ndarray, **fields: object) -> Trajectory:
    """A sibling of `t` that trains these of its sampled tokens."""
    mask_T = t.loss_mask * trained_T.astype(np.uint8)
    logp_T = np.where(mask_T, t.logp_roll, 0).astype(np.float32)
    return replace(t, loss_mask=mask_T, logp_roll=logp_T, version=np.array([[0, int(mask_T.sum())]], np.int32), **fields)


def cut(t: Trajectory, ends: list[int]) -> list[Trajectory]:
    """The same sampled tokens as siblings: each holds all tokens up to its end, and trains those that the one before has not."""
    siblings = []
    for sibling, (start, end) in enumerate(zip([0, *ends], [*ends, len(t.tokens)], strict=True)):
        whole = replace(
            t, tokens=t.tokens[:end], loss_mask=t.loss_mask[:end], logp_roll=t.logp_roll[:end], turns=np.r_[t.turns[0], end - t.turns[0]],
        )  # fmt: skip
        siblings.append(masked(whole, np.arange(end) >= start, sibling=sibling, episode_tokens=t.num_trained))
    return siblings


def forked_step(seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """A step of episodes of one branch; and the same, each cut into one to three siblings."""
    rng, step = random.Random(seed), step_of(3, 4, seed)
    ends = [sorted(rng.sample(range(t.turns[0] + 1, len(t.tokens)), min(rng.randrange(3), t.num_trained - 1))) for t in step]
    return step, [sibling for t, cuts in zip(step, ends, strict=True) for sibling in cut(t, cuts)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("loss", "aggregation"), list(itertools.product(("ppo_clip", "cispo"), AGGREGATIONS)))
def test_how_an_episode_is_cut_into_branches_does_not_matter(loss: str, aggregation: str, seed: int) -> None:
    """To a policy that sees one token back, so that each token has the same context in every cut. On any number of ranks."""
    params, (step, forked) = replace(PARAMS, loss=loss, aggregation=aggregation), forked_step(seed)
    assert len(forked) > len(step) + 3
    expected_VV, expected = on_ranks(step, 1, 100_000, params)
    for ranks, max_tokens in ((1, 100_000), (2, 40), (3, 75), (5, 40)):
        found_VV, found = on_ranks(forked, ranks, max_tokens, params)
        assert (found_VV - expected_VV).abs().max() <= 1e-6 * expected_VV.abs().max(), (ranks, max_tokens)
        for name in expected:
            assert found[name].value() == pytest.approx(expected[name].value(), rel=1e-5, abs=1e-6), (name, ranks, max_tokens)


def by_hand(step: list[Trajectory], aggregation: str) -> float:
    """The on-policy gradient's loss, -A logp of each trained token, in float64: episode by episode, its siblings' tokens together."""
    score_VV, episodes = scores().detach().double().log_softmax(-1), {}
    for t in (t for t in step if t.verdict == 0):
        at = np.flatnonzero(t.loss_mask)
        terms = [-t.advantage * float(score_VV[a, b]) for a, b in zip(t.tokens[at - 1], t.tokens[at], strict=True)]
        episodes.setdefault((t.group, t.sample), []).extend(terms)
    sums, lengths = [sum(terms) for terms in episodes.values()], [len(terms) for terms in episodes.values()]
    if aggregation == "token_mean":
        return sum(sums) / sum(lengths)
    return sum(s / (n if aggregation == "sequence_mean" else PARAMS.max_new_tokens) for s, n in zip(sums, lengths, strict=True)) / len(sums)


def fork(rng: np.random.Generator, group: int, sample: int) -> list[Trajectory]:
    """An episode whose branches have tokens of their own after a first answer that they share."""
    advantage, verdict, shared = float(rng.normal()), int(rng.random() < 0.2), trajectory(4, 6, group=group, sample=sample, seed=9)
    siblings = []
    for sibling in range(int(rng.integers(1, 5))):
        own = trajectory(3, int(rng.integers(1, 12)), group=group, sample=sample, seed=10 + sibling)
        names = ("tokens", "loss_mask", "logp_roll", "turns")
        arrays = {name: np.concatenate([getattr(shared, name), getattr(own, name)]) for name in names}
        whole = replace(own, **arrays, verdict=verdict, advantage=advantage)
        siblings.append(masked(whole, np.arange(len(whole.tokens)) >= 10 * (sibling > 0), sibling=sibling, episode_tokens=0))
    return [replace(t, episode_tokens=sum(t.num_trained for t in siblings)) for t in siblings]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_loss_of_forked_episodes_is_its_formula(aggregation: str) -> None:
    """Ratio 1, cispo: every term is -A logp."""
    rng = np.random.default_rng(3)
    step = [t for group in range(3) for sample in range(4) for t in fork(rng, group, sample)]
    params, model_VV = replace(PARAMS, loss="cispo", aggregation=aggregation), scores().detach().log_softmax(-1)
    for t in step:  # what this policy would have sampled with
        at = np.flatnonzero(t.loss_mask)
        t.logp_roll[at] = model_VV[t.tokens[at - 1], t.tokens[at]]
    kept = [t for t in step if t.verdict == 0]
    counts = pack.count(step)
    assert counts.loss_episodes == len({(t.group, t.sample) for t in kept}) < counts.loss_tokens == sum(t.num_trained for t in kept)
    for ranks, max_tokens in ((1, 100_000), (3, 60), (4, 33)):
        _, metrics = on_ranks(step, ranks, max_tokens, params)
        assert metrics["train/loss"].value() == pytest.approx(by_hand(step, aggregation), rel=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 40])
def test_an_episode_is_counted_once_wherever_its_siblings_are(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    step = [t for group in range(4) for sample in range(5) for t in fork(rng, group, sample)]
    shares = pack.balance(step, num_ranks)
    assert sum(pack.count(share).loss_episodes for share in shares) == pack.count(step).loss_episodes
    assert sorted(t.key for share in shares for t in share) == sorted({t.key for t in step}) and len(step) > 20
    for batch in pack.pack(step, 60):
        for (group, sample, sibling), weight, episode in zip(batch.ids_S3.tolist(), batch.weight_S, batch.episode_S, strict=True):
            (t,) = [t for t in step if t.key == (group, sample, sibling)]
            assert (weight, episode) == ((t.num_trained, t.episode_tokens) if t.verdict == 0 else (0, 0))


def test_gspo_has_a_ratio_for_each_sibling() -> None:
    """Two siblings of 2 and 1 tokens, ratios 1.2 and 0.9; their shares of the term are by the episode's three tokens."""
    first = trajectory(2, 2, episode_tokens=3, advantage=1.0)
    second = trajectory(2, 1, sibling=1, episode_tokens=3, advantage=1.0)
    (batch,) = pack.pack([first, second], 64)
    logp_M = batch.logp_roll_M + torch.tensor([1.5, 0.96, 0.9]).log()
    params = replace(PARAMS, loss="gspo", aggregation="sequence_mean", clip_low=0.5, clip_high=0.5)
    loss, _ = policy_loss(logp_M, torch.zeros(3), batch, params, 1.0)
    assert loss.item() == pytest.approx(-(2 * 1.2 + 0.9) / 3, rel=1e-5)


def test_zero_std_and_whitening_of_forked_episodes() -> None:
    """Siblings are no two rewards to compare; whitening weighs by token, so a cut does not change it."""
    alone = [trajectory(2, 2, sibling=i, episode_tokens=4, reward=1.0) for i in range(2)]
    assert pack.zero_std(alone) and pack.zero_std([*alone, trajectory(2, 2, sample=1, reward=1.0)])
    assert not pack.zero_std([*alone, trajectory(2, 2, sample=1)])
    step, forked = forked_step(1)
    sums = advantage.whitening_sums(step)
    assert advantage.whitening_sums(forked) == pytest.approx(sums)
    expected = {t.key[:2]: t.advantage for t in advantage.whiten(step, sums)}
    assert all(t.advantage == expected[t.key[:2]] for t in advantage.whiten(forked, sums))


# ---- metrics


def test_metrics_count_episodes() -> None:
    """Three episodes of one group: of two branches, the second cut by length; of one branch; and one that an agent's tool broke."""
    drift = np.zeros(len(DRIFTS), np.int32)
    retokenised = drift.copy()
    retokenised[DRIFTS.index("retokenised")] = 3
    # A first turn of 2 + 6 tokens; the branches go on with a prompt of 3 and an answer of 4, or a prompt of 5 and an answer of 2.
    first = trajectory(
        2, 13, turns=np.array([2, 6, 3, 4]), loss_mask=np.repeat(np.uint8([0, 1, 0, 1]), [2, 6, 3, 4]), version=np.array([[0, 10]]),
        cached=1 + 7, cached_later=7, reward=1.0, episode_tokens=12, branches_dropped=2, drift=retokenised,
    )  # fmt: skip
    second = trajectory(
        2, 13, sibling=1, turns=np.array([2, 6, 5, 2]), loss_mask=np.repeat(np.uint8([0, 0, 0, 1]), [2, 6, 5, 2]),
        version=np.array([[0, 2]]), cached=8, cached_later=8, reward=1.0, episode_tokens=12, branches_dropped=2, finish=1,
        drift=retokenised,
    )  # fmt: skip
    other = trajectory(2, 4, sample=1, cached=1, drift=drift)
    broken = trajectory(2, 2, sample=2, verdict=2, drift=drift)
    found = {name: metric.value() for name, metric in rollout_metrics([[first, second, other, broken]]).items()}
    expected = {
        "reward_mean": 1 / 2,
        "reward_std": 1 / 2,
        "zero_std_frac": 0,
        "pass@3": 1,
        "tokens": 18,
        "response_len_mean": 6,
        "response_len_max": 12,
        "truncated_frac": 1 / 3,
        "verdict/ok": 2 / 3,
        "verdict/infra_error": 1 / 3,
        "prefix_hit_rate": (1 + 7 + 8 + 1) / (2 + 11 + 13 + 2 + 2),
        "prefix_hit_rate_later": (7 + 8) / (11 + 13),
        "branches_dropped": 2,
        "drift/retokenised": 1 / 3,
        "drift/special_count": 0,
    }
    assert {name: found[f"rollout/{name}"] for name in expected} == pytest.approx(expected)
    assert sum(name.startswith("rollout/drift/") for name in found) == len(DRIFTS)
    single = rollout_metrics([[trajectory(2, 4), trajectory(2, 4, sample=1)]])
    assert not [name for name in single if "drift" in name or "branches" in name or "later" in name], "no agent plays"
