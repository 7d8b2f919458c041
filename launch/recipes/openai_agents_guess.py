"""A harness of a third party, trained: the guessing game (miles_core/tasks/guess.py) in the loop of the OpenAI Agents SDK.

    pip install openai-agents
    launch/recipes/openai_agents_guess.sh                                     in the run's own process
    launch/recipes/openai_agents_guess.sh --agent http                        or in another one, which is then started by:
    python -m miles_core.tito.harness --url http://127.0.0.1:8000 --agent launch/recipes/openai_agents_guess.py:play

The SDK knows nothing of the run: it is given a base URL, and its tokens are the session's.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import httpx2
import openai
from agents import Agent, AgentsException, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from agents.agent import ToolsToFinalOutputResult

from miles_core.tasks.guess import HIGHEST, MAX_GUESSES, hint

if TYPE_CHECKING:
    from miles_core.tito.episodes import AgentSession
    from miles_core.tito.harness import RemoteSession

# What ends a game as lost: an answer that cannot be gone on from, no room or no turn left; a tool that there is not.
LOST = (openai.BadRequestError, openai.ConflictError, AgentsException)


@functools.cache
def connections() -> httpx2.AsyncClient:
    """One pool for all episodes: it takes longer to make than a turn."""
    return openai.DefaultAsyncHttpxClient()


async def play(session: AgentSession | RemoteSession, prompt: list[dict], secret: int) -> dict:
    guesses = []

    @function_tool
    def guess(number: int) -> str:
        """Guess the number, from 1 to 64. Answers whether it is higher or lower."""
        guesses.append(number)
        return hint(number if 1 <= number <= HIGHEST else None, secret)

    def found(*_: object) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(is_final_output=secret in guesses)

    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, http_client=connections())
    model = OpenAIChatCompletionsModel("policy", client)
    agent = Agent(name="player", model=model, tools=[guess], tool_use_behavior=found)
    try:
        await Runner.run(agent, prompt, max_turns=MAX_GUESSES, run_config=RunConfig(tracing_disabled=True))
    except LOST:
        pass
    return {"reward": float(secret in guesses)}
