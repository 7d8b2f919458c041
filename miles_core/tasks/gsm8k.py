"""gsm8k: grade-school word problems (Cobbe et al., arXiv 2110.14168) from a JSONL file with the fields `question` and `answer`.

The final number of `answer` stands after `####`. A completion's is the first one after its last `####`, or where it has no such mark
the last one that it names. Training order: a new permutation of the file for every pass, fixed by the seed. Without --eval-data, the
problems whose question hashes so (one in twenty) are held out of the training file.
"""

from __future__ import annotations

import functools
import json
import random
from decimal import Decimal
from pathlib import Path

from miles_core.tasks.base import Task, held_out, numbers, one_user_turn

_ASK = "\nThink step by step, then write the final number after ####."


def task(seed: int, data: str, eval_data: str) -> Task:
    if not data:
        raise ValueError("--task gsm8k needs --data FILE.jsonl, one problem a line with the fields question and answer")
    train = read(data, "--data")
    if eval_data:
        held = read(eval_data, "--eval-data")
    else:
        held = [row for row in train if held_out(row[0], one_in=20)]
        train = [row for row in train if not held_out(row[0], one_in=20)]
        if not train:
            raise ValueError(f"--data {data} is too small to hold problems out of it: give --eval-data")

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return random.Random(f"gsm8k/{seed}/{epoch}").sample(range(len(train)), len(train))

    def prompt(group: int, split: str = "train") -> tuple[list[dict], str, str]:
        question, answer = held[group % len(held)] if split == "eval" else train[order(group // len(train))[group % len(train)]]
        text = question + _ASK
        return one_user_turn(text), answer, text

    return Task("gsm8k", prompt, reward, num_eval=len(held))


def reward(answer: str, text: str) -> float:
    """1.0 when the completion's final number equals `answer` (a decimal number as text)."""
    _, mark, tail = text.rpartition("####")
    final = numbers(tail)[:1] if mark else numbers(tail)[-1:]
    return float(final == [Decimal(answer)])


def read(path: str, flag: str) -> list[tuple[str, str]]:
    """[(question, final number)] of a JSONL file. Raises ValueError naming the file and the line."""
    if not Path(path).is_file():
        raise ValueError(f"{flag} {path}: no such file")
    rows = []
    with open(path, "rb") as file:  # bytes, so that a broken character is the fault of its line
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(_parse(line, f"{flag} {path}, line {number}"))
    if not rows:
        raise ValueError(f"{flag} {path} holds no problem")
    return rows


def _parse(line: bytes, where: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: an object with the fields question and answer is needed, found {type(row).__name__}")
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str):
            raise ValueError(f"{where}: the field {field!r} is missing or no text")
    _, mark, tail = row["answer"].rpartition("####")
    if not mark or not numbers(tail):
        raise ValueError(f"{where}: the answer names no number after ####")
    return row["question"], str(numbers(tail)[0])
