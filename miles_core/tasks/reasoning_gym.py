"""reasoning-gym:NAME: the procedural tasks of the PyPI package reasoning-gym (arXiv 2505.24760), scored by its own scorers.

The package is an optional extra, imported only when such a task is asked for. Its item i under seed s is drawn from `Random(s + i)`, so
neighbouring seeds share items. Here every block of _BLOCK items has a seed that is a multiple of _BLOCK, even multiples for training
and odd ones for evaluation: the splits never draw from the same generator (two draws can still be the same question in a small task).
"""

from __future__ import annotations

import functools
import random
import re
from typing import Any

from miles_core.tasks.base import Task, no_data, one_user_turn, unknown

_ASK = "\nGive the final answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BLOCK = 10_000  # several datasets draw a list as long as their size when made, one refuses more than 20,000
_BLOCKS = 100_000  # of each split: the largest seed stays below 2**31


def task(name: str, seed: int, data: str, eval_data: str) -> Task:
    no_data(f"reasoning-gym:{name}", data, eval_data)
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(f"--task reasoning-gym:{name} needs the package reasoning-gym ({error}): pip install reasoning-gym") from error
    known = sorted(DATASETS.keys() - {"composite"})  # composite mixes others and has no default
    if name not in known:
        raise ValueError(unknown(f"reasoning-gym:{name}", [f"reasoning-gym:{other}" for other in known]))

    @functools.lru_cache(maxsize=4)
    def block(split: str, number: int) -> Any:
        first = 0 if split == "eval" else random.Random(f"reasoning-gym/{seed}").randrange(_BLOCKS)
        multiple = 2 * ((first + number) % _BLOCKS) + (split == "eval")
        return create_dataset(name, seed=multiple * _BLOCK, size=_BLOCK)

    def prompt(group: int, split: str = "train") -> tuple[list[dict], list, str]:
        text = block(split, group // _BLOCK)[group % _BLOCK]["question"] + _ASK
        return one_user_turn(text), [split, group], text

    def reward(answer: list, text: str) -> float:
        """`answer` names the item; it is drawn again here, because a scorer may read metadata that JSON cannot carry."""
        split, group = answer
        dataset = block(split, group // _BLOCK)
        item, found = dataset[group % _BLOCK], _ANSWER.findall(text)
        try:
            return dataset.score_answer((found[-1] if found else text).strip(), item)
        except Exception:
            # Some scorers raise on an answer they cannot parse. If they can score the right one, this one was wrong; else they are broken.
            dataset.score_answer(item["answer"], item)
            return 0.0

    return Task(f"reasoning-gym:{name}", prompt, reward, num_eval=1000)
