"""Whole games in the loop of the OpenAI Agents SDK (launch/recipes/openai_agents_guess.py), with answers given in place of the model's.

    python -m pytest tests/core/test_agents_sdk.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tito_kit import running

from miles_core.tito.agents import load_agent
from miles_core.tito.backend import TurnRequest
from miles_core.tito.loop import Loop

RECIPE = Path(__file__).resolve().parents[2] / "launch/recipes/openai_agents_guess.py"
QUESTION = [{"role": "user", "content": "1-64?"}]


def call(number: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'guess', 'arguments': {'number': number}})}\n</tool_call>"


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    """One for all games, as in a run: the recipe keeps its connections."""
    loop = Loop()
    yield loop
    loop.close()


@pytest.mark.parametrize(
    ("answers", "reward", "turns"),
    [
        ([call(32), call(48), call(40)], 1.0, 3),
        ([call(n) for n in (32, 48, 41, 39, 65, "many", 40)], 0.0, 6),  # nobody is asked a seventh time
        ([call(32), "I give up."], 0.0, 2),
        ([call(32).replace("guess", "look")], 0.0, 1),
    ],
)
def test_a_game(loop: Loop, answers: list[str], reward: float, turns: int) -> None:
    """Every turn goes on from the one before: the SDK sends back what it was sent, and the session finds it again."""
    play = load_agent(f"{RECIPE}:play")
    with running() as endpoint:
        left = list(answers)
        endpoint.backend.script = lambda request: left.pop(0)
        made = endpoint.open()
        session = SimpleNamespace(base_url=made["base_url"], api_key="none")
        assert loop.run(play(session, QUESTION, 40)) == {"reward": reward}
        nodes = endpoint.tree(made)["nodes"]
        assert [node["parent"] for node in nodes] == list(range(turns))
        requests: list[TurnRequest] = endpoint.backend.requests
        for one, two in zip(requests, requests[1:], strict=False):
            assert two.tokens[: len(one.tokens)].tolist() == one.tokens.tolist()
        hints = [m["content"] for node in nodes for m in node["messages"] if m["role"] == "tool"]
        assert hints[:1] == ["higher"][: len(hints)]
