"""Trajectories -> Batches: which rank, which micro-batch, which positions. Happens once per optimizer step.

    mine = balance(trajectories, num_ranks)[rank]
    counts = count(mine)                     # all-reduced before any backward: the loss divides by global counts
    batches = pack(mine, max_tokens)
    batches = pad(batches, most_on_any_rank) # FSDP: every rank runs the same number of forwards and backwards

No function here depends on the order in which trajectories arrive, so an asynchronous run can be replayed.

Shapes: T packed tokens, S sequences, M sampled tokens (one row each).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from miles_core.schema import VERDICTS, Batch, Trajectory

_OK = VERDICTS.index("ok")


class Counts(NamedTuple):
    """What one rank brings to an optimizer step. Add them up over ranks."""

    loss_tokens: int  # sampled tokens that enter the loss
    loss_episodes: int  # episodes with at least one of them; siblings count as one, at the first of them
    tokens: int  # all tokens that go through the model
    sequences: int  # all sequences that do


def count(trajectories: Sequence[Trajectory]) -> Counts:
    """Counts of these trajectories; samples with another verdict than ok are in `tokens` only."""
    kept = [t for t in trajectories if t.verdict == _OK]
    episodes = sum(t.sibling == 0 and t.episode_tokens > 0 for t in kept)
    return Counts(sum(t.num_trained for t in kept), episodes, sum(len(t.tokens) for t in trajectories), len(trajectories))


def zero_std(group: Sequence[Trajectory]) -> bool:
    """True when the rewards of the group's episodes are all equal, or fewer than two are valid: all advantages are 0.

    `--skip-zero-std` leaves such groups out of the batch. Source: "dynamic sampling", DAPO, arXiv 2503.14476, section 3.2.
    """
    return len({t.reward for t in group if t.verdict == _OK}) < 2


def balance(trajectories: Sequence[Trajectory], num_ranks: int) -> list[list[Trajectory]]:
    """Deal trajectories to ranks so that token counts are nearly equal. Every rank gets a list, possibly an empty one.

    Longest first, each to the rank with the fewest tokens (Graham's LPT rule: the fullest rank has at most 4/3 of the best possible).
    """
    shares: list[list[Trajectory]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for t in sorted(trajectories, key=_longest_first):
        rank = load.index(min(load))
        shares[rank].append(t)
        load[rank] += len(t.tokens)
    return shares


def pack(trajectories: Sequence[Trajectory], max_tokens: int) -> list[Batch]:
    """Whole sequences into micro-batches of at most `max_tokens` packed tokens (first-fit decreasing). At least one Batch.

    With no trajectory the one Batch is `dummy()`: a rank that has nothing to train on still runs its backward.
    Raises ValueError for a trajectory longer than the budget: memory was sized for it.
    """
    bins: list[list[Trajectory]] = []
    room: list[int] = []
    for t in sorted(trajectories, key=_longest_first):
        length = len(t.tokens)
        if length > max_tokens:
            raise ValueError(f"--micro-batch-tokens {max_tokens} cannot hold a trajectory of {length} tokens: raise it")
        index = next((i for i, free in enumerate(room) if free >= length), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[index].append(t)
        room[index] -= length
    return [_batch(b) for b in bins] or [dummy()]


def pad(batches: Sequence[Batch], number: int) -> list[Batch]:
    """The batches, followed by as many `dummy()` ones as make `number`."""
    assert len(batches) <= number, (len(batches), number)
    return [*batches, *(dummy() for _ in range(number - len(batches)))]


def dummy() -> Batch:
    """One sequence of one token with one row that is kept out of the loss: forward and backward run, every gradient is 0."""
    one, zero = torch.ones(1), torch.zeros(1)
    id0 = torch.zeros(1, dtype=torch.int64)
    return Batch(
        tokens_T=id0, positions_T=id0, cu_seqlens_S1=torch.tensor([0, 1], dtype=torch.int32), rows_M=id0, targets_M=id0, sequence_M=id0,
        logp_roll_M=zero, advantage_M=zero, version_M=id0, keep_M=zero, temperature_M=one, top_p_M=one, top_k_M=id0, weight_S=zero,
        episode_S=zero, ids_S3=torch.full((1, 3), -1),
    )  # fmt: skip


def _longest_first(t: Trajectory) -> tuple[int, ...]:
    return -len(t.tokens), *t.key


def _batch(packed: Sequence[Trajectory]) -> Batch:
    """One Batch of these trajectories in this order. Copies: the ring slots behind them can be released afterwards."""
    for t in packed:
        t.check()
        assert not t.loss_mask[:1].any(), f"{t.name}: the first token has no predecessor and cannot be sampled"
    lengths = np.array([len(t.tokens) for t in packed])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens_T = np.concatenate([t.tokens for t in packed]).astype(np.int64)
    sampled_M = np.flatnonzero(np.concatenate([t.loss_mask for t in packed]))  # packed position of every sampled token
    sequence_M = np.searchsorted(starts, sampled_M, side="right") - 1
    keep_S = np.array([t.verdict == _OK for t in packed], np.float32)

    def per_token(name: str, dtype: type) -> torch.Tensor:
        """A scalar of the trajectory, repeated for each of its sampled tokens."""
        return torch.from_numpy(np.array([getattr(t, name) for t in packed], dtype)[sequence_M])

    batch = Batch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(np.arange(len(tokens_T)) - np.repeat(starts[:-1], lengths)),
        cu_seqlens_S1=torch.from_numpy(starts.astype(np.int32)),
        rows_M=torch.from_numpy(sampled_M - 1),
        targets_M=torch.from_numpy(tokens_T[sampled_M]),
        sequence_M=torch.from_numpy(sequence_M),
        logp_roll_M=torch.from_numpy(np.concatenate([t.logp_roll for t in packed])[sampled_M]),
        advantage_M=per_token("advantage", np.float32),
        version_M=torch.from_numpy(np.concatenate([t.version_M for t in packed]).astype(np.int64)),
        keep_M=torch.from_numpy(keep_S[sequence_M]),
        temperature_M=per_token("temperature", np.float32),
        top_p_M=per_token("top_p", np.float32),
        top_k_M=per_token("top_k", np.int64),
        weight_S=torch.from_numpy(np.bincount(sequence_M, minlength=len(packed)).astype(np.float32) * keep_S),
        episode_S=torch.from_numpy(np.array([t.episode_tokens for t in packed], np.float32) * keep_S),
        ids_S3=torch.tensor([t.key for t in packed]),
    )
    _check(batch)
    return batch


def _check(batch: Batch) -> None:
    """Assert that every field is aligned with its row or its token."""
    fields_M = {name: len(value) for name, value in vars(batch).items() if name.endswith("_M") and value is not None}
    assert len(set(fields_M.values())) == 1, f"per-row fields differ in length: {fields_M}"
    assert len(batch.positions_T) == batch.num_tokens == int(batch.cu_seqlens_S1[-1]), (len(batch.positions_T), batch.cu_seqlens_S1)
    assert len(batch.weight_S) == len(batch.episode_S) == batch.num_sequences, (batch.weight_S, batch.episode_S, batch.num_sequences)
    rows_M, start_M = batch.rows_M, batch.cu_seqlens_S1[batch.sequence_M]
    assert bool(((rows_M >= start_M) & (rows_M + 1 < batch.cu_seqlens_S1[batch.sequence_M + 1])).all()), "a row left its sequence"
    assert torch.equal(batch.tokens_T[rows_M + 1], batch.targets_M), "targets are not the tokens after the rows"
