"""pass@1, pass@k and mean reward over held-out prompts: the same player and rewards as in rollout, other group numbers.

    metrics = evaluate(player, rewards, prompts, num_samples, name)        # this rank's share, as sums that the ranks merge
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from miles_core import guard
from miles_core.metrics import Mean, Metric
from miles_core.schema import Prompt
from miles_core.tasks.rewards import RewardPool
from miles_core.tito.player import Player

EVAL_GROUP = 1 << 62  # group numbers of evaluation start here, so that its sampling noise is nobody else's
IDLE_S = 0.0005


def evaluate(player: Player, rewards: RewardPool, prompts: Sequence[Prompt], num_samples: int, name: str) -> dict[str, Metric]:
    """`eval/<name>/*`. A sample passes when its reward is at least 1; pass@k is the share of prompts that any of k samples passes.

    Samples without the verdict ok are left out, and counted. Ends early, with nothing, when the run is asked to stop.
    """
    numbered = {EVAL_GROUP + p.group: replace(p, group=EVAL_GROUP + p.group) for p in prompts}
    for prompt in numbered.values():
        for sample in range(num_samples):
            player.add(prompt, sample)
    scores: dict[int, list[float]] = {number: [] for number in numbered}
    while (player.num_unfinished or rewards.num_pending) and not guard.asked():  # ends: every episode and every reward has a deadline
        for answer in player.step():
            number = answer.trajectory.group
            if answer.reward is not None:
                scores[number].append(answer.reward)
            elif answer.verdict == "ok":
                rewards.submit(number, numbered[number].answer, answer.text)
        for number, reward, verdict, _ in rewards.poll():
            if verdict == "ok":
                scores[number].append(reward)
        if not player.engine.num_unfinished:
            time.sleep(IDLE_S)
    if guard.asked():
        return {}
    num_all, num_ok = len(prompts) * num_samples, sum(map(len, scores.values()))
    passed = [[r >= 1 for r in rs] for rs in scores.values() if rs]
    metrics: dict[str, Metric] = {
        f"eval/{name}/pass@1": Mean(sum(map(sum, passed)), num_ok),
        f"eval/{name}/reward_mean": Mean(sum(map(sum, scores.values())), num_ok),
        f"eval/{name}/not_ok_frac": Mean(num_all - num_ok, num_all),
    }
    if num_samples > 1:
        metrics[f"eval/{name}/pass@{num_samples}"] = Mean(sum(map(any, passed)), len(passed))
    return metrics
