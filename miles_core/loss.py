"""Policy losses, one small function each: (logp_train_M, batch, params) -> Terms, one loss term for every sampled token.

    total = denominator(params, *global_counts)                           # before any backward
    loss, metrics = policy_loss(logp_train_M, entropy_M, batch, params, total)
    loss.backward()                                                       # gradients are summed over micro-batches and ranks

Everything is *sum, then divide by a global count*, so the result does not depend on how the step was cut into micro-batches and
ranks. A sample that is masked out (keep 0) contributes exactly 0 to the loss and to every gradient.

Whose log-prob: `logp_roll_M` the sampler's, `logp_train_M` the trainer's (live, with gradient), `logp_prox_M` the trainer's at the
start of the step. A batch that feeds one optimizer step need not carry `logp_prox_M`: it is then `logp_train_M`, detached.

A sequence is one trajectory; an episode has one or, where its agent forks, several of them (schema.py). Ratios and terms are of tokens and
sequences; what is averaged over "sequences" is averaged over episodes, so that one that forks often has no more weight than another.

Shapes: M sampled tokens, S sequences. All values are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from miles_core.metrics import Max, Mean, Metric, Quantile, Sum
from miles_core.schema import Batch


@dataclass(frozen=True)
class LossParams:
    """Each field is the command-line flag of the same name; `max_new_tokens` is that of a whole episode, all its turns."""

    loss: str
    anchor: str
    aggregation: str
    clip_low: float
    clip_high: float
    dual_clip: float
    importance_cap: float
    icepop_low: float
    icepop_high: float
    kl_coef: float
    kl_kind: str
    max_new_tokens: int


class Terms(NamedTuple):
    """What a policy loss returns: `term_M` with gradient; `ratio_M` and `clipped_M` (bool) for the metrics."""

    term_M: torch.Tensor
    ratio_M: torch.Tensor
    clipped_M: torch.Tensor


# ---- policy losses ------------------------------------------------------------------------------------------------------------


def ppo_clip(logp_train_M: torch.Tensor, batch: Batch, params: LossParams) -> Terms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r the ratio of a token to the anchor.

    Sources: PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO ("clip-higher"), arXiv 2503.14476, section 3.1; with dual_clip c > 1
    the loss of a token with A < 0 is at most c |A|: dual-clip PPO, arXiv 1912.09729, eq. 5.
    """
    return _clipped(_log_ratio(logp_train_M, batch, params).exp(), batch.advantage_M, params)


def gspo(logp_train_M: torch.Tensor, batch: Batch, params: LossParams) -> Terms:
    """The clipped loss with one ratio for a whole sequence: the geometric mean of its token ratios.

    Source: GSPO, arXiv 2507.18071, eqs. 5 and 7. Every token carries the term of its sequence, so `sequence_mean` gives the paper's
    objective. The paper's clip range is 3e-4 below and 4e-4 above. Importance weight and IcePop stay per token: they scale the
    token's share of the term. Siblings keep a ratio each, over their own tokens: one ratio for an episode would tie together sequences
    that may lie in different micro-batches, and on different ranks.
    """
    log_ratio_M = _log_ratio(logp_train_M, batch, params)
    sum_S = torch.zeros_like(batch.weight_S).index_add(0, batch.sequence_M, log_ratio_M)
    ratio_S = (sum_S / batch.weight_S.clamp(min=1)).exp()
    return _clipped(ratio_S[batch.sequence_M], batch.advantage_M, params)


def cispo(logp_train_M: torch.Tensor, batch: Batch, params: LossParams) -> Terms:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp: the weight is clipped, the gradient of no token is dropped.

    Source: CISPO, MiniMax-M1, arXiv 2506.13585, section 3.1, eqs. 4 and 5. The paper leaves the lower side open (clip_low >= 1).
    """
    ratio_M = _log_ratio(logp_train_M, batch, params).exp().detach()
    weight_M = ratio_M.clamp(1 - params.clip_low, 1 + params.clip_high)
    return Terms(-weight_M * batch.advantage_M * logp_train_M, ratio_M, weight_M != ratio_M)


LOSSES: dict[str, Callable[[torch.Tensor, Batch, LossParams], Terms]] = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}


def _clipped(ratio_M: torch.Tensor, advantage_M: torch.Tensor, params: LossParams) -> Terms:
    inside_M = ratio_M.clamp(1 - params.clip_low, 1 + params.clip_high)
    term_M = torch.maximum(-ratio_M * advantage_M, -inside_M * advantage_M)
    clipped_M = torch.where(advantage_M > 0, ratio_M > 1 + params.clip_high, (advantage_M < 0) & (ratio_M < 1 - params.clip_low))
    if params.dual_clip:
        bounded_M = torch.minimum(term_M, -params.dual_clip * advantage_M)
        term_M = torch.where(advantage_M < 0, bounded_M, term_M)
        clipped_M = clipped_M | ((advantage_M < 0) & (ratio_M > params.dual_clip))
    return Terms(term_M, ratio_M.detach(), clipped_M)


# ---- off-policy corrections ---------------------------------------------------------------------------------------------------


def _step_start(logp_train_M: torch.Tensor, batch: Batch) -> torch.Tensor:
    return logp_train_M.detach() if batch.logp_prox_M is None else batch.logp_prox_M


def _log_ratio(logp_train_M: torch.Tensor, batch: Batch, params: LossParams) -> torch.Tensor:
    """log(trainer / anchor) of each token; the anchor is the sampler, or the trainer at step start ("decoupled").

    Masked rows are 0 *before* any exp: a wild log-prob there must not turn 0 * inf into nan.
    """
    anchor_M = batch.logp_roll_M if params.anchor == "sampler" else _step_start(logp_train_M, batch)
    return torch.where(batch.keep_M > 0, logp_train_M - anchor_M, 0.0)


def importance_weight(logp_train_M: torch.Tensor, batch: Batch, params: LossParams) -> torch.Tensor:
    """Factor on each token's policy term, without gradient, from k = pi(trainer at step start) / pi(sampler).

    - anchor "sampler": 1, since the ratio already runs from the sampler to the trainer.
    - anchor "decoupled": min(k, importance_cap). Sources: decoupled PPO, AReaL, arXiv 2505.24298, section 5.2, eq. 5; truncation as
      in V-trace, arXiv 1802.01561.
    - IcePop: 0 where k lies outside [icepop_low, icepop_high] (a bound of 0 is off). Source: Ring-1T, arXiv 2510.18855, where the
      factor inside is k itself: that is anchor "decoupled" with importance_cap >= icepop_high. Such tokens stay in the denominator.
    """
    log_k_M = torch.where(batch.keep_M > 0, _step_start(logp_train_M, batch) - batch.logp_roll_M, 0.0)
    k_M = log_k_M.exp()
    weight_M = k_M.clamp(max=params.importance_cap) if params.anchor == "decoupled" else torch.ones_like(k_M)
    if params.icepop_low:
        weight_M = torch.where(k_M < params.icepop_low, 0.0, weight_M)
    if params.icepop_high:
        weight_M = torch.where(k_M > params.icepop_high, 0.0, weight_M)
    return weight_M


# ---- KL and aggregation -------------------------------------------------------------------------------------------------------


def kl_to_reference(logp_train_M: torch.Tensor, batch: Batch, kind: str) -> torch.Tensor:
    """Estimate of KL(trainer || reference) at each sampled token, with d = logp_train - logp_ref:

        k1 = d          unbiased, can be negative; as a loss its gradient has expectation 0, so it only adds noise
        k2 = d^2 / 2    biased, but its expected gradient is the KL's
        k3 = exp(-d) - 1 + d    unbiased and never negative

    Source: J. Schulman, "Approximating KL Divergence", 2020 (joschu.net/blog/kl-approx.html).
    """
    diff_M = torch.where(batch.keep_M > 0, logp_train_M - batch.logp_ref_M, 0.0)
    if kind == "k1":
        return diff_M
    if kind == "k2":
        return diff_M.square() / 2
    assert kind == "k3", kind
    return (-diff_M).exp() - 1 + diff_M


def denominator(params: LossParams, loss_tokens: float, loss_episodes: float) -> float:
    """What the summed terms of an optimizer step are divided by, from counts summed over all training ranks (`pack.count`).

    A step whose every sample is masked has nothing to sum; its denominator is 1, its gradient 0.
    """
    totals = {
        "token_mean": loss_tokens,
        "sequence_mean": loss_episodes,
        "fixed_length": loss_episodes * params.max_new_tokens,
    }
    return max(totals[params.aggregation], 1.0)


def aggregate(term_M: torch.Tensor, batch: Batch, params: LossParams, total: float) -> torch.Tensor:
    """This micro-batch's share of the step's loss: kept terms, summed, over the global `denominator`.

        token_mean      every token weighs the same: DAPO, arXiv 2503.14476, section 3.3
        sequence_mean   every episode weighs the same, the tokens of all its sequences share: GRPO, arXiv 2402.03300, eq. 3
        fixed_length    sum over max_new_tokens, then mean over episodes: no length bias: Dr. GRPO, arXiv 2503.20783, section 3.2
    """
    term_M = torch.where(batch.keep_M > 0, term_M, 0.0)
    if params.aggregation == "sequence_mean":
        term_M = term_M / batch.episode_S.clamp(min=1)[batch.sequence_M]
    return term_M.sum() / total


def policy_loss(
    logp_train_M: torch.Tensor, entropy_M: torch.Tensor, batch: Batch, params: LossParams, total: float
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Scalar to call backward on (this micro-batch's share of the step's loss), and the metrics of this micro-batch."""
    terms = LOSSES[params.loss](logp_train_M, batch, params)
    weight_M = importance_weight(logp_train_M, batch, params)
    pg_loss = aggregate(weight_M * terms.term_M, batch, params, total)
    loss, keep_M, num_kept = pg_loss, batch.keep_M, batch.keep_M.sum()

    def mean(value_M: torch.Tensor) -> Mean:
        return Mean((value_M.detach() * keep_M).sum(), num_kept)

    metrics: dict[str, Metric] = {
        "train/pg_loss": Sum(pg_loss.detach()),
        "train/entropy": mean(torch.where(keep_M > 0, entropy_M, 0.0)),
        "train/clip_frac": mean(terms.clipped_M),
        "train/ratio_mean": mean(terms.ratio_M),
    }
    if num_kept:
        metrics["train/ratio_max"] = Max(terms.ratio_M[keep_M > 0].max())
    if params.icepop_low or params.icepop_high:
        metrics["train/icepop_frac"] = mean(weight_M == 0)
    if params.kl_coef:
        kl_M = kl_to_reference(logp_train_M, batch, params.kl_kind)
        loss = loss + params.kl_coef * aggregate(kl_M, batch, params, total)
        metrics["train/kl"] = mean(kl_M)
    return loss, {"train/loss": Sum(loss.detach()), **metrics}


# ---- what is only measured ----------------------------------------------------------------------------------------------------


def _sequence_staleness(batch: Batch, version: int) -> torch.Tensor:
    """`version` minus that of the oldest sampled token, int64 [S]."""
    newest = int(batch.version_M.max())
    assert newest <= version, f"a token was sampled at version {newest}, but version {version} is being trained"
    oldest_S = torch.full_like(batch.weight_S, version, dtype=torch.int64)
    return version - oldest_S.scatter_reduce(0, batch.sequence_M, batch.version_M, "amin")


def staleness(batch: Batch, version: int) -> dict[str, Metric]:
    """Versions between the weights being trained and the oldest sampled token of each kept sequence."""
    stale_K = _sequence_staleness(batch, version)[batch.weight_S > 0]
    if not len(stale_K):
        return {}
    return {"train/staleness_mean": Mean(stale_K.sum(), len(stale_K)), "train/staleness_max": Max(stale_K.max())}


def fresh(batch: Batch, version: int, on_update: str) -> torch.Tensor:
    """bool [M]: the kept tokens that were sampled from exactly the weights of `version`, cached keys and values included."""
    return (batch.keep_M > 0) & (_comparable_staleness(batch, version, on_update) == 0)


def _comparable_staleness(batch: Batch, version: int, on_update: str) -> torch.Tensor:
    """Steps between the weights that gave each token and `version` [M]; with "keep" those of the oldest token of its sequence."""
    return _sequence_staleness(batch, version)[batch.sequence_M] if on_update == "keep" else version - batch.version_M


def parity_diff(logp_train_M: torch.Tensor, batch: Batch, version: int, on_update: str) -> dict[str, Metric]:
    """|trainer - sampler| of the log-probs, token by token. `logp_train_M` must come from the weights of `version`.

    train/logp_diff_{max,p99,mean,frac} cover the tokens that were sampled from exactly these weights: both sides are then the same
    function of the same input, and all four must be 0.0. train/logp_diff_tokens says how many were compared; with none the four are
    absent. Older tokens differ because the policy moved: train/logp_diff_mean_stale<k>.

    With `on_update` "keep" the KV cache of a sequence that saw new weights is a mixture, so only tokens of sequences sampled
    entirely at `version` are compared; with "recompute" the cache always is what the current weights give.
    """
    diff_M = (logp_train_M.detach() - batch.logp_roll_M).abs()
    stale_M, kept_M = _comparable_staleness(batch, version, on_update), batch.keep_M > 0
    live_K = diff_M[fresh(batch, version, on_update)]
    metrics: dict[str, Metric] = {"train/logp_diff_tokens": Sum(len(live_K))}
    if len(live_K):
        metrics["train/logp_diff_max"] = Max(live_K.max())
        metrics["train/logp_diff_p99"] = Quantile.of(live_K, 0.99)
        metrics["train/logp_diff_mean"] = Mean(live_K.sum(), len(live_K))
        metrics["train/logp_diff_frac"] = Mean((live_K > 0).sum(), len(live_K))
    for k in stale_M[kept_M].unique().tolist():
        if k > 0:
            old_K = diff_M[kept_M & (stale_M == k)]
            metrics[f"train/logp_diff_mean_stale{k}"] = Mean(old_K.sum(), len(old_K))
    return metrics
