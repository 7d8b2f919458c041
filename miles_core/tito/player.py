"""Prompts in, answers out: of one turn by the engine itself, of several by an agent. What rollout and evaluation share.

    player = Player(engine, params, agent=None)
    player.add(prompt, sample)
    for answer in player.step(): ...         # one step of the engine; the thread that calls it owns the engine
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.routing import encode
from miles_core.schema import Prompt, Trajectory
from miles_core.tito.engine_backend import EngineBackend
from miles_core.tito.episodes import Agent, Episodes, Outcome
from miles_core.tito.render import Renderer
from miles_core.tito.samples import Sample, collect
from miles_core.tito.session import Session

MAX_STARTS = 3  # of an episode whose agent fails before its first turn


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
    """One on each rollout rank. `max_context`, `max_turns` and `timeout_s` bound the episodes of an agent; `max_branches`: how many
    branches of one are trained, the latest if it has more.

    `strict`: an episode whose tokens are not those of a fresh rendering, beyond what the model wrote itself, stops the run (DESIGN 4.8).
    """

    def __init__(
        self, engine: Engine, params: SamplingParams, agent: Agent | None = None, renderer: Renderer | None = None,
        *, max_context: int = 0, max_turns: int = 1, max_branches: int = 1, timeout_s: float = 60.0, strict: bool = False,
    ):  # fmt: skip
        self.max_branches, self.strict = max_branches, strict
        self.engine, self.params, self.renderer, self.max_context = engine, params, renderer, max_context
        self.backend = EngineBackend(engine)
        self.episodes = Episodes(agent, self._session, params, max_turns=max_turns, timeout_s=timeout_s) if agent is not None else None
        self.prompts: dict[tuple[int, int], Prompt] = {}  # of the episodes
        self.starts: Counter[tuple[int, int]] = Counter()

    @property
    def num_unfinished(self) -> int:
        return self.engine.num_unfinished + len(self.prompts)

    def add(self, prompt: Prompt, sample: int) -> None:
        """Begin sample number `sample` of a prompt."""
        if self.episodes is None:
            self.engine.add(Request(prompt.group, sample, prompt.tokens, self.params))
            return
        self.prompts[prompt.group, sample] = prompt
        self.starts[prompt.group, sample] += 1
        self.episodes.start(prompt.group, sample, list(prompt.messages), prompt.answer)

    def step(self) -> list[Answer]:
        """One step of the engine, if it has anything to do. Returns the answers that have ended."""
        answers = []
        for outcome in self.episodes.poll() if self.episodes is not None else ():
            answers += self._end(outcome)
        self.backend.pump()
        for completion in self.engine.step():
            if not self.backend.finish(completion):
                answers.append(Answer([completion.trajectory], completion.text, [completion.routes]))
        return answers

    def close(self) -> None:
        if self.episodes is not None:
            self.episodes.close()

    def _session(self, group: int, sample: int) -> Session:
        attempt = self.starts[group, sample]
        return Session(
            f"{group}-{sample}-{attempt}", self.renderer, self.backend, group=group, sample=sample, max_context=self.max_context
        )  # fmt: skip

    def _end(self, outcome: Outcome) -> list[Answer]:
        """The answer of an episode; none if it is played again. RuntimeError when its agent never gets to a turn, or by drift."""
        key = outcome.group, outcome.sample
        prompt = self.prompts.pop(key)
        if outcome.detail and outcome.verdict != "ok":
            print(f"group {key[0]} sample {key[1]}: {outcome.verdict}: {outcome.detail}", file=sys.stderr, flush=True)
        samples = collect(outcome.session, max_branches=self.max_branches)
        if not samples:
            if self.starts[key] >= MAX_STARTS:
                raise RuntimeError(f"group {key[0]} sample {key[1]}: {MAX_STARTS} episodes ended before their first turn: {outcome.detail}")
            self.add(prompt, outcome.sample)
            return []
        del self.starts[key]
        for sample in samples if self.strict else ():
            if sample.drift.hard:
                raise RuntimeError(f"{sample.trajectory.name}: the tokens of the session drifted from their messages: {sample.drift}")
        trajectories = [sample.trajectory for sample in samples]
        return [Answer(trajectories, outcome.text, [_routes(sample) for sample in samples], outcome.reward, outcome.verdict)]


def _routes(sample: Sample) -> torch.Tensor | None:
    """What the engine has recorded of a branch, for transport."""
    rows = sample.routes
    return None if rows is None else encode(rows.rows_RLK, np.arange(len(sample.trajectory.tokens)) < len(rows.rows_RLK))
