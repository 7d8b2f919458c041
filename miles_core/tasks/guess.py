"""guess: find a number between 1 and 64 in six turns, told "higher" or "lower" after each. The embedded task with several turns.

    python train.py --task guess --model DIR          (launch/recipes/guess.sh makes a policy that knows the game, and trains it)

Halving the interval always succeeds. The reward is 1 for the number within six guesses, else 0. Prompts are all alike: what differs is the
number, which the model never sees; odd ones are trained on, even ones held out.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from miles_core.tasks.base import Task, no_data, one_user_turn

if TYPE_CHECKING:
    from miles_core.tito.episodes import AgentSession

HIGHEST, MAX_GUESSES = 64, 6
QUESTION = f"1-{HIGHEST}?"


def task(seed: int, data: str, eval_data: str) -> Task:
    no_data("guess", data, eval_data)

    def prompt(group: int, split: str = "train") -> tuple[list[dict], int, str]:
        odd = random.Random(f"guess/{split}/{seed if split == 'train' else 0}/{group}").randrange(HIGHEST // 2) * 2 + 1
        return one_user_turn(QUESTION), odd if split == "train" else odd + 1, QUESTION

    def reward(answer: int, text: str) -> float:
        return float(guessed(text) == answer)

    return Task("guess", prompt, reward, num_eval=200, agent="miles_core.tasks.guess:play")


def guessed(text: str) -> int | None:
    """The number that an answer is, if it is one of the game's."""
    number = int(text) if re.fullmatch(r"[0-9]{1,2}", text) else 0
    return number if 1 <= number <= HIGHEST else None


def hint(guess: int | None, secret: int) -> str:
    return "no number" if guess is None else "higher" if guess < secret else "lower"


async def play(session: AgentSession, prompt: list[dict], secret: int) -> dict:
    """The agent: it is the game that answers."""
    messages = list(prompt)
    for _ in range(MAX_GUESSES):
        reply = await session.chat(messages)
        guess = guessed(reply.message["content"] or "")
        if guess == secret:
            return {"reward": 1.0}
        if reply.finish == "length":  # nobody can go on from an answer that was cut
            break
        messages += [reply.message, {"role": "tool", "content": hint(guess, secret)}]
    return {"reward": 0.0}
