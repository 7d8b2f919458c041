"""sort: `539214=` -> `123459`. The embedded task: six digits, repeats allowed, exact check.

Held out: the prompts whose hash says so, about one in ten of the million. The training split depends on the run seed, the held-out one
does not, so that runs can be compared prompt by prompt.
"""

from __future__ import annotations

import random

from miles_core.tasks.base import Task, held_out, no_data, one_user_turn

NUM_DIGITS = 6


def task(seed: int, data: str, eval_data: str) -> Task:
    no_data("sort", data, eval_data)

    def prompt(group: int, split: str = "train") -> tuple[list[dict], str, str]:
        rng = random.Random(f"sort/{split}/{seed if split == 'train' else 0}/{group}")
        while True:
            text = "".join(rng.choices("0123456789", k=NUM_DIGITS)) + "="
            if held_out(text) == (split == "eval"):
                return one_user_turn(text), "".join(sorted(text[:-1])), text

    def reward(answer: str, text: str) -> float:
        return float(text == answer)

    return Task("sort", prompt, reward, num_eval=1000)
