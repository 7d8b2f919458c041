"""The engine behind `tito.backend`. The thread that steps it also runs the event loop of the sessions, between two steps (loop.py).

    backend = EngineBackend(engine)
    turn = backend.submit(request)         # on the event loop
    ...
    backend.pump()                         # before each step: takes in what was submitted and cancelled
    for completion in engine.step():
        if not backend.finish(completion): # True: it was a turn of ours
            ...
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator

import numpy as np

from miles_core.engine.engine import Completion, Engine, Request
from miles_core.schema import FINISH_REASONS
from miles_core.tito.backend import Piece, TurnRequest, TurnResult

SEEDED_GROUP = 1 << 61  # group numbers from here on are those of requests that bring a seed of their own
_SAMPLE_BITS = 20  # of a sample number that the attempt stands above
_END = object()


class EngineTurn:
    """A turn in the engine, seen from the event loop that submitted it. Its methods are for that loop."""

    def __init__(self, backend: EngineBackend, request: TurnRequest):
        self.backend, self.request, self.number = backend, request, -1
        self.loop = asyncio.get_running_loop()
        self.pieces: asyncio.Queue[Piece | object] = asyncio.Queue()
        self.future: asyncio.Future[TurnResult] = self.loop.create_future()
        self.future.add_done_callback(_retrieve)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (piece := await self.pieces.get()) is not _END:
            yield piece
        await self.future  # raises what the turn ended with

    async def result(self) -> TurnResult:
        return await asyncio.shield(self.future)

    def cancel(self) -> None:
        if not self.future.done():
            self.future.cancel()
            self.pieces.put_nowait(_END)
            self.backend.inbox.append(("cancel", self))

    def _end(self, result: TurnResult | None, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
        self.pieces.put_nowait(_END)


def _retrieve(future: asyncio.Future) -> None:
    """A turn that nobody waits for any more must not be reported as an exception that was never retrieved."""
    if not future.cancelled():
        future.exception()


class EngineBackend:
    """Turns of any number of sessions in one engine."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.max_context = engine.table.max_tokens
        self.inbox: deque[tuple[str, EngineTurn]] = deque()
        self.turns: dict[int, EngineTurn] = {}

    @property
    def load(self) -> int:
        return len(self.turns) + len(self.inbox)

    # ---- the event loop's side

    def submit(self, request: TurnRequest) -> EngineTurn:
        turn = EngineTurn(self, request)
        self.inbox.append(("add", turn))
        return turn

    # ---- the engine's side

    def pump(self) -> None:
        """Take in what was submitted and cancelled since the last look."""
        while self.inbox:
            what, turn = self.inbox.popleft()
            if what == "cancel":
                if self.turns.pop(turn.number, None) is not None:
                    self.engine.cancel(turn.number)
            elif not turn.future.cancelled():
                self._add(turn)

    def _add(self, turn: EngineTurn) -> None:
        try:
            turn.number = self.engine.add(_engine_request(turn.request))
        except ValueError as error:
            turn.loop.call_soon(turn._end, None, error)
            return
        self.turns[turn.number] = turn

        def tell(token: int, logp: float, top: list[tuple[int, float]]) -> None:
            turn.loop.call_soon(turn.pieces.put_nowait, Piece([token], [logp], [top]))

        self.engine.watch(turn.number, tell)

    def finish(self, completion: Completion) -> bool:
        """Hand a completion to the turn that it ends. False if it belongs to somebody else."""
        turn = self.turns.pop(completion.number, None)
        if turn is None:
            return False
        trajectory = completion.trajectory
        sampled, known = trajectory.loss_mask == 1, turn.request.routes
        result = TurnResult(
            trajectory.tokens[sampled], trajectory.logp_roll[sampled], trajectory.version_M, FINISH_REASONS[trajectory.finish],
            trajectory.cached, completion.rows and completion.rows.since(len(known.version_R) if known else 0),
        )  # fmt: skip
        turn.loop.call_soon(turn._end, result, None)
        return True


def _engine_request(request: TurnRequest) -> Request:
    """The noise of an attempt is that of a sample number which no other sample has; a seed stands for a group of its own."""
    assert request.sample < 1 << _SAMPLE_BITS and request.attempt < 1 << (31 - _SAMPLE_BITS), (request.sample, request.attempt)
    group, sample = request.group, request.attempt << _SAMPLE_BITS | request.sample
    if request.seed is not None:
        digest = hashlib.blake2b(str(request.seed).encode(), digest_size=7).digest()
        group, sample = SEEDED_GROUP + int.from_bytes(digest, "little"), 0
    return Request(group, sample, np.asarray(request.tokens, np.int32), request.params, request.routes, request.top_logprobs)
