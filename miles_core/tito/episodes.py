"""Agents: an episode is a function that talks to a session until it is done.

    async def run(session, prompt, metadata):                    # prompt: chat messages; metadata: what the task's reward needs
        reply = await session.chat(prompt)
        ...
        return {"reward": 1.0}                                   # or None: the task's reward judges the last answer. A "verdict" of
                                                                 # its own (DESIGN 4.9) and a "detail" for people may stand beside it

    episodes = Episodes(run, make_session, params, max_turns=8, timeout_s=60)
    episodes.start(group, sample, messages, metadata)
    for outcome in episodes.poll(): ...                          # lets every agent go on as far as it can; never waits

Agents run on an event loop in the thread that steps the engine, a little between two steps: in a thread of their own they would fight with
the engine for the interpreter at each of its ops, which made a step of a small model twenty times slower. So an agent must not block: it
awaits, and hands what takes time to `asyncio.to_thread` or to another process. Every episode ends with a verdict:
`ok`; `timeout` when it takes longer than it may; `infra_error` when the agent raises. An agent that asks for more turns than there are,
whose conversation outgrows the context, or that goes on from an answer cut by length, has ended: the task's reward judges its last answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import math
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.engine.sequence import SamplingParams
from miles_core.schema import VERDICTS
from miles_core.tito.errors import SessionError
from miles_core.tito.session import Reply, Session

OVER = ("context_length_exceeded", "turn_cut_by_length")  # refusals that are the end of an episode, and nobody's fault
ROUNDS = 8  # of the event loop at a time: from the end of a turn to the request for the next one, with some to spare
Agent = Callable[["AgentSession", list[dict], Any], Awaitable[dict | None]]
MakeSession = Callable[[int, int], Session]  # (group, sample) -> a new session


@dataclass(frozen=True)
class Outcome:
    """How an episode ended. `reward` is None where the task's reward has to judge `text`, the last answer."""

    group: int
    sample: int
    session: Session
    verdict: str
    reward: float | None
    text: str
    detail: str = ""


class EpisodeOver(Exception):
    """The agent asked for a turn that the episode does not have."""


class AgentSession:
    """What an agent sees: `chat`, and how much is left. Sampling is the run's own, since the trainer scores under it."""

    def __init__(self, session: Session, params: SamplingParams, max_turns: int):
        self._session, self._params, self.turns_left = session, params, max_turns

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def tokens_left(self) -> int:
        """Tokens that still fit into the context."""
        return self._session.budget_left

    @property
    def shows_tools(self) -> bool:
        """Whether the model's chat template tells it what tools there are; else an agent has to."""
        return self._session.renderer.shows_tools

    async def chat(
        self, messages: list[dict], *, tools: list[dict] | None = None, tool_choice: str = "auto",
        max_tokens: int | None = None, stop: tuple[str, ...] = (),
    ) -> Reply:  # fmt: skip
        """The model's answer to the whole conversation so far. Append `reply.message` to it as it is."""
        if self.turns_left < 1:
            raise EpisodeOver("no turn is left")
        params = dataclasses.replace(self._params, stop_strings=self._params.stop_strings + tuple(stop))
        if max_tokens is not None:
            params = dataclasses.replace(params, max_new_tokens=min(max_tokens, params.max_new_tokens))
        try:
            reply = await self._session.chat(messages, tools=tools, tool_choice=tool_choice, params=params)
        except SessionError as error:
            if error.code in OVER:
                raise EpisodeOver(str(error)) from error
            raise
        self.turns_left -= 1
        return reply


class Episodes:
    """Any number of episodes at once. `close` cancels what is left of them."""

    def __init__(self, agent: Agent, make_session: MakeSession, params: SamplingParams, *, max_turns: int, timeout_s: float):
        self.agent, self.make_session, self.params, self.max_turns, self.timeout_s = agent, make_session, params, max_turns, timeout_s
        self.loop = asyncio.new_event_loop()
        self.tasks: set[asyncio.Task] = set()
        self.outcomes: list[Outcome] = []

    def start(self, group: int, sample: int, messages: list[dict], metadata: Any) -> None:
        task = self.loop.create_task(self._run(group, sample, messages, metadata))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def poll(self) -> list[Outcome]:
        """Run what is ready on the loop. Returns the episodes that have ended since the last look."""
        for _ in range(ROUNDS if self.tasks else 0):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        ended, self.outcomes = self.outcomes, []
        return ended

    def close(self) -> None:
        tasks = tuple(self.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.close()

    async def _run(self, group: int, sample: int, messages: list[dict], metadata: Any) -> None:
        session = self.make_session(group, sample)
        reward, verdict, detail = None, "ok", ""
        try:
            async with asyncio.timeout(self.timeout_s):
                returned = await self.agent(AgentSession(session, self.params, self.max_turns), messages, metadata)
            reward, verdict, detail = _judged(returned)
        except EpisodeOver as over:
            detail = str(over)
        except TimeoutError:
            verdict, detail = "timeout", f"the episode took longer than {self.timeout_s:g} s"
        except Exception:  # of the agent: any exception at all is its verdict, and the run goes on
            verdict, detail = "infra_error", traceback.format_exc()
        session.cancel()
        last = session.tree.nodes[-1]
        text = (last.messages[-1]["content"] or "") if last.messages else ""
        self.outcomes.append(Outcome(group, sample, session, verdict, reward, text, detail))


def _judged(returned: dict | None) -> tuple[float | None, str, str]:
    """(reward, verdict, detail) of what an agent returned. ValueError for a reward that is no finite number, and an unknown verdict."""
    returned = returned or {}
    verdict, reward = returned.get("verdict", "ok"), returned.get("reward")
    if verdict not in VERDICTS:
        raise ValueError(f"the agent returned the verdict {verdict!r}; known are {', '.join(VERDICTS)}")
    if reward is not None and not math.isfinite(reward := float(reward)):
        raise ValueError(f"the agent returned the reward {reward}")
    return reward, verdict, str(returned.get("detail", ""))


def load_agent(name: str) -> Agent:
    """`module:function` or `path/to/file.py:function`. ValueError if there is none."""
    module_name, _, function = name.rpartition(":")
    if not module_name or not function:
        raise ValueError(f"--agent {name}: give module:function, or path/to/file.py:function")
    try:
        if module_name.endswith(".py"):
            path = Path(module_name).resolve()
            sys.path.insert(0, str(path.parent))
            module = importlib.import_module(path.stem)
        else:
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"--agent {name} cannot be imported: {error}") from error
    agent = getattr(module, function, None)
    if not asyncio.iscoroutinefunction(agent):
        raise ValueError(f"--agent {name}: {function} is no `async def {function}(session, prompt, metadata)`")
    return agent
