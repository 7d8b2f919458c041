"""guess: find a number between 1 and 64 in six turns, told "higher" or "lower" after each. The embedded task with several turns.

    python train.py --task guess --model DIR          (launch/recipes/guess.sh makes a policy that knows the game, and trains it)

A guess is a call of the tool `guess`, and the hint is its result. Halving the interval finds all but 64. The reward is 1 for the number
within six guesses, else 0. Prompts are all alike: what differs is the number, which the model never sees; odd ones are trained on, even
ones held out.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from miles_core.tasks.base import Task, no_data, one_user_turn

if TYPE_CHECKING:
    from miles_core.tito.episodes import AgentSession

HIGHEST, MAX_GUESSES = 64, 6
QUESTION = f"1-{HIGHEST}?"
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": f"Guess the number, from 1 to {HIGHEST}. Answers whether it is higher or lower.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
# How the policy spells a call, and the words that are one token each to it: an answer is four or five tokens.
SPELT = ('<tool_call>\n{"name": "guess", "arguments": {"number": ', "}}\n</tool_call>")
WORDS = (*SPELT, "higher", "lower")


def task(seed: int, data: str, eval_data: str) -> Task:
    no_data("guess", data, eval_data)

    def prompt(group: int, split: str = "train") -> tuple[list[dict], int, str]:
        odd = random.Random(f"guess/{split}/{seed if split == 'train' else 0}/{group}").randrange(HIGHEST // 2) * 2 + 1
        return one_user_turn(QUESTION), odd if split == "train" else odd + 1, QUESTION

    def reward(answer: int, text: str) -> float:
        """Of an agent that lets the last answer be judged: it must say the number."""
        return float(text.strip() == str(answer))

    return Task("guess", prompt, reward, num_eval=200, agent="miles_core.tasks.guess:play")


def guessed(call: dict[str, Any]) -> int | None:
    """The number that a call guesses, if it is one of the game's."""
    try:
        number = json.loads(call["function"]["arguments"])["number"]
    except (ValueError, KeyError, TypeError):
        return None
    is_guess = call["function"]["name"] == "guess" and type(number) is int and 1 <= number <= HIGHEST
    return number if is_guess else None


def hint(guess: int | None, secret: int) -> str:
    return "no number" if guess is None else "higher" if guess < secret else "lower"


async def play(session: AgentSession, prompt: list[dict], secret: int) -> dict:
    """The agent: it is the game that answers. Of several calls in one answer the first is played."""
    messages = list(prompt)
    for _ in range(MAX_GUESSES):
        reply = await session.chat(messages, tools=[TOOL])
        calls = reply.message.get("tool_calls") or []
        guess = guessed(calls[0]) if calls else None
        if guess == secret:
            return {"reward": 1.0}
        if reply.finish == "length":  # nobody can go on from an answer that was cut
            break
        hints = [{"role": "tool", "tool_call_id": c["id"], "content": hint(guess, secret)} for c in calls]
        messages += [reply.message, *(hints or [{"role": "user", "content": hint(None, secret)}])]
    return {"reward": 0.0}
