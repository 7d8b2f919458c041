"""Rewards of one group -> advantages.

    ADVANTAGES[name](rewards, ok) -> advantages

`rewards` is a float array [n], one per sample of the group, however many trajectories it has: they all get its advantage. `ok` is a
bool array [n], true where the verdict is "ok". Only those samples enter the statistics. The others get advantage 0, and `pack` keeps
their tokens out of the loss and out of every denominator, so what they get does not matter; 0 makes a mistake visible. A task whose
own time-out counts as a failure gives that sample a reward and the verdict "ok".

The three group baselines need two rewards to compare: with fewer, the whole group gets 0. `reinforce_pp` compares with the
whole optimizer step instead, which no rollout rank sees: it stores the reward, and the training ranks finish the job by

    sums = topology.train_sum(*whitening_sums(trajectories))      # one all-reduce
    trajectories = whiten(trajectories, sums)                     # before `pack`

for the names in WHITENED. Arithmetic is float64, so that equal rewards give exactly 0; results are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from miles_core.schema import VERDICTS, Trajectory

_OK = VERDICTS.index("ok")
_STD_EPS = 1e-6  # as TRL and verl; the smallest reward differences a task makes are far larger
_VARIANCE_FLOOR = 1e-8  # as OpenRLHF's normalisation of REINFORCE++


def grpo(rewards: np.ndarray, ok: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-6), std with n - 1 in the denominator.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2. The paper leaves the kind of std open; n - 1 is what TRL and verl use.
    """
    return _over_ok(rewards, ok, lambda r: (r - r.mean()) / (r.std(ddof=1) + _STD_EPS))


def grpo_no_std(rewards: np.ndarray, ok: np.ndarray) -> np.ndarray:
    """r - mean: dividing by the std gives too easy and too hard prompts the largest weight.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.1 (their other change, a constant length, is `--aggregation fixed_length`).
    """
    return _over_ok(rewards, ok, lambda r: r - r.mean())


def rloo(rewards: np.ndarray, ok: np.ndarray) -> np.ndarray:
    """r_i minus the mean reward of the other samples: an unbiased baseline. Source: Ahmadian et al., arXiv 2402.14740, section 3.1."""
    return _over_ok(rewards, ok, lambda r: r - (r.sum() - r) / (len(r) - 1))


def reinforce_pp(rewards: np.ndarray, ok: np.ndarray) -> np.ndarray:
    """The reward itself, to be normalised by `whiten` over the optimizer step (so one sample per prompt is enough).

    Source: REINFORCE++, arXiv 2501.03262, "global advantage normalization".
    """
    return _over_ok(rewards, ok, lambda r: r, at_least=1)


ADVANTAGES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "grpo": grpo,
    "grpo_no_std": grpo_no_std,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
}
WHITENED = frozenset({"reinforce_pp"})


def whitening_sums(trajectories: Sequence[Trajectory]) -> tuple[float, float, float]:
    """(kept tokens, sum of their advantages, sum of squares) of this rank's share of an optimizer step. Add them up over ranks.

    Every sampled token carries the advantage of its trajectory, so long answers weigh more: as in OpenRLHF, the authors' code.
    """
    tokens = np.array([t.num_trained for t in trajectories if t.verdict == _OK], np.float64)
    advantages = np.array([t.advantage for t in trajectories if t.verdict == _OK], np.float64)
    return float(tokens.sum()), float((tokens * advantages).sum()), float((tokens * advantages**2).sum())


def whiten(trajectories: Sequence[Trajectory], sums: Sequence[float]) -> list[Trajectory]:
    """New records with (advantage - mean) / sqrt(max(variance, 1e-8)), mean and variance from the global `whitening_sums`."""
    count, total, squares = sums
    if count == 0:  # every sample of the step is masked
        return list(trajectories)
    mean = total / count
    scale = 1.0 / math.sqrt(max(squares / count - mean**2, _VARIANCE_FLOOR))
    return [replace(t, advantage=(t.advantage - mean) * scale) if t.verdict == _OK else t for t in trajectories]


def _over_ok(rewards: np.ndarray, ok: np.ndarray, formula: Callable[[np.ndarray], np.ndarray], at_least: int = 2) -> np.ndarray:
    """`formula` over the rewards whose verdict is ok, if there are `at_least` so many; 0 elsewhere. float32 [n]."""
    assert len(rewards) == len(ok), (len(rewards), len(ok))
    ok = np.asarray(ok, bool)
    kept = np.asarray(rewards, np.float64)[ok]
    assert np.isfinite(kept).all(), f"a reward with verdict ok is not finite: {kept}"
    advantages = np.zeros(len(ok), np.float32)
    if len(kept) >= at_least:
        advantages[ok] = formula(kept)
    return advantages
