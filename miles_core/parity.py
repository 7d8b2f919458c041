"""The gate of parity: under the same weights sampler and trainer give every token the same log-prob bits, or the run stops (DESIGN 4.6).

    choose_kernels(config, device, dtype, mode)        # before anything computes
    gate = Gate(mode, on_update)                       # mode: strict | report | off
    gate.watch(logp_train_M, batch, version, route)    # each micro-batch -> metrics; remembers the first token that differs
    gate.check(version, model, config, gather)         # each step, collective over the training ranks: raises ParityError on all of them

The error names the token and both values. Then it runs the token's sequence through both paths again, op by op, and names the first op
whose output differs: the trainer's packed forward of the same micro-batch, against prefill and decode over a paged cache.

In a synchronous run the recorded routes of a mixture of experts are held to the same: the live router must choose the same experts.

Legend: M sampled rows, S sequences, T packed tokens, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from kernels import cpu
from kernels.attention import PAGE, allocate_cache
from kernels.dispatch import use_fast
from kernels.invariance import self_test
from kernels.logprob import rows
from miles_core.loss import fresh, parity_diff
from miles_core.metrics import Metric
from miles_core.model import hf, parallel
from miles_core.model.attend import PackedAttend, PagedAttend
from miles_core.model.moe import live
from miles_core.model.transformer import Attend, ModelConfig, Transformer
from miles_core.routing import Replay, TrainRoutes
from miles_core.schema import Batch, name_of

Trace = dict[str, list[torch.Tensor]]  # op, in order of execution -> its outputs, one for each call


class ParityError(RuntimeError):
    """Sampler and trainer disagree about a token."""


def choose_kernels(c: ModelConfig, device: torch.device, dtype: torch.dtype, parity: str) -> None:
    """Invariant ops, or fast ones with parity "off". See that the kernels take this model; a ValueError if not.

    And, with "strict", that no result depends on the batch on its shapes. The torch path of the CPU kernels is never used without.
    """
    use_fast(False)
    step, widest = (16, 256) if device.type == "cuda" else (8, 1 << 16)
    if c.head_dim % step or c.head_dim > widest:
        supported = f"supported: multiples of {step} up to {widest}"
        raise ValueError(f"attention: head size {c.head_dim} is not supported on {device.type}; {supported}")
    if parity == "strict" or (device.type == "cpu" and cpu.implementation() == "torch"):
        shapes = hf.expected_shapes(c).values()
        matrices, experts = ([shape for shape in shapes if len(shape) == ndim] for ndim in (2, 3))
        top_k = c.moe.top_k if c.moe is not None else 1
        self_test(matrices, c.head_dim, c.num_heads, c.num_kv_heads, c.vocab_size, device, dtype, experts, top_k)
    use_fast(parity == "off")


@dataclass(frozen=True)
class Difference:
    """One token that the two sides see differently: row `row` of `batch`."""

    batch: Batch
    row: int
    logp_train: float

    def __str__(self) -> str:
        sequence, position = self.place
        logp_roll = float(self.batch.logp_roll_M[self.row])
        return (
            f"{name_of(*self.batch.ids_S3[sequence].tolist())}, token {int(self.batch.targets_M[self.row])} at position {position}: "
            f"sampler {logp_roll!r}, trainer {self.logp_train!r}, {self.logp_train - logp_roll:+.3g}"
        )

    @property
    def place(self) -> tuple[int, int]:
        """(sequence in the batch, position of the token in the sequence)."""
        sequence = int(self.batch.sequence_M[self.row])
        return sequence, int(self.batch.rows_M[self.row]) + 1 - int(self.batch.cu_seqlens_S1[sequence])


class Gate:
    """Watches the log-probs of one training rank: "strict" stops the run, "report" only counts, "off" does not look."""

    def __init__(self, mode: str, on_update: str, *, synchronous: bool):
        self.mode, self.on_update, self.synchronous = mode, on_update, synchronous
        self.difference: Difference | None = None
        self.rerouted: str | None = None

    def watch(self, logp_train_M: torch.Tensor, batch: Batch, version: int, route: TrainRoutes) -> dict[str, Metric]:
        """`loss.parity_diff`. Remembers the first token sampled at `version` whose log-prob has other bits than the sampler's.

        In a synchronous run also the first that the live router sends to other experts than those recorded.
        """
        if self.mode == "off":
            return {}
        if self.mode == "strict" and self.synchronous and self.rerouted is None:
            self.rerouted = route.first_difference()
        logp_train_M = logp_train_M.detach()
        differs_M = fresh(batch, version, self.on_update) & (logp_train_M != batch.logp_roll_M)
        if self.difference is None and differs_M.any():
            row = int(differs_M.nonzero()[0])
            self.difference = Difference(batch, row, float(logp_train_M[row]))
        return parity_diff(logp_train_M, batch, version, self.on_update)

    def check(self, version: int, model: nn.Module, config: ModelConfig, gather: Callable[[object], list]) -> None:
        """Raise ParityError when any training rank has seen a difference: on all of them, with what the first of those has found.

        `gather` gives the value of every training rank. Whichever rank ends first, and takes the others with it, has said everything.
        """
        if self.mode != "strict" or not any(gather(self.difference is not None or self.rerouted is not None)):
            return
        weights = {name: tensor.clone() for name, tensor in parallel.full_tensors(model)}
        mine = None
        if self.difference is not None:
            mine = (
                f"step {version + 1}: sampler and trainer differ under the same weights (version {version}): {self.difference}. "
                f"{explain(self.difference, config, weights)}. --parity report logs such differences and goes on"
            )
        elif self.rerouted is not None:
            mine = (
                f"step {version + 1}: the live router chose other experts than in rollout, under the same weights (version {version}): "
                f"{self.rerouted}. --parity report logs such differences and goes on"
            )
        raise ParityError(next(text for text in gather(mine) if text is not None))


def explain(difference: Difference, config: ModelConfig, weights: dict[str, torch.Tensor]) -> str:
    """Run the sequence through both paths again and name the first op whose output differs."""
    first = next(iter(weights.values()))
    model = hf.build(config, first.device, first.dtype)
    model.load_state_dict(weights)
    trainer, sampler = _trainer_trace(model, difference), _sampler_trace(model, difference)
    for op, outputs in trainer.items():
        a_LX, b_LX = (torch.cat(x).flatten(1) for x in (outputs, sampler[op]))
        wrong_L = (a_LX != b_LX).any(1)
        if wrong_L.any():
            first = int(wrong_L.nonzero()[0])
            return f"The first op that differs is {op}, at position {first}, by {float((a_LX - b_LX)[first].abs().max()):.3g}"
    return "Run again, both paths agree in every op: look at what they were given (weights, cached keys, positions), not at the ops"


def _trainer_trace(model: Transformer, difference: Difference) -> Trace:
    """The packed forward of the whole micro-batch, cut to the sequence."""
    batch, (sequence, _) = difference.batch, difference.place
    begin, end = batch.cu_seqlens_S1[sequence : sequence + 2].tolist()
    with torch.enable_grad(), _recording(model) as (trace, record):
        attend = record(PackedAttend(batch.cu_seqlens_S1, model.config.head_dim**-0.5))
        sampling = (batch.temperature_M, batch.top_p_M, batch.top_k_M)
        route = live if batch.routes_TLK is None else Replay(batch.routes_TLK, batch.routed_T)
        logp_M, _ = model(batch.tokens_T, batch.positions_T, attend, batch.rows_M, batch.targets_M, sampling, route)
    mine_M = batch.sequence_M == sequence
    cut = {op: [output[begin:end] if len(output) == len(batch.tokens_T) else output[mine_M] for output in x] for op, x in trace.items()}
    return cut | {"head and log-prob": [logp_M.detach()[mine_M, None]]}


@torch.inference_mode()
def _sampler_trace(model: Transformer, difference: Difference) -> Trace:
    """Prefill of the prompt in one piece, then one token at a time, over pages and with packed weights."""
    batch, (sequence, _), c = difference.batch, difference.place, model.config
    begin, end = batch.cu_seqlens_S1[sequence : sequence + 2].tolist()
    mine_M = (batch.sequence_M == sequence).nonzero().flatten()
    sampled_M = (batch.rows_M[mine_M] - begin).tolist()  # positions whose output was sampled from
    tokens_L, num_pages = batch.tokens_T[begin:end], -(-(end - begin) // PAGE)
    model.pack_weights()
    cache = allocate_cache(c.num_layers, num_pages, c.num_kv_heads, c.head_dim, tokens_L.device, model.head.weight.dtype)
    table_1B = torch.arange(num_pages, dtype=torch.int32, device=tokens_L.device)[None]
    logp: list[torch.Tensor] = []
    cuts = [0, *range(sampled_M[0] + 1, end - begin + 1)]
    with _recording(model) as (trace, record):
        for start, stop in zip(cuts, cuts[1:], strict=False):
            positions = torch.arange(start, stop, device=tokens_L.device)
            lengths = (torch.tensor(x, dtype=torch.int32, device=tokens_L.device) for x in ([0, stop - start], [stop]))
            attend = record(PagedAttend(cache, table_1B, *lengths, positions, c.head_dim**-0.5))
            row = [sampled_M.index(stop - 1)] if stop - 1 in sampled_M else []
            last = torch.tensor([stop - 1 - start] * len(row), dtype=torch.int64, device=tokens_L.device)
            chunk = slice(begin + start, begin + stop)
            route = live if batch.routes_TLK is None else Replay(batch.routes_TLK[chunk], batch.routed_T[chunk])
            logits = model(tokens_L[start:stop], positions, attend, last, route=route)
            if row:
                here = mine_M[row]
                sampling = (x[here] for x in (batch.temperature_M, batch.top_p_M, batch.top_k_M))
                logp.append(rows(logits, *sampling, targets_M=batch.targets_M[here])[1][:, None])
    return trace | {"head and log-prob": logp}


@contextmanager
def _recording(model: Transformer) -> Iterator[tuple[Trace, Callable[[Attend], Attend]]]:
    """(what every op gives from now on, a function that makes an attend callable record too)."""
    trace: Trace = {}

    def keep(op: str, output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
        parts = {op: output}
        if isinstance(output, tuple):
            second = "choice of experts" if op.endswith("gate") else "x + residual"
            parts = {op: output[0], f"{op}: {second}": output[1]}
            if second == "x + residual":  # a norm, which comes after the sum
                parts = dict(reversed(parts.items()))
        for name, part in parts.items():
            trace.setdefault(name, []).append(part.detach().clone())

    def record(attend: Attend) -> Attend:
        def recorded(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            keep(f"layers.{layer}.rope of q", q_TNH), keep(f"layers.{layer}.rope of k", k_TKH)
            out_TNH = attend(layer, q_TNH, k_TKH, v_TKH)
            keep(f"layers.{layer}.attention", out_TNH)
            return out_TNH

        return recorded

    handles = []
    for name, module in model.named_modules():
        if name.endswith("down_proj"):
            op = name.replace("down_proj", "swiglu")
            handles.append(module.register_forward_pre_hook(lambda _, inputs, op=op: keep(op, inputs[0])))
        if not list(module.children()) and not isinstance(module, nn.Identity | nn.ModuleList):
            handles.append(module.register_forward_hook(lambda _, __, output, op=name: keep(op, output)))
    try:
        yield trace, record
    finally:
        for handle in handles:
            handle.remove()
