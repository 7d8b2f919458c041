"""R3, routing replay: the experts that a token visited in rollout are those that it visits in training (Miles v0.1, arXiv 2609.08368).

    pages = RoutePages(num_pages, moe, device)            # engine: a row of ids for every token of the KV cache, beside its keys and values
    recorder = pages.recorder(slots_T, forced_T)          # one forward of the engine: the route of the model
    payload = encode(rows_RLK, recorded_T)                # a finished trajectory's rows as bytes; they travel by `route_transport.py`
    route = TrainRoutes(batch, moe, ...)                  # one micro-batch of the trainer: the route of the model, and what is measured

A row is the ids that one token visited, [L, K]: MoE layers, slots in order. It is decided once, by the forward that first computes the
token, and belongs to that token from then on: a prefix-cache hit brings it along, a sequence that is prefilled again (after a preemption,
or under newer weights) is routed by the rows it has. So what the trainer replays is what gave the sampled log-probs, and both stay equal
bits. Only the choice is replayed; weights come from the live scores, and the router gets its gradient.

Departs from the paper's system: rows in the smallest dtype that fits, of MoE layers only, kept on the rollout rank until they are fetched.

Legend: T tokens, R recorded tokens, L MoE layers, K slots, E experts, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.attention import PAGE
from miles_core.metrics import Max, Mean, Metric, Sum
from miles_core.model.moe import MoEConfig
from miles_core.schema import Batch, name_of


def id_dtype(num_experts: int) -> torch.dtype:
    """What an expert id is stored in: uint8, or the bits of a uint16 in an int16 (torch computes with no uint16)."""
    assert 1 <= num_experts <= 1 << 16, num_experts
    return torch.uint8 if num_experts <= 256 else torch.int16


def to_ids(rows: torch.Tensor) -> torch.Tensor:
    """Stored rows of any shape -> int64 ids."""
    return rows.long() & 0xFFFF


def row_nbytes(moe: MoEConfig) -> int:
    """Bytes of one token's row."""
    return len(moe.layers) * moe.top_k * id_dtype(moe.num_experts).itemsize


def encode(rows_RLK: torch.Tensor, recorded_T: np.ndarray) -> torch.Tensor:
    """Rows and which tokens (bool [T]) they belong to -> uint8 [bytes] on the device of the rows: one bit a token, then the rows."""
    assert len(rows_RLK) == np.count_nonzero(recorded_T), (rows_RLK.shape, np.count_nonzero(recorded_T))
    bits = torch.from_numpy(np.packbits(recorded_T)).to(rows_RLK.device)
    return torch.cat([bits, rows_RLK.contiguous().flatten().view(torch.uint8)])


def decode(payload: torch.Tensor, num_tokens: int, moe: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of `encode` -> (rows [T, L, K] in the stored dtype, 0 where there is none; recorded bool [T]).

    Raises ValueError for bytes that are not the rows of so many tokens of this model.
    """
    bits = -(-num_tokens // 8)
    recorded_T = np.unpackbits(payload[:bits].cpu().numpy(), count=num_tokens).astype(bool) if len(payload) >= bits else np.zeros(0, bool)
    expected = bits + int(recorded_T.sum()) * row_nbytes(moe)
    if len(payload) != expected or len(recorded_T) != num_tokens:
        count = int(recorded_T.sum())
        raise ValueError(f"{len(payload)} bytes of routes for {num_tokens} tokens, {count} of them recorded: not {expected}")
    dtype = id_dtype(moe.num_experts)
    rows_RLK = payload[bits:].clone().view(dtype).view(-1, len(moe.layers), moe.top_k)
    if len(rows_RLK) and (largest := int(to_ids(rows_RLK).max())) >= moe.num_experts:
        raise ValueError(f"routes name expert {largest} of {moe.num_experts}")
    recorded = torch.from_numpy(recorded_T).to(payload.device)
    rows_TLK = rows_RLK.new_zeros(num_tokens, *rows_RLK.shape[1:])
    rows_TLK[recorded] = rows_RLK
    return rows_TLK, recorded


# ---- rollout


class RoutePages:
    """The rows of every token in the KV cache, on its device: [slots, L, K], slot = page * PAGE + offset.

    What a forward has routed is noted at once and written together with that of later ones, before anything is read or copied: a write for
    each step would cost a small model several per cent of its speed.
    """

    MAX_PENDING = 64  # forwards

    def __init__(self, num_pages: int, moe: MoEConfig, device: torch.device):
        self.rows_PLK = torch.zeros(num_pages * PAGE, len(moe.layers), moe.top_k, dtype=id_dtype(moe.num_experts), device=device)
        self.pending: list[Recorder] = []

    def recorder(self, slots_T: torch.Tensor, forced_T: torch.Tensor | None) -> Recorder:
        """The route of the next forward, of tokens with these slots. Those of `forced_T` keep the rows that they have."""
        if forced_T is not None or len(self.pending) == self.MAX_PENDING:
            self.flush()
        self.pending.append(Recorder(slots_T, None if forced_T is None else Replay(self.rows_PLK[slots_T], forced_T)))
        return self.pending[-1]

    def flush(self) -> None:
        """Write what is noted. Whoever gives a page back has read its rows, or flushes: no slot is noted for two owners."""
        if self.pending:
            slots_T = torch.cat([recorder.slots_T for recorder in self.pending])
            layers = zip(*(recorder.seen for recorder in self.pending), strict=True)
            rows_TLK = torch.stack([torch.cat(ids) for ids in layers], 1)
            self.rows_PLK[slots_T] = rows_TLK.to(self.rows_PLK.dtype)
            self.pending = []

    def read(self, slots_R: torch.Tensor) -> torch.Tensor:
        """Rows [R, L, K] of these slots."""
        self.flush()
        return self.rows_PLK[slots_R]

    def write(self, slots_R: torch.Tensor, rows_RLK: torch.Tensor) -> None:
        self.flush()
        self.rows_PLK[slots_R] = rows_RLK

    def copy(self, source: int, targets: Sequence[int], count: int) -> None:
        """The first `count` tokens of a page to other pages."""
        self.flush()
        pages = self.rows_PLK.view(-1, PAGE, *self.rows_PLK.shape[1:])
        pages[targets, :count] = pages[source, None, :count]


@dataclass
class Recorder:
    """The route of one forward of the engine. `forced`: rows that some of its tokens have already."""

    slots_T: torch.Tensor
    forced: Replay | None
    seen: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, layer: int, logits_TE: torch.Tensor, live_TK: torch.Tensor) -> torch.Tensor:
        assert layer == len(self.seen), (layer, len(self.seen))
        ids_TK = live_TK if self.forced is None else self.forced(layer, logits_TE, live_TK)
        self.seen.append(ids_TK)
        return ids_TK


# ---- training


@dataclass(frozen=True)
class Replay:
    """Rows [T, L, K] decide where `recorded_T` says so, the live router elsewhere."""

    rows_TLK: torch.Tensor
    recorded_T: torch.Tensor

    def __call__(self, layer: int, logits_TE: torch.Tensor, live_TK: torch.Tensor) -> torch.Tensor:
        assert len(live_TK) == len(self.rows_TLK), (live_TK.shape, self.rows_TLK.shape)
        return torch.where(self.recorded_T[:, None], to_ids(self.rows_TLK[:, layer]), live_TK)


@dataclass(frozen=True)
class BalanceParams:
    """Each coefficient is the command-line flag of the same name, and 0 is off; the totals are counted over the whole step."""

    router_balance_coef: float = 0.0
    router_z_coef: float = 0.0
    num_sequences: float = 1.0
    num_tokens: float = 1.0


class TrainRoutes:
    """The route of one micro-batch: replays its rows (or only compares them), counts, and adds up the router's auxiliary losses.

    `passes` of each layer are expected in one forward and backward (2 with activation checkpointing, where the second one recomputes);
    `check` asserts that every row was used once in each.
    """

    def __init__(self, batch: Batch, moe: MoEConfig | None, *, replay: bool, passes: int, balance: BalanceParams):
        self.moe, self.batch, self.passes, self.balance = moe, batch, passes, balance
        self.replay = Replay(batch.routes_TLK, batch.routed_T) if batch.routes_TLK is not None else None
        self.replays = replay and self.replay is not None
        self.num_layers = 0 if moe is None else len(moe.layers)
        self.calls = [0] * self.num_layers
        lengths_S = batch.cu_seqlens_S1.diff().long()
        self.real_S = batch.ids_S3[:, 0] >= 0  # a dummy sequence counts nowhere
        numbers_S = torch.arange(len(lengths_S), device=lengths_S.device)
        self.sequence_T = torch.repeat_interleave(numbers_S, lengths_S, output_size=batch.num_tokens)
        self.real_T = self.real_S[self.sequence_T]
        self.lengths_S = lengths_S
        self.load_LE: list[torch.Tensor] = []
        self.differs_LT: list[torch.Tensor] = []
        self.loss = torch.zeros((), device=batch.tokens_T.device)

    def __call__(self, layer: int, logits_TE: torch.Tensor, live_TK: torch.Tensor) -> torch.Tensor:
        ids_TK = self.replay(layer, logits_TE, live_TK) if self.replays else live_TK
        auxiliary = self._auxiliary(logits_TE, ids_TK)  # also when recomputed: the backward must find what the forward saved
        self.calls[layer] += 1
        if self.calls[layer] > 1:  # everything is counted already
            return ids_TK
        if self.replay is not None:
            recorded_TK = to_ids(self.replay.rows_TLK[:, layer])
            self.differs_LT.append((recorded_TK.sort(1).values != live_TK.sort(1).values).any(1) & self.replay.recorded_T)
        experts_E = torch.arange(self.moe.num_experts, device=ids_TK.device)
        self.load_LE.append((ids_TK[self.real_T].flatten()[:, None] == experts_E).sum(0))
        self.loss = self.loss + auxiliary
        return ids_TK

    def _auxiliary(self, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """This layer's share of the step's auxiliary losses."""
        loss, b = logits_TE.new_zeros(()), self.balance
        if b.router_balance_coef:
            loss = loss + b.router_balance_coef / b.num_sequences * self._sequence_balance(logits_TE, ids_TK)
        if b.router_z_coef:
            z_T = logits_TE.logsumexp(-1).square()
            loss = loss + b.router_z_coef / b.num_tokens * z_T[self.real_T].sum()
        return loss

    def _sequence_balance(self, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Sum over sequences of sum_e f_e P_e, f the load of an expert (1 when even), P its mean share of the scores.

        Per sequence, so that it does not depend on how a step is packed: DeepSeek-V3, arXiv 2412.19437, section 2.1.2, eqs. 17 to 20.
        """
        scores_TE = logits_TE.softmax(-1) if self.moe.scoring == "softmax" else logits_TE.sigmoid()
        share_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        chosen_TE = torch.zeros_like(share_TE).scatter(1, ids_TK, 1.0)
        one_hot_ST = (self.sequence_T == torch.arange(len(self.lengths_S), device=ids_TK.device)[:, None]).float()
        load_SE, mean_SE = (one_hot_ST @ x / self.lengths_S[:, None] for x in (chosen_TE, share_TE))
        return ((load_SE * mean_SE).sum(1) * self.moe.num_experts / self.moe.top_k)[self.real_S].sum()

    def check(self) -> None:
        """After the backward: every layer was routed as often as it ran."""
        assert self.calls == [self.passes] * self.num_layers, f"routes were used {self.calls} times, not {self.passes} in every MoE layer"

    def first_difference(self) -> str | None:
        """The first token whose live choice is another set of experts than the recorded one, in words."""
        differs_TL = torch.stack(self.differs_LT, 1) if self.differs_LT else None
        if differs_TL is None or not bool(differs_TL.any()):
            return None
        token, layer = differs_TL.nonzero()[0].tolist()
        sequence = int(self.sequence_T[token])
        name, position = name_of(*self.batch.ids_S3[sequence].tolist()), token - int(self.batch.cu_seqlens_S1[sequence])
        recorded = to_ids(self.replay.rows_TLK[token, layer]).tolist()
        return f"{name}, position {position}, layer {self.moe.layers[layer]}: recorded experts {recorded}"

    def metrics(self) -> dict[str, Metric]:
        """`train/route_diff_frac`, over all and by layer, and the auxiliary loss. Nothing for a dense model."""
        metrics: dict[str, Metric] = {}
        if self.replay is not None:
            recorded = int(self.replay.recorded_T.sum())
            counts = torch.stack(self.differs_LT).sum(1).tolist()
            metrics["train/route_diff_frac"] = Mean(sum(counts), recorded * len(counts))
            for layer, count in zip(self.moe.layers, counts, strict=True):
                metrics[f"train/route_diff_frac/layer_{layer}"] = Mean(count, recorded)
        if self.balance.router_balance_coef or self.balance.router_z_coef:
            metrics["train/router_loss"] = Sum(self.loss.detach())
        return metrics


def load(routes: Sequence[TrainRoutes]) -> torch.Tensor:
    """Tokens that each expert of each MoE layer got in these micro-batches: float64 [L, E] on the CPU."""
    return sum(torch.stack(r.load_LE).double().cpu() for r in routes)


def load_metrics(load_LE: torch.Tensor, moe: MoEConfig) -> dict[str, Metric]:
    """How evenly the experts are used: entropy of the load over log E (1 = even, 0 = one expert), and largest over mean load."""
    share_LE = load_LE / load_LE.sum(1, keepdim=True).clamp(min=1)
    entropy_L = -(share_LE * share_LE.clamp(min=1e-30).log()).sum(1) / max(np.log(moe.num_experts), 1e-9)
    peak_L = share_LE.amax(1) * moe.num_experts
    metrics: dict[str, Metric] = {"train/expert_entropy": Mean(float(entropy_L.sum()), len(entropy_L))}
    metrics["train/expert_peak"] = Max(float(peak_L.max()))
    for layer, entropy, peak in zip(moe.layers, entropy_L.tolist(), peak_L.tolist(), strict=True):
        metrics |= {f"train/expert_entropy/layer_{layer}": Mean(entropy, 1), f"train/expert_peak/layer_{layer}": Max(peak)}
    return metrics
