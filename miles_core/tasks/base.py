"""What a task is, and the few things that tasks share. Pure CPU code: nothing here imports torch, so a reward process starts fast."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

SPLITS = ("train", "eval")
# A minus sign right after a digit is an operator ("10-3"), and a comma belongs to a number only before three digits ("1,2,3" are three).
_NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)


@dataclass(frozen=True)
class Task:
    """Prompts and the reward for answers to them.

    prompt(group, split="train") -> (messages, answer, text): chat messages `[{"role": ..., "content": ...}]`, whatever the reward needs
    (JSON-able: it travels to another process), and the last user message. The same seed and group give the same prompt, for ever. The
    splits "train" and "eval" share no prompt.
    reward(answer, completion) -> a number. Runs in a process of its own; what it raises is an `infra_error`, not a zero.
    num_eval: how many held-out prompts there are; "eval" groups count from 0 below it.
    agent: "module:function" of the agent that plays an episode of several turns (miles_core/tito/episodes.py); "": one answer.
    """

    name: str
    prompt: Callable[..., tuple[list[dict], Any, str]]
    reward: Callable[[Any, str], float]
    num_eval: int = 0
    agent: str = ""


def one_user_turn(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def held_out(text: str, one_in: int = 10) -> bool:
    """True for about one prompt in `one_in`, decided by the prompt's own text: no seed can move a prompt from one split to the other."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % one_in == 0


def no_data(name: str, data: str, eval_data: str) -> None:
    """Refuse data files for a task that makes its own prompts."""
    if data or eval_data:
        raise ValueError(f"--task {name} makes its own problems: leave out {'--data' if data else '--eval-data'}")


def unknown(name: str, known: list[str]) -> str:
    """What to say about a task that does not exist."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown --task {name}" + (f"; did you mean {near[0]}?" if near else "") + f" (known: {', '.join(known)})"


def numbers(text: str) -> list[Decimal]:
    """The numbers written in `text`, in order: `1,234.50`, `-3`."""
    return [Decimal(found.replace(",", "")) for found in _NUMBER.findall(text)]
