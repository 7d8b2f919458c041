"""What a person reads: the metrics of what was rolled out, one line a step, who is the bottleneck, and the summary at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from miles_core.metrics import Logger, Max, Mean, Metric, Sum
from miles_core.ring import Status
from miles_core.schema import DRIFTS, FINISH_REASONS, VERDICTS, Trajectory


class Clock:
    """Where the time of one step went: `lap(name)` books the seconds since the last lap under a name."""

    def __init__(self) -> None:
        self.started = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.last
        self.last = now

    @property
    def total(self) -> float:
        return self.last - self.started


def rollout_metrics(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Metric]:
    """`rollout/*` of the groups of one step, before any filter: what was sampled, not what was trained on. Holds no view of them.

    What counts samples counts episodes: siblings are one, as long as all their sampled tokens, and truncated if one of them is. Rewards
    count samples with the verdict ok only; pass@n is the share of groups with a sample whose reward is at least 1.
    """
    samples = [[t for t in group if t.sibling == 0] for group in groups]  # reward, verdict and length of an episode are in its first
    trajectories, episodes = ([t for group in x for t in group] for x in (groups, samples))
    ok = VERDICTS.index("ok")
    rewards = np.array([t.reward for t in episodes if t.verdict == ok], np.float64)
    lengths = np.array([t.episode_tokens for t in episodes])
    by_group = [[t.reward for t in group if t.verdict == ok] for group in samples]
    spread = [float(np.std(rewards)) for rewards in by_group if len(rewards) > 1]
    metrics: dict[str, Metric] = {
        "rollout/reward_mean": Mean(float(rewards.sum()), len(rewards)),
        "rollout/reward_std": Mean(sum(spread), len(spread)),
        "rollout/zero_std_frac": Mean(sum(s == 0 for s in spread), len(spread)),
        f"rollout/pass@{max(map(len, samples), default=0)}": Mean(sum(max(r, default=0.0) >= 1 for r in by_group), len(groups)),
        "rollout/tokens": Sum(float(lengths.sum())),
        "rollout/response_len_mean": Mean(float(lengths.sum()), len(lengths)),
        "rollout/response_len_max": Max(int(lengths.max(initial=0))),
        "rollout/truncated_frac": _share(trajectories, lambda t: t.finish == FINISH_REASONS.index("length")),
        "rollout/prefix_hit_rate": Mean(sum(t.cached for t in trajectories), sum(int(_prompts(t).sum()) for t in trajectories)),
        "rollout/version_span_max": Max(max((int(np.ptp(t.version[:, 0])) for t in trajectories), default=0)),
    }
    if any(t.route_bytes for t in trajectories):
        metrics["rollout/r3_bytes_per_token"] = Mean(sum(t.route_bytes for t in trajectories), sum(len(t.tokens) for t in trajectories))
    for index, verdict in enumerate(VERDICTS):
        metrics[f"rollout/verdict/{verdict}"] = Mean(sum(t.verdict == index for t in episodes), len(episodes))
    return metrics | _agent_metrics([t for t in trajectories if len(t.drift)])


def _agent_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    """What there is to say of episodes that an agent played: branches, the reuse of earlier turns, drift. Nothing without any."""
    if not trajectories:
        return {}
    later = Mean(sum(t.cached_later for t in trajectories), sum(int(_prompts(t)[1:].sum()) for t in trajectories))
    dropped = Sum(sum(t.branches_dropped for t in trajectories if t.sibling == 0))
    drift = {f"rollout/drift/{name}": _share(trajectories, lambda t, i=i: t.drift[i] > 0) for i, name in enumerate(DRIFTS)}
    return {"rollout/prefix_hit_rate_later": later, "rollout/branches_dropped": dropped, **drift}


def _prompts(t: Trajectory) -> np.ndarray:
    """Prompt tokens of every turn: all that stand before its answer; 0 where a sibling trains the turn, so that it counts once."""
    answers_U = np.cumsum(t.turns)[0::2]  # where they begin
    return np.where(t.loss_mask[answers_U] != 0, answers_U, 0)


def _share(trajectories: Sequence[Trajectory], condition: Callable[[Trajectory], bool]) -> Mean:
    """Share of the episodes of which some trajectory meets the condition."""
    return Mean(len({t.key[:2] for t in trajectories if condition(t)}), len({t.key[:2] for t in trajectories}))


def step_metrics(clock: Clock, num_tokens: int) -> dict[str, Metric]:
    """`perf/*` of a step that `num_tokens` tokens went through, on all training ranks together."""
    return {
        "perf/step_time": Max(clock.total),
        "perf/train_tokens_per_s": Max(num_tokens / clock.laps["train"]),
        "perf/weight_sync_s": Max(clock.laps["sync"]),
        "perf/trainer_wait_frac": Mean(clock.laps["wait"], clock.total),
    }


def ring_metrics(status: Status, blocked_s: float, clock: Clock, num_rollout_ranks: int) -> dict[str, Metric]:
    """`ring/*`, and the share of the step in which the rollout ranks of a node had no free slot: `blocked_s`, all ranks together."""
    counts = {f"ring/{name}": Sum(value) for name, value in status._asdict().items() if name != "blocked_s"}
    return counts | {"perf/producer_blocked_frac": Mean(blocked_s, clock.total * num_rollout_ranks)}


def verdict(trainer_wait_frac: float, producer_blocked_frac: float, colocated: bool) -> str:
    """One line that says which side the other waits for, and what to change."""
    if colocated:
        return f"colocated: generation took {trainer_wait_frac:.0%} of the step, in turn with training; split the ranks to overlap them"
    if max(trainer_wait_frac, producer_blocked_frac) < 0.1:
        return f"balanced: the trainer waited {trainer_wait_frac:.0%} of the step, rollout {producer_blocked_frac:.0%}"
    if trainer_wait_frac >= producer_blocked_frac:
        return f"rollout-bound: the trainer waited {trainer_wait_frac:.0%} of the step; add rollout ranks"
    return f"trainer-bound: rollout was blocked {producer_blocked_frac:.0%} of the step; add training ranks"


def duration(seconds: float) -> str:
    """90 -> '1:30'."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes}:{rest:02d}"


def step_line(step: int, steps: int, values: Mapping[str, float], mean_step_s: float) -> str:
    """One optimizer step for a person: progress bar, reward, loss, staleness, parity, rerouted tokens, who waits, time left."""
    filled = round(20 * step / steps)
    if "train/logp_diff_max" in values:
        parity = f"{values['train/logp_diff_max']:.1e}"
    else:
        parity = "no fresh token" if "train/logp_diff_tokens" in values else "not compared"
    rerouted = values.get("train/route_diff_frac")  # of a mixture of experts
    return (
        f"step {step:{len(str(steps))}d}/{steps} [{'=' * filled}{' ' * (20 - filled)}] "
        f"reward {values['rollout/reward_mean']:.3f}  loss {values['train/loss']:+.4f}  grad {values['train/grad_norm']:.2f}  "
        f"entropy {values['train/entropy']:.2f}  len {values['rollout/response_len_mean']:.1f}  "
        f"stale {values['train/staleness_mean']:.2f}  logp_diff {parity}  "
        f"{f'route_diff {rerouted:.2%}  ' if rerouted is not None else ''}wait {values['perf/trainer_wait_frac']:4.0%}  "
        f"{values['perf/step_time']:.2f} s  left {duration((steps - step) * mean_step_s)}"
    )


def plan(
    ranks: str, prompts: int, samples: int, max_context: int, max_branches: int, num_slots: int, slot_bytes: int, window: int, bound: int
) -> str:  # fmt: skip
    """Who does what, the size of a step, and the staleness that follows from the ring."""
    branches = f" in each of at most {max_branches} branches" if max_branches > 1 else ""
    return (
        f"{ranks}\n"
        f"step: {prompts} prompts x {samples} samples of at most {max_context} tokens{branches}\n"
        f"ring: B = {num_slots} slots of {slot_bytes / 2**20:.2f} MiB a node, window W = {window}\n"
        f"staleness: no sample is more than (B + W - 2) // P = {bound} version{'s' * (bound != 1)} old when it is trained on"
    )


def mean(values: Sequence[float]) -> float:
    """Mean of the finite values; nan without any."""
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def ending(
    logger: Logger, eval_after: Mapping[str, Metric], steps: int, version: int, first_version: int, seconds: float, colocated: bool,
    signal: str, run_dir: str,
) -> str:  # fmt: skip
    """The last thing a run prints. `seconds` and the steps since `first_version` are those of this process, the rest is of the whole run.

    `signal`: what has asked it to stop before its last step, if anything has.
    """
    rewards, num_steps = logger.history("rollout/reward_mean"), version - first_version
    window = min(10, len(rewards))
    lines = [
        "",
        f"{f'stopped by {signal} after step {version} of {steps}' if version < steps else 'done'}: "
        f"{num_steps} steps in {duration(seconds)} ({num_steps / max(seconds, 1e-9):.2f} steps/s)",
        f"  reward     {mean(rewards[:1]):.3f} -> {mean(rewards[-window:]):.3f}   (first step, mean of the last {window})",
    ]
    for name, after in eval_after.items():
        before = f"{logger.history(name)[0]:.3f} -> " if len(logger.history(name)) > 1 else ""
        lines.append(f"  {name}  {before}{after.value():.3f}   (held out)")
    wait, blocked = (mean(logger.history(f"perf/{name}_frac")) for name in ("trainer_wait", "producer_blocked"))
    if version < steps:
        lines.append(f"  go on with the same command and --run-dir {run_dir}: nothing of what was finished is lost")
    lines += [
        f"  bottleneck {verdict(wait, blocked, colocated)}",
        f"  look at    tensorboard --logdir {run_dir}/tensorboard   |   {run_dir}/metrics.jsonl   |   {run_dir}/checkpoints",
        f"  evaluate   python rollout.py --model {run_dir}/checkpoints/latest --task ... --eval",
    ]
    return "\n".join(lines)
