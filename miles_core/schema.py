"""The three records that a datum passes through, and the one table of their fields.

    Prompt      what a task asks                    tasks -> engine
    Trajectory  one sampled answer, frozen          engine -> ring -> pack
    Batch       packed trajectories as tensors      pack -> loss

`FIELDS` declares every field of a Trajectory once. The ring's byte layout, the viewer and the tests loop over it: adding
a field means adding a row here (and the code that fills it).

An *episode* is sample number `sample` of its group: one answer, or all that an agent did. Where an agent forks the conversation, each
branch is a trajectory of its own, and the trajectories of an episode are *siblings*. They share reward, verdict and advantage. Each
sampled token is trained in one of them: a turn that several branches begin with is masked in all but the first. What is counted by
episode is counted at sibling 0, so the count does not depend on where siblings land.

Shapes: T tokens of one trajectory, M sampled tokens that it trains (loss_mask == 1), R runs of equal version, U turns, D classes of drift.
In a Batch, T and M count over all packed sequences and S is the number of sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from miles_core.digest import BLOCK, signed


class Field(NamedTuple):
    """One row of FIELDS. `shape` is "scalar", "T" (one value a token) or "R2" / "U" / "D" (a short array of its own length)."""

    name: str
    dtype: str
    shape: str


FIELDS = (
    Field("group", "int64", "scalar"),  # group number g: global, fixes prompt and seeds
    Field("sample", "int32", "scalar"),  # index of the episode inside the group, 0 .. n-1
    Field("sibling", "int32", "scalar"),  # index inside the episode, 0 .. number of its trajectories - 1
    Field("episode_tokens", "int32", "scalar"),  # trained tokens of the episode, all siblings together
    Field("branches_dropped", "int32", "scalar"),  # branches of the episode that are not trained, because it has too many
    Field("reward", "float32", "scalar"),
    Field("advantage", "float32", "scalar"),
    Field("verdict", "int32", "scalar"),  # index into VERDICTS
    Field("finish", "int32", "scalar"),  # index into FINISH_REASONS
    Field("cached", "int32", "scalar"),  # prompt tokens of the turns it trains that came from the prefix cache
    Field("cached_later", "int32", "scalar"),  # ... without a turn that begins the conversation
    Field("temperature", "float32", "scalar"),  # the distribution that was sampled from ...
    Field("top_p", "float32", "scalar"),
    Field("top_k", "int32", "scalar"),  # ... 0 = off
    Field("route_owner", "int32", "scalar"),  # rank that holds the recorded routes (routing.py), or NO_OWNER
    Field("route_bytes", "int64", "scalar"),
    Field("route_digest", "int64", "scalar"),
    Field("tokens", "int32", "T"),
    Field("loss_mask", "uint8", "T"),  # 1 exactly on the sampled tokens that it trains
    Field("logp_roll", "float32", "T"),  # sampler's log-prob; 0 where loss_mask is 0
    Field("version", "int32", "R2"),  # rows (version, count) over its M tokens, in order
    Field("turns", "int32", "U"),  # lengths of the alternating prompt / answer stretches; they sum to T
    Field("drift", "int32", "D"),  # how often its tokens differ from a fresh rendering, by class of DRIFTS; empty where no agent played
)
SCALARS = tuple(f for f in FIELDS if f.shape == "scalar")
ARRAYS = tuple(f for f in FIELDS if f.shape != "scalar")
VERDICTS = ("ok", "timeout", "infra_error", "no_verdict")
FINISH_REASONS = ("stop", "length")
DRIFTS = ("special_count", "special_type", "other_text", "assistant_text", "retokenised", "refused")  # told apart in tito/drift.py
NO_OWNER = -1


@dataclass(frozen=True)
class Prompt:
    """What a task asks, already tokenised.

    `tokens` int32 [P]. `text` is the last user message, for people. `answer` is whatever the task's reward needs (JSON-able). `messages`
    are what the tokens spell, for agents.
    """

    group: int
    tokens: np.ndarray
    text: str
    answer: Any = None
    messages: tuple[dict, ...] = ()


@dataclass
class Trajectory:
    """One sampled answer. Filled by the engine, then by reward and advantage; frozen once it is in the ring.

    Arrays may be views into shared memory: read them, never write them.
    """

    group: int
    sample: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    logp_roll: np.ndarray
    version: np.ndarray
    turns: np.ndarray
    finish: int
    sibling: int = 0
    episode_tokens: int = 0  # 0 = an episode of this trajectory alone
    branches_dropped: int = 0
    cached: int = 0
    cached_later: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    reward: float = 0.0
    verdict: int = 0
    advantage: float = 0.0
    route_owner: int = NO_OWNER
    route_bytes: int = 0
    route_digest: int = 0
    drift: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if not self.episode_tokens:
            self.episode_tokens = self.num_trained

    @property
    def key(self) -> tuple[int, int, int]:
        """(group, sample, sibling): no two trajectories of a run have all three in common."""
        return self.group, self.sample, self.sibling

    @property
    def name(self) -> str:
        return name_of(*self.key)

    @property
    def num_trained(self) -> int:
        """Sampled tokens that this trajectory trains (M)."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def version_M(self) -> np.ndarray:
        """Version of every sampled token, int32 [M]."""
        return np.repeat(self.version[:, 0], self.version[:, 1])

    @property
    def oldest_version(self) -> int:
        return int(self.version[:, 0].min())

    def check(self) -> None:
        """Assert that the arrays agree with each other."""
        num_tokens, num_sampled = len(self.tokens), self.num_trained
        lengths = {f.name: len(getattr(self, f.name)) for f in ARRAYS if f.shape == "T"}
        assert set(lengths.values()) == {num_tokens}, f"per-token fields differ in length: {lengths}"
        assert int(self.version[:, 1].sum()) == num_sampled, (self.version, num_sampled)
        assert int(self.turns.sum()) == num_tokens, (self.turns, num_tokens)
        assert num_sampled <= self.episode_tokens, f"{self.name} trains {num_sampled} tokens, its episode {self.episode_tokens}"


def name_of(group: int, sample: int, sibling: int) -> str:
    """A trajectory in words, for messages."""
    return f"group {group} sample {sample}" + (f" sibling {sibling}" if sibling else "")


@dataclass(frozen=True)
class Batch:
    """One micro-batch: whole sequences packed one after another, plus one row for every sampled token.

    `rows_M` are the packed positions whose hidden state predicts the sampled tokens `targets_M` (position of the token minus one).
    """

    tokens_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64, restart at 0 in every sequence
    cu_seqlens_S1: torch.Tensor  # int32
    rows_M: torch.Tensor  # int64
    targets_M: torch.Tensor  # int64
    sequence_M: torch.Tensor  # int64, which of the S sequences
    logp_roll_M: torch.Tensor  # float32
    advantage_M: torch.Tensor  # float32
    version_M: torch.Tensor  # int64
    keep_M: torch.Tensor  # float32, 1 where the token enters the loss, 0 where its sample is masked out
    temperature_M: torch.Tensor  # float32
    top_p_M: torch.Tensor  # float32
    top_k_M: torch.Tensor  # int64
    weight_S: torch.Tensor  # float32 [S], kept tokens of each sequence
    episode_S: torch.Tensor  # float32 [S], kept tokens of the episode that each sequence belongs to, all its siblings together
    ids_S3: torch.Tensor  # int64 [S, 3], group, sample and sibling of each sequence
    logp_prox_M: torch.Tensor | None = None  # float32, trainer at step start (decoupled loss)
    logp_ref_M: torch.Tensor | None = None  # float32, frozen reference (KL)
    routes_TLK: torch.Tensor | None = None  # uint8 or int16, recorded experts of every token in every MoE layer (routing.py)
    routed_T: torch.Tensor | None = None  # bool, whether a token's row was recorded

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: None if x is None else x.to(device) for name, x in tensors.items()})

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens_S1) - 1


_get_scalars, _get_arrays = (attrgetter(*(f.name for f in table)) for table in (SCALARS, ARRAYS))
_SCALAR_DTYPE = np.dtype([(f.name, f.dtype) for f in SCALARS] + [(f"len_{f.name}", "int32") for f in ARRAYS], align=True)


def _array_shape(f: Field, length: int) -> tuple[int, ...]:
    return (length, 2) if f.shape == "R2" else (length,)


def _aligned(nbytes: int) -> int:
    return (nbytes + 7) & ~7


def trajectory_nbytes(num_tokens: int, num_runs: int, num_turns: int, num_drifts: int = len(DRIFTS)) -> int:
    """Bytes that a trajectory of these sizes takes in a ring slot or a journal."""
    length = {"T": num_tokens, "R2": 2 * num_runs, "U": num_turns, "D": num_drifts}
    return _aligned(_SCALAR_DTYPE.itemsize) + sum(_aligned(length[f.shape] * np.dtype(f.dtype).itemsize) for f in ARRAYS)


def group_nbytes(group: list[Trajectory]) -> int:
    """Exact size of `write_group(group, ...)`."""
    return 8 + sum(trajectory_nbytes(len(t.tokens), len(t.version), len(t.turns), len(t.drift)) for t in group)


def write_group(group: list[Trajectory], buffer: memoryview) -> int:
    """Serialise a group into `buffer` (8-byte aligned, at least `group_nbytes`). Returns the digest of the bytes written.

    Layout: int64 count; then for each trajectory its scalars with the array lengths, then its arrays in FIELDS order, each aligned to 8.
    """
    np.frombuffer(buffer, np.int64, 1)[0] = len(group)
    offset, digested, state = 8, 0, xxhash.xxh3_64()
    for t in group:
        t.check()
        arrays = [np.ascontiguousarray(array, f.dtype) for array, f in zip(_get_arrays(t), ARRAYS, strict=True)]
        scalars = np.array((*_get_scalars(t), *map(len, arrays)), _SCALAR_DTYPE)
        for array in (scalars, *arrays):
            source = array.reshape(-1).view(np.uint8).data
            for start in range(0, len(source), BLOCK):
                piece = source[start : start + BLOCK]
                stop = offset + start + len(piece)
                buffer[offset + start : stop] = piece
                if stop - digested >= BLOCK:  # while it is in cache
                    state.update(buffer[digested:stop])
                    digested = stop
            offset += _aligned(array.nbytes)
    state.update(buffer[digested:offset])
    return signed(state.intdigest())


def read_group(buffer: memoryview) -> list[Trajectory]:
    """Inverse of `write_group`, without a copy: the arrays are views of `buffer`."""
    offset, group = 8, []
    for _ in range(int(np.frombuffer(buffer, np.int64, 1)[0])):
        scalars = np.frombuffer(buffer, _SCALAR_DTYPE, 1, offset)[0].item()
        offset += _aligned(_SCALAR_DTYPE.itemsize)
        values: dict[str, Any] = {f.name: value for f, value in zip(SCALARS, scalars, strict=False)}
        for f, length in zip(ARRAYS, scalars[len(SCALARS) :], strict=True):
            shape = _array_shape(f, length)
            values[f.name] = np.frombuffer(buffer, f.dtype, math.prod(shape), offset).reshape(shape)
            offset += _aligned(values[f.name].nbytes)
        group.append(Trajectory(**values))
    return group


assert {f.name for f in FIELDS} == {f.name for f in fields(Trajectory)}, "FIELDS and Trajectory must name the same fields"
