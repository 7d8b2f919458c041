"""The sessions of one rank: opened, found, ended, forgotten. Used from one event loop.

An episode has an end whatever its harness does: it is finished with a reward, or deleted, or its session expires when nobody has used it
for `idle_s` seconds. Either way `on_end` is called once, with a session that has a verdict.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from miles_core.tito.errors import SessionError
from miles_core.tito.session import Reply, Session

if TYPE_CHECKING:
    from miles_core.tito.backend import Backend
    from miles_core.tito.render import Renderer
    from miles_core.tito.tree import Limits

OnEnd = Callable[[Session], None]
_SWEEP_S = 5.0


class Sessions:
    """`max_context`: tokens of a prompt and its answer. `max_sessions` may be open or finished and not yet forgotten.

    `limits`, `matcher`, `max_turns`, `judged`: see Session. `on_end`: called in the event loop's thread with each session that ends.
    """

    def __init__(
        self,
        renderer: Renderer,
        backend: Backend,
        *,
        max_context: int,
        max_sessions: int = 1024,
        idle_s: float = 600.0,
        limits: Limits | None = None,
        matcher: str = "strict",
        max_turns: int | None = None,
        judged: bool = False,
        on_end: OnEnd | None = None,
    ) -> None:
        if max_sessions < 1 or idle_s <= 0:
            raise ValueError(f"max_sessions must be >= 1 and idle_s > 0, got {max_sessions} and {idle_s}")
        self.renderer, self.backend = renderer, backend
        self.max_context, self.max_sessions, self.idle_s = max_context, max_sessions, idle_s
        self.counts: Counter[str] = Counter()  # for /metrics: names with labels, as Prometheus spells them
        self._options = {"limits": limits, "matcher": matcher, "max_turns": max_turns, "judged": judged}
        self._on_end = on_end
        self._sessions: dict[str, Session] = {}
        self._groups = count()
        self._open = True

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, group: int | None = None, sample: int = 0) -> Session:
        """A new session; without a group it is the next one's. SessionError 429 when there are `max_sessions`, 503 after `close`."""
        if not self._open:
            raise SessionError(503, "the server is stopping", "stopping")
        if len(self._sessions) >= self.max_sessions:
            self.expire()
        if len(self._sessions) >= self.max_sessions:
            raise SessionError(
                429, f"{self.max_sessions} sessions are open: finish or delete some, or try again later", "too_many_sessions"
            )
        session = Session(
            secrets.token_urlsafe(16),
            self.renderer,
            self.backend,
            group=next(self._groups) if group is None else group,
            sample=sample,
            max_context=self.max_context,
            **self._options,
        )
        self._sessions[session.id] = session
        self.counts["miles_sessions_opened_total"] += 1
        return session

    def get(self, session_id: str) -> Session:
        """SessionError 404 for one that is not there (any more)."""
        if session_id not in self._sessions:
            raise SessionError(404, f"session {session_id!r} is unknown or has expired", "session_not_found")
        return self._sessions[session_id]

    def finish(self, session_id: str, reward: float | None, verdict: str, detail: str = "") -> Session:
        """End the episode; the session can still be read. SessionError."""
        session = self.get(session_id)
        session.finish(reward, verdict, detail)
        session.last_used = time.monotonic()
        self._ended(session)
        return session

    def remove(self, session_id: str) -> None:
        """Forget a session; if it was not finished, nobody has judged it. SessionError 404."""
        session = self.get(session_id)
        if not session.finished:
            session.finish(verdict="no_verdict")
            self._ended(session)
        del self._sessions[session_id]

    def forget(self, session: Session) -> None:
        """Of a session that has ended."""
        assert session.finished, session.id
        self._sessions.pop(session.id, None)

    async def sweep(self) -> None:
        """Expire sessions, for ever."""
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.idle_s / 4))
            self.expire()

    def expire(self) -> None:
        """Remove the sessions that nobody uses. One that waits for the engine is in use."""
        now = time.monotonic()
        for session in [s for s in self._sessions.values() if not s.in_flight and now - s.last_used > self.idle_s]:
            self.remove(session.id)
            self.counts["miles_sessions_expired_total"] += 1

    def close(self) -> None:
        """End all sessions and open no more."""
        self._open = False
        for session_id in tuple(self._sessions):
            self.remove(session_id)

    def count_turn(self, reply: Reply) -> None:
        """For /metrics."""
        turn = "first" if reply.node.depth == 1 else "later"
        self.counts[f'miles_turns_total{{finish="{reply.finish}"}}'] += 1
        self.counts[f'miles_prompt_tokens_total{{turn="{turn}"}}'] += reply.usage["prompt_tokens"]
        self.counts[f'miles_cached_tokens_total{{turn="{turn}"}}'] += reply.usage["cached_tokens"]
        self.counts["miles_sampled_tokens_total"] += reply.usage["completion_tokens"]

    def metrics(self) -> str:
        """Everything that is counted, in Prometheus' text format."""
        gauges = {"miles_sessions": len(self), "miles_turns_in_flight": self.backend.load}
        lines, last = [], ""
        for name, value in [*gauges.items(), *sorted(self.counts.items())]:
            family = name.partition("{")[0]
            if family != last:
                lines.append(f"# TYPE {family} {'gauge' if name in gauges else 'counter'}")
            last = family
            lines.append(f"{name} {value}")
        return "\n".join(lines) + "\n"

    def _ended(self, session: Session) -> None:
        self.counts[f'miles_sessions_ended_total{{verdict="{session.verdict}"}}'] += 1
        if self._on_end is not None:
            self._on_end(session)
