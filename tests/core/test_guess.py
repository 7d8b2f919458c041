"""The guessing game as its agent plays it, with answers given in place of the model's.

    python -m pytest tests/core/test_guess.py
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from miles_core.tasks import guess


def call(number: object, name: str = "guess") -> dict:
    arguments = number if isinstance(number, str) else json.dumps({"number": number})
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


class Script:
    """Makes these calls, one list of them a turn."""

    def __init__(self, *turns: list[dict], finish: str = "tool_calls"):
        self.turns, self.finish, self.heard = list(turns), finish, []

    async def chat(self, messages: list[dict], *, tools: list[dict]) -> SimpleNamespace:
        assert tools == [guess.TOOL]
        self.heard = [message["content"] for message in messages if message["role"] != "assistant"]
        message = {"role": "assistant", "content": "", "tool_calls": self.turns.pop(0)}
        return SimpleNamespace(message=message, finish=self.finish)


def played(script: Script, secret: int) -> float:
    return asyncio.run(guess.play(script, [{"role": "user", "content": guess.QUESTION}], secret))["reward"]


@pytest.mark.parametrize("secret", range(1, 65))
def test_halving_finds_every_number_but_one_in_six(secret: int) -> None:
    low, high, numbers = 1, 64, []
    while len(numbers) < 6 and secret not in numbers:
        numbers.append((low + high) // 2)
        low, high = (numbers[-1] + 1, high) if numbers[-1] < secret else (low, numbers[-1] - 1)
    script = Script(*([call(number)] for number in numbers))
    assert played(script, secret) == float(secret != 64)
    assert script.heard[1:] == [guess.hint(number, secret) for number in numbers[: len(script.heard) - 1]] and not script.turns


def test_what_is_no_guess_is_told_and_costs_a_turn() -> None:
    bad = [call("{"), call(0), call(65), call(True), call("[7]"), call(7, name="other")]
    script = Script(*([each] for each in bad))
    assert played(script, 7) == 0.0 and script.heard[1:] == ["no number"] * 5
    script = Script([], [call(7)])
    assert played(script, 7) == 1.0 and script.heard[1:] == ["no number"]
    script = Script([call(3), call(7)], [call(7), call(3)])  # the first of several counts
    assert played(script, 7) == 1.0 and script.heard[1:] == ["higher", "higher"]
    assert played(Script([call(3)], finish="length"), 7) == 0.0
