"""The event loop of a rollout rank: run a little at a time by the thread that steps the engine, between two steps.

    loop = Loop()
    loop.run(serve(app))          # until the coroutine has ended
    loop.poll()                   # what is ready; never waits

Agents and the endpoint live on it. In a thread of their own they would fight with the engine for the interpreter at each of its ops, which
made a step of a small model twenty times slower. So nothing here may block: what takes time goes to `asyncio.to_thread` or another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

ROUNDS = 8  # of the event loop at a time: from the end of a turn to the request for the next one, with some to spare


class Loop:
    """`events`: the asyncio loop."""

    def __init__(self) -> None:
        self.events = asyncio.new_event_loop()

    def run(self, work: Coroutine) -> Any:
        """The result of a coroutine; everything else on the loop goes on meanwhile."""
        return self.events.run_until_complete(work)

    def poll(self) -> None:
        """Run what is ready."""
        for _ in range(ROUNDS):
            self.events.call_soon(self.events.stop)
            self.events.run_forever()

    def close(self) -> None:
        """Cancel what is left."""
        tasks = asyncio.all_tasks(self.events)
        for task in tasks:
            task.cancel()
        if tasks:
            self.events.run_until_complete(asyncio.wait(tasks))
        self.events.close()
