"""What the engine keeps about a request: the request itself, its sequence, and the columns of those that run.

A `Sequence` waits, runs in one lane of the `Table`, and may be sent back to wait. The `Table` holds running sequences as columns, so that
the bookkeeping of a decode step is a handful of array operations however many sequences run.

Legend: R lanes, T tokens, B pages of a sequence, M sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kernels.attention import PAGE
from miles_core.routing import encode
from miles_core.schema import Trajectory

if TYPE_CHECKING:
    from miles_core.engine.sampler import StopStrings

MIXED = -1  # a lane whose KV comes from several versions


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one answer. Temperature 0 is greedy; top_p 1 and top_k 0 are off. A stop token is sampled, kept and trained on."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, good, text in (
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number >= 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, ">= 0"),
            ("max_new_tokens", self.max_new_tokens >= 1, ">= 1"),
            ("stop_strings", all(self.stop_strings), "not empty strings"),
        ):
            if not good:
                raise ValueError(f"{name} must be {text}, got {getattr(self, name)}")


class Rows(NamedTuple):
    """Routes of R tokens of a sequence in a row (routing.py), and the version of the weights that decided each, int32 [R]."""

    rows_RLK: torch.Tensor
    version_R: np.ndarray

    def since(self, start: int) -> Rows:
        """Those from number `start` on, in memory of their own."""
        return Rows(self.rows_RLK[start:].clone(), self.version_R[start:].copy())

    @classmethod
    def join(cls, parts: list[Rows]) -> Rows:
        """Rows that follow each other, as one."""
        return cls(torch.cat([part.rows_RLK for part in parts]), np.concatenate([part.version_R for part in parts]))


@dataclass(frozen=True)
class Request:
    """Sample number `sample` of group `group`: `tokens` int32 [P] is the prompt. Group and sample fix the sampling noise.

    `rows`: routes that the first tokens have already, from earlier turns. `top_logprobs`: how many of the likeliest tokens to report
    beside each sampled one, to whoever watches.
    """

    group: int
    sample: int
    tokens: np.ndarray
    params: SamplingParams
    rows: Rows | None = None
    top_logprobs: int = 0


@dataclass
class Sequence:
    """A request and the tokens it has so far; the arrays are only current while it waits (see `Table.save`)."""

    request: Request
    number: int  # order of arrival
    tokens: np.ndarray  # int64 [T]
    logp: np.ndarray  # float32 [T], 0 in the prompt
    version: np.ndarray  # int32 [T]
    reached: int = 0  # tokens whose KV has ever been computed or shared
    cached: int = -1  # prompt tokens it never had to compute; -1 until it first runs
    stop_strings: StopStrings | None = None
    key: bytes = b""  # the prompt: siblings have equal keys (see Scheduler.identity)
    row_version: np.ndarray | None = None  # int32 [T], the weights that routed each of the first `reached` tokens
    rows_RLK: torch.Tensor | None = None  # their routes, saved when it left its pages

    @classmethod
    def of(cls, request: Request, number: int) -> Sequence:
        tokens = request.tokens.astype(np.int64)
        sequence = cls(request, number, tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32))
        if request.rows is not None:
            sequence.rows_RLK, sequence.row_version = request.rows
            sequence.reached = len(sequence.row_version)
        return sequence

    @property
    def prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def limit(self) -> int:
        """Length at which it ends."""
        return self.prompt + self.request.params.max_new_tokens

    @property
    def untouched(self) -> bool:
        """True until its first token is sampled."""
        return len(self.tokens) == self.prompt


@dataclass(frozen=True)
class Completion:
    """A finished answer. `text`: decoded without special tokens, cut before the stop string that ended it; "" without a tokenizer."""

    number: int  # as returned by Engine.add
    trajectory: Trajectory
    text: str
    rows: Rows | None = None  # what a mixture of experts has recorded: of all its tokens but the last, which was never computed

    @property
    def routes(self) -> torch.Tensor | None:
        """The rows as they travel, uint8: see routing.encode."""
        if self.rows is None:
            return None
        return encode(self.rows.rows_RLK, np.arange(len(self.trajectory.tokens)) < len(self.rows.version_R))


@dataclass
class Counters:
    """Totals since the engine was made."""

    tokens_sampled: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_recomputed: int = 0  # prefilled again after a preemption or new weights
    preemptions: int = 0
    steps: int = 0


@dataclass
class Table:
    """Running sequences, one lane each. Columns are numpy arrays [R]; those with a value for each token are [R, T], `pages` is [R, B]."""

    lanes: int
    max_tokens: int
    sequences: list[Sequence | None] = field(init=False)

    def __post_init__(self) -> None:
        # np.zeros of a large array takes memory only where it is written
        shape = (self.lanes, self.max_tokens)
        self.sequences = [None] * self.lanes
        self.tokens, self.logp, self.version = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        self.row_version = np.zeros(shape, np.int32)
        self.pages = np.zeros((self.lanes, -(-self.max_tokens // PAGE)), np.int32)
        self.num_pages = np.zeros(self.lanes, np.int64)  # of `pages`, how many it holds
        self.shared = np.zeros(self.lanes, np.int64)  # of these, how many stand in the prefix tree
        self.length = np.zeros(self.lanes, np.int64)  # tokens
        self.computed = np.zeros(self.lanes, np.int64)  # of these, how many have their KV in the pages
        self.reached = np.zeros(self.lanes, np.int64)
        self.prompt = np.zeros(self.lanes, np.int64)
        self.limit = np.zeros(self.lanes, np.int64)
        self.kv_version = np.zeros(self.lanes, np.int64)  # the weights that computed its pages, or MIXED
        self.group, self.sample = np.zeros(self.lanes, np.int64), np.zeros(self.lanes, np.int64)
        self.temperature, self.top_p = np.zeros(self.lanes, np.float32), np.zeros(self.lanes, np.float32)
        self.top_k = np.zeros(self.lanes, np.int64)
        self.stop_ids = np.full((self.lanes, 1), -1, np.int64)
        self.has_stop_strings = np.zeros(self.lanes, bool)

    def load(self, lane: int, sequence: Sequence) -> None:
        """Put a waiting sequence into a lane; the scheduler fills in its pages."""
        assert self.sequences[lane] is None, f"lane {lane} is taken"
        request, params, length = sequence.request, sequence.request.params, len(sequence.tokens)
        self.sequences[lane] = sequence
        self.tokens[lane, :length], self.logp[lane, :length], self.version[lane, :length] = sequence.tokens, sequence.logp, sequence.version
        self.length[lane], self.prompt[lane], self.limit[lane] = length, sequence.prompt, sequence.limit
        self.reached[lane] = sequence.reached
        if sequence.row_version is not None:
            self.row_version[lane, : sequence.reached] = sequence.row_version[: sequence.reached]
        self.group[lane], self.sample[lane] = request.group, request.sample
        self.temperature[lane], self.top_p[lane], self.top_k[lane] = params.temperature, params.top_p, params.top_k
        missing = len(params.stop_token_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[lane] = -1
        self.stop_ids[lane, : len(params.stop_token_ids)] = params.stop_token_ids
        self.has_stop_strings[lane] = sequence.stop_strings is not None

    def save(self, lane: int) -> Sequence:
        """Take a sequence out of its lane, with everything sampled so far."""
        sequence, length = self.sequences[lane], int(self.length[lane])
        assert sequence is not None, f"lane {lane} is empty"
        self.sequences[lane] = None
        sequence.tokens = self.tokens[lane, :length].copy()
        sequence.logp, sequence.version = self.logp[lane, :length].copy(), self.version[lane, :length].copy()
        sequence.row_version = self.row_version[lane, :length].copy()
        sequence.reached = int(self.reached[lane])
        return sequence

    def append(self, lanes_M: np.ndarray, tokens_M: np.ndarray, logp_M: np.ndarray, version: int) -> np.ndarray:
        """Add one sampled token to each of these lanes. Returns bool [M]: for which of them it is a stop token."""
        at_M = self.length[lanes_M]
        self.tokens[lanes_M, at_M], self.logp[lanes_M, at_M], self.version[lanes_M, at_M] = tokens_M, logp_M, version
        self.length[lanes_M] = at_M + 1
        return (self.stop_ids[lanes_M] == tokens_M[:, None]).any(1)
