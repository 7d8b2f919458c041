"""What a loss must not depend on: masked samples, and how the step was cut. And the metrics that compare sampler with trainer.

    python -m pytest tests/core/test_loss_invariance.py
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import step_of, trajectory
from test_loss import PARAMS

from miles_core import pack
from miles_core.loss import LOSSES, LossParams, denominator, importance_weight, parity_diff, policy_loss, staleness
from miles_core.metrics import merge
from miles_core.schema import Batch, Trajectory

VOCABULARY = 50
AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")
SETTINGS = {
    "plain": {},
    "dual_clip": {"dual_clip": 1.5},
    "decoupled": {"anchor": "decoupled", "importance_cap": 1.5},
    "icepop": {"icepop_low": 0.02, "icepop_high": 1.0},
    "kl": {"kl_coef": 0.3},
}


def scores() -> torch.Tensor:
    """A model small enough to see through: the logits of the next token depend on the last one only. float32 [V, V]."""
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)).requires_grad_()


def backward(score_VV: torch.Tensor, batches: list[Batch], params: LossParams, total: float) -> dict:
    """Accumulate gradients over micro-batches; returns the merged metrics."""
    metrics = []
    for batch in batches:
        logp_MV = score_VV[batch.tokens_T[batch.rows_M]].log_softmax(-1)
        logp_M = logp_MV.gather(1, batch.targets_M[:, None])[:, 0]
        batch = replace(batch, logp_ref_M=logp_M.detach() * 0.9)
        loss, found = policy_loss(logp_M, -(logp_MV.exp() * logp_MV).sum(-1).detach(), batch, params, total)
        loss.backward()
        metrics.append(found)
    return merge(metrics)


def on_ranks(step: list[Trajectory], num_ranks: int, max_tokens: int, params: LossParams) -> tuple[torch.Tensor, dict]:
    """What `num_ranks` training ranks would compute together: gradients summed, counts taken globally and before any backward."""
    shares = pack.balance(step, num_ranks)
    counts = [sum(column) for column in zip(*(pack.count(share) for share in shares), strict=True)]
    total = denominator(params, counts[0], counts[1])
    packed = [pack.pack(share, max_tokens) for share in shares]
    most = max(len(batches) for batches in packed)
    score_VV = scores()
    metrics = merge([backward(score_VV, pack.pad(batches, most), params, total) for batches in packed])
    return score_VV.grad, metrics


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("loss", "aggregation"), list(itertools.product(sorted(LOSSES), AGGREGATIONS)))
def test_result_does_not_depend_on_micro_batches_or_ranks(loss: str, aggregation: str, setting: str) -> None:
    """One batch on one rank against every other cut, up to more ranks than sequences: gradient within 1e-6 of its largest value."""
    params = replace(PARAMS, loss=loss, aggregation=aggregation, **SETTINGS[setting])
    for step, num_ranks in ((step_of(3, 4), (1, 2, 3, 4)), (step_of(1, 3, seed=5), (5,))):
        gradient_VV, metrics = on_ranks(step, 1, 100_000, params)
        assert gradient_VV.abs().max() > 1e-4
        for ranks, max_tokens in itertools.product(num_ranks, (32, 75, 100_000)):
            other_VV, others = on_ranks(step, ranks, max_tokens, params)
            assert (other_VV - gradient_VV).abs().max() <= 1e-6 * gradient_VV.abs().max(), (ranks, max_tokens)
            assert others.keys() == metrics.keys()
            for name in metrics:
                assert others[name].value() == pytest.approx(metrics[name].value(), rel=1e-5, abs=1e-6), (name, ranks, max_tokens)


def test_the_check_above_would_see_a_local_denominator() -> None:
    """Dividing by each micro-batch's own count and averaging, the classic mistake, is off by far more than the tolerance."""
    step = step_of(3, 4)
    right_VV, _ = on_ranks(step, 1, 100_000, PARAMS)
    batches = pack.pack(step, 75)
    score_VV = scores()
    for batch in batches:
        backward(score_VV, [batch], PARAMS, float(batch.keep_M.sum()) * len(batches))
    assert (score_VV.grad - right_VV).abs().max() > 1e-2 * right_VV.abs().max()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_masked_samples_have_exactly_zero_gradient_whatever_they_hold(loss: str, setting: str) -> None:
    """Poison every masked row with inf, nan and absurd log-probs: same loss bits, zero gradient there, same gradient elsewhere."""
    params = replace(PARAMS, loss=loss, **SETTINGS[setting])
    (clean,) = pack.pack(step_of(3, 4), 100_000)
    clean = replace(clean, logp_ref_M=clean.logp_roll_M - 0.2)
    masked_M = clean.keep_M == 0
    assert 0 < masked_M.sum() < len(masked_M)
    drift_M = 0.5 * torch.randn(len(masked_M), generator=torch.Generator().manual_seed(1))

    def run(batch: Batch, logp_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp_M = logp_M.clone().requires_grad_()
        loss_value, metrics = policy_loss(logp_M, torch.ones_like(logp_M), batch, params, 100.0)
        loss_value.backward()
        assert all(math.isfinite(metric.value()) for metric in metrics.values()), metrics
        return loss_value.detach(), logp_M.grad

    loss_value, gradient_M = run(clean, clean.logp_roll_M + drift_M)
    assert torch.equal(gradient_M[masked_M], torch.zeros(int(masked_M.sum())))
    assert (gradient_M[~masked_M] != 0).any()
    for poison in (-math.inf, math.nan, -1e30, 500.0):
        poisoned = replace(
            clean,
            logp_roll_M=torch.where(masked_M, -123.0, clean.logp_roll_M),
            logp_ref_M=torch.where(masked_M, math.nan, clean.logp_ref_M),
        )
        logp_M = torch.where(masked_M, poison, clean.logp_roll_M + drift_M)
        value, gradient = run(poisoned, logp_M)
        assert importance_weight(logp_M, poisoned, params).isfinite().all()
        assert torch.equal(value, loss_value)
        assert torch.equal(gradient, gradient_M)


def test_an_empty_rank_has_zero_gradient_and_adds_nothing_to_metrics() -> None:
    score_VV = scores()
    metrics = backward(score_VV, [pack.dummy()], PARAMS, 10.0)
    assert torch.equal(score_VV.grad, torch.zeros_like(score_VV))
    assert metrics["train/loss"].total == 0 and metrics["train/ratio_mean"].count == 0 and "train/ratio_max" not in metrics
    assert staleness(pack.dummy(), 3) == {}
    assert values(parity_diff(torch.zeros(1), pack.dummy(), 3, "recompute")) == {"tokens": 0}


# ---- sampler against trainer --------------------------------------------------------------------------------------------------


def two_versions() -> Batch:
    """First sequence: 2 tokens at version 6, 3 at version 7. Second: 2 at version 7. Third: 1 at version 4, masked out."""
    first = trajectory(2, 5, version=np.array([[6, 2], [7, 3]], np.int32))
    second = trajectory(2, 2, sample=1, version=np.array([[7, 2]], np.int32))
    masked = trajectory(1, 1, sample=2, version=np.array([[4, 1]], np.int32), verdict=2)
    (batch,) = pack.pack([first, second, masked], 64)
    return batch


def test_staleness_counts_from_the_oldest_token() -> None:
    metrics = staleness(two_versions(), version=8)
    assert (metrics["train/staleness_mean"].value(), metrics["train/staleness_max"].value()) == (1.5, 2)  # 8 - 6 and 8 - 7
    with pytest.raises(AssertionError, match="sampled at version 7, but version 6"):
        staleness(two_versions(), version=6)


def values(metrics: dict) -> dict[str, float]:
    return {name.removeprefix("train/logp_diff_"): metric.value() for name, metric in metrics.items()}


def test_parity_compares_only_tokens_of_this_very_version() -> None:
    batch = two_versions()
    moved_M = torch.tensor([0.25, 0.5, 0, 0, 0, 0, 0, 99.0])  # the old tokens differ, and so does the masked one
    found = values(parity_diff(batch.logp_roll_M + moved_M, batch, 7, "recompute"))
    assert found == {"tokens": 5, "max": 0.0, "p99": 0.0, "mean": 0.0, "frac": 0.0, "mean_stale1": pytest.approx(0.375)}


def test_parity_sees_one_bit_of_one_token() -> None:
    batch = two_versions()
    logp_M = batch.logp_roll_M.clone()
    logp_M[4] = torch.nextafter(logp_M[4], torch.tensor(0.0))
    found = values(parity_diff(logp_M, batch, 7, "recompute"))
    assert 0 < found["max"] < 1e-6 and found["frac"] == 1 / 5
    assert values(parity_diff(torch.full_like(logp_M, math.nan), batch, 7, "recompute"))["max"] != 0.0


def test_parity_with_a_kept_cache_leaves_out_sequences_that_saw_an_update() -> None:
    batch = two_versions()
    moved_M = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0, 0, 0])  # also tokens sampled at version 7, over keys of version 6
    found = values(parity_diff(batch.logp_roll_M + moved_M, batch, 7, "keep"))
    assert (found["tokens"], found["max"], found["mean_stale1"]) == (2, 0.0, pytest.approx(1.0))


def test_parity_says_when_nothing_was_compared() -> None:
    assert values(parity_diff(two_versions().logp_roll_M, two_versions(), 9, "recompute")) == {
        "tokens": 0, "mean_stale3": 0.0, "mean_stale2": 0.0,
    }  # fmt: skip
