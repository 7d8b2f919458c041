"""The event loop of a rollout rank: run a little at a time by the thread that steps the engine, between two steps.

    loop = Loop()
    loop.run(serve(app))          # until the coroutine has ended
    loop.poll()                   # what is ready; never waits

Agents and the endpoint live on it. In a thread of their own they would fight with the engine for the interpreter at each of its ops, which
made a step of a small model twenty times slower. So nothing here may block: what takes time goes to `asyncio.to_thread` or another process.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

MAX_ROUNDS = 64  # of the event loop in one poll: from the end of a turn to the request for the next one, over HTTP too, with some to spare


class _Selector(selectors.DefaultSelector):
    """Where the loop would wait, a poll ends. `rounds`: how many are left of it; 0 outside a poll."""

    rounds = 0

    def select(self, timeout: float | None = None) -> list:
        if not self.rounds:
            return super().select(timeout)
        events = super().select(0)
        self.rounds = self.rounds - 1 if events or timeout == 0 else 0
        if not self.rounds:
            self.stop()
        return events


class Loop:
    """`events`: the asyncio loop."""

    def __init__(self) -> None:
        self._selector = _Selector()
        self.events = asyncio.SelectorEventLoop(self._selector)
        self._selector.stop = self.events.stop

    def run(self, work: Coroutine) -> Any:
        """The result of a coroutine; everything else on the loop goes on meanwhile."""
        return self.events.run_until_complete(work)

    def poll(self) -> None:
        """Run what is ready, and what that makes ready."""
        self._selector.rounds = MAX_ROUNDS
        try:
            self.events.run_forever()
        finally:
            self._selector.rounds = 0  # Ctrl-C may come in the middle, and `run` is to end what is there after it

    def close(self) -> None:
        """Cancel what is left."""
        tasks = asyncio.all_tasks(self.events)
        for task in tasks:
            task.cancel()
        if tasks:
            self.events.run_until_complete(asyncio.wait(tasks))
        self.events.close()
