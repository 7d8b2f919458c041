"""Episodes that harnesses of other processes play (`--agent http`): they wait here until one asks.

    offers = Offers(loop, sessions, timeout_s=60, nobody_s=300)
    offers.start(group, sample, messages, metadata)
    session, more = offers.take()            # POST /sessions: the one that waits longest
    offers.check()                           # now and then: is there anybody?

An episode ends by POST /sessions/{id}/finish, by DELETE, when its session is idle for too long, or when it takes longer than it may. Ranks
of a node tell each other through the ring how many wait on each, and a harness is sent to the rank with the most: so it needs one address,
and its episodes spread evenly.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from miles_core.tito.errors import Elsewhere, SessionError
from miles_core.tito.loop import Loop
from miles_core.tito.session import Session
from miles_core.tito.sessions import Sessions

if TYPE_CHECKING:
    from miles_core.ring import Ring

_LONGEST_LOOK_S = 1.0  # between two checks; what is longer (a colocated rank trains) is time in which nobody could have asked


class Offer(NamedTuple):
    group: int
    sample: int
    prompt: list[dict]
    metadata: Any


class Offers:
    """`timeout_s`: how long an episode may take. `nobody_s`: how long episodes may wait without any harness."""

    def __init__(self, loop: Loop, sessions: Sessions, *, timeout_s: float, nobody_s: float):
        self.loop, self.sessions, self.timeout_s, self.nobody_s = loop, sessions, timeout_s, nobody_s
        self.waiting: deque[Offer] = deque()
        self.deadlines: dict[str, asyncio.TimerHandle] = {}  # of open sessions
        self.ring: Ring | None = None
        self.index, self.evaluations = 0, 0
        self.url, self.api_key = "", "none"
        self.checked, self.alone_s = time.monotonic(), 0.0

    def share(self, ring: Ring, index: int) -> None:
        """From now on with the other rollout ranks of the node; this one is number `index`."""
        self.ring, self.index = ring, index

    def start(self, group: int, sample: int, messages: list[dict], metadata: Any) -> None:
        """ValueError for metadata that a harness cannot be told."""
        try:
            json.dumps(metadata, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"--agent http: what the task's reward needs of group {group} is no JSON: {error}") from error
        self.waiting.append(Offer(group, sample, messages, metadata))
        self._tell()

    def take(self) -> tuple[Session, dict[str, Any]]:
        """A session for the episode that waits longest. Elsewhere if more wait on another rank; SessionError 503 if none waits at all."""
        waiting, _, _ = self._node()
        if max(waiting) > len(self.waiting):
            raise Elsewhere(waiting.index(max(waiting)) - self.index)
        if not self.waiting:
            raise SessionError(503, "no episode waits: ask again", "no_episode", retry_after=1)
        offer = self.waiting[0]
        session = self.sessions.open(offer.group, offer.sample)
        self.waiting.popleft()
        self.deadlines[session.id] = self.loop.events.call_later(self.timeout_s, self._overdue, session)
        self._tell()
        told = {"prompt": offer.prompt, "metadata": offer.metadata, "timeout": self.timeout_s}
        return session, told | {"shows_tools": session.renderer.shows_tools}

    def ended(self, session: Session) -> None:
        """To be told of every session that ends."""
        self.deadlines.pop(session.id).cancel()
        self._tell()

    def check(self) -> None:
        """ValueError, that says how to start a harness, when episodes wait and nobody has come for too long."""
        now = time.monotonic()
        passed, self.checked = min(now - self.checked, _LONGEST_LOOK_S), now
        _, played, _ = self._node()
        self.alone_s = self.alone_s + passed if self.waiting and not any(played) else 0.0
        if self.alone_s > self.nobody_s:
            raise ValueError(
                f"--agent http: {len(self.waiting)} episodes wait, and no harness has asked for one for {self.alone_s:.0f} s. Start one: "
                f"python -m miles_core.tito.harness --url {self.url} --agent module:function"
            )

    def end_evaluation(self) -> None:
        """This rank's share of an evaluation is done."""
        self.evaluations += 1
        self._tell()

    def evaluating(self) -> bool:
        """Whether another rank of the node has not done its share: it may depend on this one to send it harnesses."""
        return min(self._node()[2]) < self.evaluations

    def _overdue(self, session: Session) -> None:
        self.sessions.finish(session.id, None, "timeout", f"the episode took longer than {self.timeout_s:g} s")

    def _tell(self) -> None:
        if self.ring is not None:
            self.ring.set_episodes(self.index, len(self.waiting), len(self.deadlines), self.evaluations)

    def _node(self) -> list[list[int]]:
        """Of every rollout rank of the node: how many episodes wait, how many are being played, how many evaluations it has done."""
        return self.ring.episodes() if self.ring is not None else [[len(self.waiting)], [len(self.deadlines)], [self.evaluations]]
