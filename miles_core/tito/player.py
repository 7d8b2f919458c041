"""Prompts in, answers out: of one turn by the engine itself, of several by an agent. What rollout and evaluation share.

    player = Player(engine, params, agent=None)
    player.add(prompt, sample)
    for answer in player.step(): ...         # one step of the engine; the thread that calls it owns the engine
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.routing import encode
from miles_core.schema import Prompt, Trajectory
from miles_core.tito.agents import HTTP, Agent
from miles_core.tito.backend import SAMPLE_BITS
from miles_core.tito.engine_backend import EngineBackend
from miles_core.tito.episodes import Episodes
from miles_core.tito.loop import Loop
from miles_core.tito.offers import Offers
from miles_core.tito.render import Renderer
from miles_core.tito.samples import Sample, collect
from miles_core.tito.serve import Server, serve
from miles_core.tito.server import make_app
from miles_core.tito.session import Session
from miles_core.tito.sessions import Sessions

MAX_STARTS = 3  # of an episode that ends before its first turn
MAX_SESSIONS = 1 << 20  # those of a run are bounded by its groups
IDLE_S = 600.0  # a session of a harness that nobody uses for so long is given up


@dataclass(frozen=True)
class Answer:
    """`trajectories`: one, or the branches of an episode; `routes`: of each, see routing.encode. `reward` is None where the task's
    reward has to judge `text`; `verdict` is "ok" then."""

    trajectories: list[Trajectory]
    text: str
    routes: list[torch.Tensor | None]
    reward: float | None = None
    verdict: str = "ok"

    @property
    def trajectory(self) -> Trajectory:
        """The first: group, sample, reward, verdict and advantage are the same in all."""
        return self.trajectories[0]


class Player:
    """One on each rollout rank. `agent`: plays the episodes; HTTP = agents of other processes do (offers.py); None = an answer is one turn.

    `max_context`, `max_turns` and `timeout_s` bound an episode, `nobody_s` how long one waits with no harness in sight; `max_branches`: how
    many branches of one are trained, the latest if it has more.

    `strict`: an episode whose tokens are not those of a fresh rendering, beyond what the model wrote itself, stops the run (DESIGN 4.8).
    """

    def __init__(
        self, engine: Engine, params: SamplingParams, agent: Agent | str | None = None, renderer: Renderer | None = None,
        *, max_context: int = 0, max_turns: int = 1, max_branches: int = 1, timeout_s: float = 60.0, nobody_s: float = 300.0,
        strict: bool = False,
    ):  # fmt: skip
        self.engine, self.params, self.max_branches, self.strict = engine, params, max_branches, strict
        self.backend = EngineBackend(engine)
        self.prompts: dict[tuple[int, int], Prompt] = {}  # of the episodes
        self.starts: Counter[tuple[int, int]] = Counter()
        self.ended: list[Session] = []
        self.server: Server | None = None
        self.offers: Offers | None = None
        self.episodes: Episodes | Offers | None = None
        if agent is None:
            return
        self.loop = Loop()
        idle_s = IDLE_S if agent == HTTP else math.inf  # an agent beside us has an end of its own
        self.sessions = Sessions(
            renderer, self.backend, max_context=max_context, max_turns=max_turns, max_sessions=MAX_SESSIONS, idle_s=idle_s, judged=True,
            on_end=self._note,
        )  # fmt: skip
        if agent == HTTP:
            self.episodes = self.offers = Offers(self.loop, self.sessions, timeout_s=timeout_s, nobody_s=nobody_s)
        else:
            self.episodes = Episodes(self.loop, agent, self.sessions, params, timeout_s=timeout_s)

    @property
    def num_unfinished(self) -> int:
        return self.engine.num_unfinished + len(self.prompts)

    def serve(self, host: str, port: int, *, model: str, token: str | None) -> str:
        """Serve the sessions over HTTP from now on; returns the URL. ValueError (serve.py)."""
        app = make_app(self.sessions, self.params, model=model, token=token, pinned=True, take=self.episodes.take)
        self.server = self.loop.run(serve(app, host, port))
        self.episodes.url, self.episodes.api_key = self.server.url, token or "none"
        return self.server.url

    def add(self, prompt: Prompt, sample: int, attempt: int = 0) -> None:
        """Begin sample number `sample` of a prompt; another attempt at it has noise of its own."""
        assert sample < 1 << SAMPLE_BITS, sample
        noise = attempt << SAMPLE_BITS | sample
        if self.episodes is None:
            self.engine.add(Request(prompt.group, noise, prompt.tokens, self.params))
        else:
            self._start(prompt, noise)

    def _start(self, prompt: Prompt, noise: int) -> None:
        self.prompts[prompt.group, noise] = prompt
        self.starts[prompt.group, noise] += 1
        self.episodes.start(prompt.group, noise, list(prompt.messages), prompt.answer)

    def step(self) -> list[Answer]:
        """One step of the engine, if it has anything to do. Returns the answers that have ended."""
        answers = self._episodes() if self.episodes is not None else []
        self.backend.pump()
        for completion in self.engine.step():
            if not self.backend.finish(completion):
                completion.trajectory.sample &= (1 << SAMPLE_BITS) - 1
                answers.append(Answer([completion.trajectory], completion.text, [completion.routes]))
        return answers

    def close(self) -> None:
        if self.episodes is None:
            return
        if self.server is not None:
            self.loop.run(self.server.stop())
        self.loop.close()

    def _episodes(self) -> list[Answer]:
        """Let agents and clients go on. Returns the answers of the episodes that have ended."""
        self.loop.poll()
        if self.server is not None:
            self.server.check()
        if self.offers is not None:
            self.offers.check()
        ended, self.ended = self.ended, []
        return [answer for session in ended for answer in self._end(session)]

    def _note(self, session: Session) -> None:
        self.ended.append(session)
        if self.offers is not None:
            self.offers.ended(session)

    def _end(self, session: Session) -> list[Answer]:
        """The answer of an episode; none if it is played again. RuntimeError when it never gets to a turn, or by drift."""
        self.sessions.forget(session)
        key = session.group, session.noise
        prompt = self.prompts.pop(key)
        name = f"group {session.group} sample {session.sample}"
        if session.detail and session.verdict != "ok":
            print(f"{name}: {session.verdict}: {session.detail}", file=sys.stderr, flush=True)
        samples = collect(session, max_branches=self.max_branches)
        if not samples:
            if self.starts[key] >= MAX_STARTS:
                why = session.detail or f"verdict {session.verdict}"
                raise RuntimeError(f"{name}: {MAX_STARTS} episodes ended before their first turn: {why}")
            self._start(prompt, session.noise)
            return []
        del self.starts[key]
        for sample in samples if self.strict else ():
            if sample.drift.hard:
                raise RuntimeError(f"{sample.trajectory.name}: the tokens of the session drifted from their messages: {sample.drift}")
        trajectories = [sample.trajectory for sample in samples]
        return [Answer(trajectories, session.last_answer, [_routes(sample) for sample in samples], session.reward, session.verdict)]


def _routes(sample: Sample) -> torch.Tensor | None:
    """What the engine has recorded of a branch, for transport."""
    rows = sample.routes
    return None if rows is None else encode(rows.rows_RLK, np.arange(len(sample.trajectory.tokens)) < len(rows.rows_RLK))
