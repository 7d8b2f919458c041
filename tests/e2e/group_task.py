"""The task sort, with rewards that say which group they belong to: 2 ** group for every sample, plus 1/8 for a right answer.

Up to 20 groups are exact in float32. With P groups a step and P < 8, P times the mean reward of a step is a sum of distinct powers of
two plus less than 1: its bits are the group numbers that the step was trained on. An uneven sample still has its advantage.

E2E_REWARD_S: seconds that each training reward takes.
"""

from __future__ import annotations

import os
import time

from miles_core.tasks import Task, sort


def task(seed: int, data: str) -> Task:
    plain = sort.task(seed, data, "")

    def prompt(group: int, split: str = "train") -> tuple[list[dict], list, str]:
        messages, answer, text = plain.prompt(group, split)
        return messages, [group if split == "train" else -1, answer], text

    def reward(answer: list, text: str) -> float:
        group, right = answer[0], plain.reward(answer[1], text)
        if group < 0:
            return right
        time.sleep(float(os.environ.get("E2E_REWARD_S", 0)))
        return 2.0**group + right / 8

    return Task("groups", prompt, reward, plain.num_eval)
