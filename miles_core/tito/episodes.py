"""Episodes that an agent plays in this process, any number at once (agents.py says what an agent is).

    episodes = Episodes(loop, run, sessions, params, timeout_s=60)
    episodes.start(group, sample, messages, metadata)            # ends by sessions.finish
    loop.poll()                                                  # lets every agent go on as far as it can

Agents run on the loop that the engine's thread polls (loop.py), so an agent must not block: it awaits, and hands what takes time to
`asyncio.to_thread` or to another process.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, NoReturn

from miles_core.engine.sequence import SamplingParams
from miles_core.tito.agents import OVER, Agent, EpisodeOver, play
from miles_core.tito.errors import SessionError
from miles_core.tito.loop import Loop
from miles_core.tito.session import Reply, Session
from miles_core.tito.sessions import Sessions


class AgentSession:
    """What an agent sees: `chat`, and how much is left. Sampling is the run's own, since the trainer scores under it.

    `url`: where sessions are served, "" where they are not. `base_url` and `api_key` are for clients of the OpenAI API: a turn by HTTP and
    one by `chat` are the same thing.
    """

    def __init__(self, session: Session, params: SamplingParams, url: str, api_key: str):
        self._session, self._params, self._url, self.api_key = session, params, url, api_key

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def group(self) -> int:
        """Number of the prompt."""
        return self._session.group

    @property
    def sample(self) -> int:
        """Which of the prompt's samples this is."""
        return self._session.sample

    @property
    def tokens_left(self) -> int:
        """Tokens that still fit into the context."""
        return self._session.budget_left

    @property
    def turns_left(self) -> int:
        """Answers that the model may still give."""
        return self._session.turns_left

    @property
    def base_url(self) -> str:
        """ValueError where the run does not serve its sessions."""
        if not self._url:
            raise ValueError("session.base_url needs a run that serves its sessions: give --serve-port, for example --serve-port 8000")
        return f"{self._url}/sessions/{self.id}/v1"

    @property
    def shows_tools(self) -> bool:
        """Whether the model's chat template tells it what tools there are; else an agent has to."""
        return self._session.renderer.shows_tools

    async def chat(
        self, messages: list[dict], *, tools: list[dict] | None = None, tool_choice: str = "auto",
        max_tokens: int | None = None, stop: tuple[str, ...] = (),
    ) -> Reply:  # fmt: skip
        """The model's answer to the whole conversation so far. Append `reply.message` to it as it is."""
        params = dataclasses.replace(self._params, stop_strings=self._params.stop_strings + tuple(stop))
        if max_tokens is not None:
            params = dataclasses.replace(params, max_new_tokens=min(max_tokens, params.max_new_tokens))
        try:
            return await self._session.chat(messages, tools=tools, tool_choice=tool_choice, params=params)
        except SessionError as error:
            if error.code in OVER:
                raise EpisodeOver(str(error)) from error
            raise


class Episodes:
    """`timeout_s`: how long an episode may take. `url`, `api_key`: for whoever serves the sessions to fill in."""

    def __init__(self, loop: Loop, agent: Agent, sessions: Sessions, params: SamplingParams, *, timeout_s: float):
        self.loop, self.agent, self.sessions, self.params, self.timeout_s = loop, agent, sessions, params, timeout_s
        self.url, self.api_key = "", "none"
        self.tasks: set[asyncio.Task] = set()

    def start(self, group: int, sample: int, messages: list[dict], metadata: Any) -> None:
        task = self.loop.events.create_task(self._run(group, sample, messages, metadata))
        self.tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self.tasks.discard)

    def take(self) -> NoReturn:
        """For a harness that asks for an episode over HTTP. SessionError 409."""
        raise SessionError(409, "the agent of this run plays all its episodes: start it with --agent http to hand them out", "not_for_http")

    async def _run(self, group: int, sample: int, messages: list[dict], metadata: Any) -> None:
        session = self.sessions.open(group, sample)
        seen = AgentSession(session, self.params, self.url, self.api_key)
        end = await play(self.agent, seen, messages, metadata, self.timeout_s)
        if session.finished:  # over HTTP
            return
        try:
            self.sessions.finish(session.id, *end)
        except SessionError as error:  # a reward or a verdict that is none
            self.sessions.finish(session.id, None, "infra_error", str(error))
