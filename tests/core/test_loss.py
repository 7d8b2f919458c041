"""Each formula of loss.py against numbers worked out by hand: values and gradients.

Probabilities are chosen so that ratios are round: sampler 0.5 and trainer 0.75 give a ratio of 1.5.

    python -m pytest tests/core/test_loss.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from miles_core.loss import LOSSES, LossParams, aggregate, denominator, importance_weight, kl_to_reference, policy_loss
from miles_core.schema import Batch

PARAMS = LossParams(
    loss="ppo_clip", anchor="sampler", aggregation="token_mean", clip_low=0.2, clip_high=0.2, dual_clip=0.0, importance_cap=2.0,
    icepop_low=0.0, icepop_high=0.0, kl_coef=0.0, kl_kind="k3", max_new_tokens=8,
)  # fmt: skip


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def make_batch(roll: list[float], advantage: list[float], lengths: list[int] | None = None, keep: list[int] | None = None) -> Batch:
    """A Batch of sampled tokens only: `roll` are the sampler's probabilities; `lengths` cuts them into sequences (default: one each)."""
    num = len(roll)
    lengths = lengths or [1] * num
    sequence_M = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    keep_M = torch.tensor(keep or [1] * num, dtype=torch.float32)
    weight_S = torch.zeros(len(lengths)).index_add(0, sequence_M, keep_M)
    ids, one = torch.zeros(num, dtype=torch.int64), torch.ones(num)
    return Batch(
        tokens_T=ids, positions_T=ids, cu_seqlens_S1=torch.tensor([0, *lengths]).cumsum(0).int(), rows_M=ids, targets_M=ids,
        sequence_M=sequence_M, logp_roll_M=logs(*roll), advantage_M=torch.tensor(advantage, dtype=torch.float32), version_M=ids,
        keep_M=keep_M, temperature_M=one, top_p_M=one, top_k_M=ids,
        weight_S=weight_S, episode_S=weight_S, ids_S3=torch.zeros(len(lengths), 3, dtype=torch.int64),
    )  # fmt: skip


def term_and_gradient(loss: str, train: list[float], batch: Batch, params: LossParams = PARAMS) -> tuple[list[float], list[float]]:
    logp_train_M = logs(*train).requires_grad_()
    term_M = LOSSES[loss](logp_train_M, batch, params).term_M
    term_M.sum().backward()
    return term_M.tolist(), logp_train_M.grad.tolist()


def near(values: list[float], tolerance: float = 2e-6) -> object:
    return pytest.approx(values, abs=tolerance)


# ratio, advantage, -min(r A, clip(r, 0.8, 1.2) A), its derivative by logp (-r A where the ratio is the minimum, else 0)
PPO_CASES = [
    (1.0, 2.0, -2.0, -2.0),
    (1.0, -2.0, 2.0, 2.0),
    (1.5, 1.0, -1.2, 0.0),
    (1.5, -1.0, 1.5, 1.5),
    (0.5, 1.0, -0.5, -0.5),
    (0.5, -1.0, 0.8, 0.0),
    (1.1, 3.0, -3.3, -3.3),
    (1.9, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "term", "gradient"), PPO_CASES)
def test_ppo_clip(ratio: float, advantage: float, term: float, gradient: float) -> None:
    assert term_and_gradient("ppo_clip", [0.5 * ratio], make_batch([0.5], [advantage])) == (near([term]), near([gradient]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "gradient"),
    [(1.25, 1.0, -1.25, -1.25), (1.5, 1.0, -1.28, 0.0), (0.75, -1.0, 0.8, 0.0), (1.5, -1.0, 1.5, 1.5)],
)
def test_ppo_clip_higher(ratio: float, advantage: float, term: float, gradient: float) -> None:
    params = replace(PARAMS, clip_high=0.28)
    assert term_and_gradient("ppo_clip", [0.5 * ratio], make_batch([0.5], [advantage]), params) == (near([term]), near([gradient]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "gradient"),
    [(4.0, -1.0, 3.0, 0.0), (4.0, -2.0, 6.0, 0.0), (2.5, -1.0, 2.5, 2.5), (4.0, 1.0, -1.2, 0.0), (0.5, -1.0, 0.8, 0.0)],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(ratio: float, advantage: float, term: float, gradient: float) -> None:
    params = replace(PARAMS, dual_clip=3.0)
    assert term_and_gradient("ppo_clip", [0.2 * ratio], make_batch([0.2], [advantage]), params) == (near([term]), near([gradient]))


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_clipped_means_the_gradient_is_cut_off(loss: str) -> None:
    """The flag behind `train/clip_frac` agrees with the gradient, for three different bounds and both signs."""
    params = replace(PARAMS, clip_low=0.1, clip_high=0.3, dual_clip=2.0)
    ratios = [0.5, 0.85, 0.95, 1.0, 1.15, 1.35, 1.9, 2.5]
    for advantage in (1.0, -1.0):
        batch, logp_train_M = make_batch([0.1] * 8, [advantage] * 8), logs(*(0.1 * r for r in ratios)).requires_grad_()
        terms = LOSSES[loss](logp_train_M, batch, params)
        terms.term_M.sum().backward()
        assert torch.equal(terms.clipped_M, logp_train_M.grad == 0)
        assert 0 < terms.clipped_M.sum() < 8


def test_cispo_flags_the_weights_it_clipped() -> None:
    params = replace(PARAMS, clip_low=0.1, clip_high=0.3)
    terms = LOSSES["cispo"](logs(0.05, 0.095, 0.125, 0.2), make_batch([0.1] * 4, [1.0] * 4), params)
    assert terms.clipped_M.tolist() == [True, False, False, True]


def test_gspo_by_hand() -> None:
    """Token ratios 1.5 and 0.96: sequence ratio sqrt(1.44) = 1.2. A second sequence of one token has ratio 0.8."""
    params = replace(PARAMS, clip_low=0.1, clip_high=0.1)
    train = [0.75, 0.48, 0.4]
    batch = make_batch([0.5, 0.5, 0.5], [-1.0, -1.0, 2.0], lengths=[2, 1])
    # -min(1.2 * -1, 1.1 * -1) = 1.2 on both tokens; -min(0.8 * 2, 0.9 * 2) = -1.6.
    # d(1.2 + 1.2)/d logp = 2 * 1.2 / 2 = 1.2 for each of the two tokens; -0.8 * 2 = -1.6 for the third.
    assert term_and_gradient("gspo", train, batch, params) == (near([1.2, 1.2, -1.6]), near([1.2, 1.2, -1.6]))
    # The other sign: the first sequence is clipped at 1.1, the second at 0.9, and nothing is learned from either.
    batch = make_batch([0.5, 0.5, 0.5], [1.0, 1.0, -2.0], lengths=[2, 1])
    assert term_and_gradient("gspo", train, batch, params) == (near([-1.1, -1.1, 1.8]), [0.0, 0.0, 0.0])


def test_gspo_with_sequence_mean_is_the_paper_s_objective() -> None:
    batch = make_batch([0.5, 0.5, 0.5], [-1.0, -1.0, 2.0], lengths=[2, 1])
    params = replace(PARAMS, loss="gspo", aggregation="sequence_mean", clip_low=0.3, clip_high=0.3)
    logp_train_M = logs(0.75, 0.48, 0.4).requires_grad_()
    loss, _ = policy_loss(logp_train_M, torch.zeros(3), batch, params, denominator(params, 3, 2))
    loss.backward()
    assert loss.item() == near((1.2 - 1.6) / 2)
    assert logp_train_M.grad.tolist() == near([1.2 / 2 / 2, 1.2 / 2 / 2, -1.6 / 2])


def test_cispo_by_hand() -> None:
    # ratio 1.5, A 1:  weight 1.2, -1.2 * log 0.75 = 0.3452185, derivative -1.2: clipped, and still learned from
    # ratio 0.5, A -1: weight 0.8,  0.8 * log 0.25 = -1.1090355, derivative 0.8
    # ratio 1.1, A 2:  weight 1.1, -2.2 * log 0.55 = 1.3152415, derivative -2.2
    terms, gradients = term_and_gradient("cispo", [0.75, 0.25, 0.55], make_batch([0.5] * 3, [1.0, -1.0, 2.0]))
    assert terms == near([0.3452185, -1.1090355, 1.3152415])
    assert gradients == near([-1.2, 0.8, -2.2])
    open_below = replace(PARAMS, clip_low=1.0)
    assert term_and_gradient("cispo", [0.05], make_batch([0.5], [-1.0]), open_below)[1] == near([0.1])


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_on_policy_every_loss_has_the_policy_gradient(loss: str) -> None:
    """Ratio 1: the derivative is -A. Gradient descent raises the log-prob of tokens with A > 0 and lowers the others."""
    probabilities, advantages = [0.3, 0.9, 0.01, 0.5], [1.5, -0.5, 2.0, 0.0]
    _, gradients = term_and_gradient(loss, probabilities, make_batch(probabilities, advantages))
    assert gradients == [-1.5, 0.5, -2.0, 0.0]


def test_decoupled_by_hand() -> None:
    """Sampler 0.5, step start 0.9, trainer now 0.99: ratio 1.1 to the anchor, importance weight 1.8, or the cap."""
    batch = replace(make_batch([0.5], [1.0]), logp_prox_M=logs(0.9))
    for cap, expected in ((2.0, -1.98), (1.5, -1.65)):
        params = replace(PARAMS, anchor="decoupled", importance_cap=cap)
        logp_train_M = logs(0.99).requires_grad_()
        loss, metrics = policy_loss(logp_train_M, torch.zeros(1), batch, params, 1.0)
        loss.backward()
        assert (loss.item(), logp_train_M.grad.item()) == (near(expected), near(expected))
        assert metrics["train/ratio_mean"].value() == near(1.1)


def test_decoupled_without_prox_takes_the_live_log_probs_as_step_start() -> None:
    """One optimizer step per batch: the ratio is exactly 1, nothing is clipped, and the weight carries no gradient."""
    batch, params = make_batch([0.5, 0.5], [1.0, -1.0]), replace(PARAMS, anchor="decoupled", importance_cap=1.5)
    logp_train_M = logs(0.6, 0.95).requires_grad_()
    loss, metrics = policy_loss(logp_train_M, torch.zeros(2), batch, params, 1.0)
    loss.backward()
    assert logp_train_M.grad.tolist() == near([-1.2, 1.5])  # -A min(k, cap), k = 1.2 and 1.9
    assert (metrics["train/ratio_mean"].value(), metrics["train/clip_frac"].value()) == (1.0, 0.0)


def test_icepop_masks_tokens_but_not_the_denominator() -> None:
    """k = 0.4, 1, 6 against bounds 0.5 and 5; all three tokens stay in the mean."""
    batch, train = make_batch([0.1, 0.1, 0.1], [1.0, 1.0, -1.0]), [0.04, 0.1, 0.6]
    for low, high, weights in ((0.5, 5.0, [0, 1, 0]), (0.5, 0.0, [0, 1, 1]), (0.0, 5.0, [1, 1, 0]), (0.0, 0.0, [1, 1, 1])):
        params = replace(PARAMS, icepop_low=low, icepop_high=high)
        assert importance_weight(logs(*train), batch, params).tolist() == weights
    params = replace(PARAMS, icepop_low=0.5, icepop_high=5.0)
    logp_train_M = logs(*train).requires_grad_()
    loss, metrics = policy_loss(logp_train_M, torch.zeros(3), batch, params, denominator(params, 3, 3))
    loss.backward()
    assert loss.item() == near(-1 / 3)
    assert logp_train_M.grad.tolist() == near([0.0, -1 / 3, 0.0])
    assert metrics["train/icepop_frac"].value() == near(2 / 3)


def test_icepop_factor_of_the_paper_is_k_inside_the_bounds() -> None:
    batch = make_batch([0.1, 0.1, 0.1], [1.0, 1.0, 1.0])
    params = replace(PARAMS, anchor="decoupled", importance_cap=5.0, icepop_low=0.5, icepop_high=5.0)
    assert importance_weight(logs(0.04, 0.3, 0.6), batch, params).tolist() == near([0.0, 3.0, 0.0])


# d = log 2: k1 = 0.6931472, k2 = d^2 / 2 = 0.2402265, k3 = 1/2 - 1 + d = 0.1931472;  d = log 1/2: k3 = 2 - 1 - 0.6931472 = 0.3068528
@pytest.mark.parametrize(
    ("kind", "values", "gradients"),
    [
        ("k1", [0.6931472, -0.6931472, 0.0], [1.0, 1.0, 1.0]),
        ("k2", [0.2402265, 0.2402265, 0.0], [0.6931472, -0.6931472, 0.0]),
        ("k3", [0.1931472, 0.3068528, 0.0], [0.5, -1.0, 0.0]),
    ],
)
def test_kl(kind: str, values: list[float], gradients: list[float]) -> None:
    batch = replace(make_batch([0.5] * 3, [0.0] * 3), logp_ref_M=logs(0.2, 0.4, 0.3))
    logp_train_M = logs(0.4, 0.2, 0.3).requires_grad_()
    kl_M = kl_to_reference(logp_train_M, batch, kind)
    kl_M.sum().backward()
    assert (kl_M.tolist(), logp_train_M.grad.tolist()) == (near(values), near(gradients))
    params = replace(PARAMS, kl_coef=0.1, kl_kind=kind)
    loss, metrics = policy_loss(logp_train_M, torch.zeros(3), batch, params, 3.0)
    assert loss.item() == near(0.1 * sum(values) / 3)
    assert metrics["train/kl"].value() == near(sum(values) / 3)
    assert metrics["train/pg_loss"].value() == 0.0


def test_kl_estimates_average_to_the_kl() -> None:
    """Summed over a vocabulary with the trainer's probabilities, k1 and k3 are the KL: 0.5 log(5/2) + 0.3 log 1 + 0.2 log(2/5)."""
    train, reference = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    batch = replace(make_batch([0.5] * 3, [0.0] * 3), logp_ref_M=logs(*reference))
    exact = sum(p * math.log(p / q) for p, q in zip(train, reference, strict=True))
    for kind in ("k1", "k3"):
        assert torch.dot(kl_to_reference(logs(*train), batch, kind), torch.tensor(train)).item() == near(exact)


@pytest.mark.parametrize(
    ("aggregation", "total", "expected"),
    [
        ("token_mean", 4, (1 + 2 + 3 + 10) / 4),
        ("sequence_mean", 2, (2 + 10) / 2),
        ("fixed_length", 2 * 8, (1 + 2 + 3 + 10) / 16),
    ],
)
def test_aggregation(aggregation: str, total: float, expected: float) -> None:
    """Sequences of 3 and 1 kept tokens, and one of 2 that is masked out."""
    params = replace(PARAMS, aggregation=aggregation)
    batch = make_batch([0.5] * 6, [1.0] * 6, lengths=[3, 1, 2], keep=[1, 1, 1, 1, 0, 0])
    assert denominator(params, loss_tokens=4, loss_episodes=2) == total
    assert aggregate(torch.tensor([1.0, 2.0, 3.0, 10.0, 77.0, math.nan]), batch, params, total).item() == expected


def test_a_step_with_nothing_to_learn_from_divides_by_one() -> None:
    for aggregation in ("token_mean", "sequence_mean", "fixed_length"):
        assert denominator(replace(PARAMS, aggregation=aggregation), 0, 0) == 1.0


def test_metrics_by_hand() -> None:
    """Ratios 1.5 (A 1: clipped), 0.5 (A 1: not clipped), 0.5 (A -1: clipped), 1, and a masked one of 20."""
    batch = make_batch([0.5, 0.5, 0.5, 0.5, 0.05], [1.0, 1.0, -1.0, 1.0, 1.0], keep=[1, 1, 1, 1, 0])
    entropy_M = torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan])
    loss, metrics = policy_loss(logs(0.75, 0.25, 0.25, 0.5, 1.0), entropy_M, batch, PARAMS, 4.0)
    values = {name: metric.value() for name, metric in metrics.items()}
    assert values == {
        "train/loss": near(loss.item()),
        "train/pg_loss": near((-1.2 - 0.5 + 0.8 - 1.0) / 4),
        "train/entropy": near(2.5),
        "train/clip_frac": 0.5,
        "train/ratio_mean": near((1.5 + 0.5 + 0.5 + 1.0) / 4),
        "train/ratio_max": near(1.5),
    }
