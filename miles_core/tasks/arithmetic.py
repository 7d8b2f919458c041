"""arithmetic: sums of two one-digit numbers, for small instruction models. Exact number, the last one that the answer names.

SmolLM2-135M-Instruct solves about one in six of them at temperature 1: enough right answers for a group to carry a signal.
There are 100 such sums; those whose text hashes so are held out, each in turn.
"""

from __future__ import annotations

import random

from miles_core.tasks.base import Task, held_out, no_data, numbers, one_user_turn

_SUMS = [(f"What is {a} + {b}? Answer with the number only.", a + b) for a in range(10) for b in range(10)]
_TRAIN = [row for row in _SUMS if not held_out(row[0], one_in=5)]
_EVAL = [row for row in _SUMS if held_out(row[0], one_in=5)]


def task(seed: int, data: str, eval_data: str) -> Task:
    no_data("arithmetic", data, eval_data)

    def prompt(group: int, split: str = "train") -> tuple[list[dict], int, str]:
        text, answer = _EVAL[group % len(_EVAL)] if split == "eval" else random.Random(f"arithmetic/{seed}/{group}").choice(_TRAIN)
        return one_user_turn(text), answer, text

    def reward(answer: int, text: str) -> float:
        return float(numbers(text)[-1:] == [answer])

    return Task("arithmetic", prompt, reward, num_eval=len(_EVAL))
