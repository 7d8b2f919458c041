"""What a session asks of the engine: one turn, token by token. The only thing that `tito` knows about generation.

    turn = backend.submit(TurnRequest(tokens, params, ...))      # from any thread with a running event loop
    async for piece in turn:                                     # as they are sampled
        ...
    result = await turn.result()

Legend: T tokens of the prompt, M sampled tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from miles_core.engine.sequence import Rows, SamplingParams

SAMPLE_BITS = 16  # of the number that fixes a sample's noise; a sample that is drawn again has its attempt above them


@dataclass(frozen=True)
class TurnRequest:
    """`tokens` int32 [T]: everything that comes before the turn, exactly as it is to be trained on.

    (group, sample, attempt) fix the sampling noise: attempt counts the branches of an episode, so that a retry is another sample.
    `seed`, if given, takes their place. `routes`: what a mixture of experts has recorded of the first tokens (TurnResult.routes of the
    turns before, joined).
    """

    tokens: np.ndarray
    params: SamplingParams
    group: int
    sample: int
    attempt: int = 0
    seed: int | None = None
    top_logprobs: int = 0
    routes: Rows | None = None


@dataclass(frozen=True)
class Piece:
    """Tokens sampled in one step of the engine, with their log-probs under the distribution that they were sampled from."""

    tokens: list[int]
    logp: list[float]
    top: list[list[tuple[int, float]]]  # for each token the likeliest `top_logprobs` (id, log-prob); empty lists without


@dataclass(frozen=True)
class TurnResult:
    """`tokens` int32 [M], `logp` float32 [M], `version` int32 [M] (of the weights that sampled each); finish "stop" or "length".

    `cached`: tokens of the prompt that came from the prefix cache. `routes`: recorded rows of the tokens of which the request had none.
    """

    tokens: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    finish: str
    cached: int
    routes: Rows | None = None


class Turn(Protocol):
    """A turn that is being generated. Iterate over it once; `result` may be awaited instead, or afterwards."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    async def result(self) -> TurnResult:
        """Raises asyncio.CancelledError after `cancel`, and ValueError for a request that the engine cannot take (it says why)."""
        ...

    def cancel(self) -> None:
        """Stop generating; what was sampled is dropped."""
        ...


class Backend(Protocol):
    """Makes turns. `max_context`: tokens of prompt and answer together."""

    max_context: int

    def submit(self, request: TurnRequest) -> Turn: ...

    @property
    def load(self) -> int:
        """Turns in flight."""
        ...
