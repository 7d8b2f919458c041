"""The gate stops at the first bit of difference and names the op. Mutants: ops that are not batch-invariant, each of which must be caught.

The real engine samples, the real packing and the trainer's forward score, the gate compares.

    python -m pytest tests/parity/test_gate.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.attention import PAGE, write_kv
from miles_core import pack
from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.model import hf, layers, moe, transformer
from miles_core.model.attend import PackedAttend, PagedAttend
from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import ModelConfig, Transformer
from miles_core.parity import Gate, ParityError
from miles_core.route_transport import Fetch, RouteStore
from miles_core.routing import BalanceParams, TrainRoutes
from miles_core.schema import Trajectory

DENSE = ModelConfig(
    family="qwen3", vocab_size=307, hidden_size=208, intermediate_size=396, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=24,
    rms_norm_eps=1e-6, rope_theta=1e4, max_position=512, tie_embeddings=True, qk_norm=True,
)  # fmt: skip

MIXTURE = replace(DENSE, family="qwen3_moe", moe=MoEConfig(num_experts=6, top_k=3, expert_size=132, layers=(0, 1)))


def made(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    made = hf.build(config)
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.fill_(1.0) if "norm" in name else p.normal_(0, 0.08)
    made.stays_gathered = False  # what `parallel.shard` says of a model: here nothing is sharded
    return made


@pytest.fixture(scope="module")
def model() -> Transformer:
    return made(DENSE)


@pytest.fixture(scope="module")
def mixture() -> Transformer:
    return made(MIXTURE)


def sampled(model: Transformer, store: RouteStore | None = None) -> list[Trajectory]:
    """Answers of five groups of two, in company, with chunked prefill; some longer than a page. Their routes go to the store."""
    rng = np.random.default_rng(1)
    replay = "off" if store is None else "on"
    engine = Engine(model, None, seed=3, num_pages=60, max_batch_tokens=40, max_sequences=7, routing_replay=replay)
    ways = [SamplingParams(1.0, 1.0, 0, 70, ()), SamplingParams(0.8, 0.9, 0, 9, ())]
    prompts = [rng.integers(0, 307, length).astype(np.int32) for length in (3, 30, 61, 64, 90)]
    requests = [Request(g, sample, prompt, ways[g % 2]) for g, prompt in enumerate(prompts) for sample in range(2)]
    completions = engine.generate(requests)
    for completion in completions if store is not None else ():
        store.keep(completion.trajectory, completion.routes)
    return [completion.trajectory for completion in completions]


def watched(
    model: Transformer, trajectories: list[Trajectory], mode: str = "strict", version: int = 0, store: RouteStore | None = None,
    *, replay: bool = True,
) -> tuple[Gate, list[dict]]:  # fmt: skip
    """The gate after the trainer's forwards, and what it counted."""
    gate, seen, moe = Gate(mode, "recompute", synchronous=True), [], model.config.moe
    fetch = Fetch([] if store is None else trajectories, store, None, moe, torch.device("cpu"), 1.0)
    for batch in map(fetch.attach, pack.pack(trajectories, 400)):
        sampling = (batch.temperature_M, batch.top_p_M, batch.top_k_M)
        attend = PackedAttend(batch.cu_seqlens_S1, model.config.head_dim**-0.5)
        route = TrainRoutes(batch, moe, replay=replay, passes=1, balance=BalanceParams())
        logp_M, _ = model(batch.tokens_T, batch.positions_T, attend, batch.rows_M, batch.targets_M, sampling, route)
        route.check()
        seen.append(gate.watch(logp_M, batch, version, route) | route.metrics())
    return gate, seen


def counted(seen: list[dict]) -> tuple[int, float]:
    """(tokens compared, their largest difference)."""
    tokens = sum(metrics["train/logp_diff_tokens"].value() for metrics in seen)
    return tokens, max(float(metrics["train/logp_diff_max"].value()) for metrics in seen)


def message(gate: Gate, model: Transformer, version: int = 0) -> str:
    with pytest.raises(ParityError) as error:
        gate.check(version, model, model.config, lambda mine: [mine])
    return str(error.value)


def test_without_a_fault_every_token_passes(model: Transformer) -> None:
    trajectories = sampled(model)
    gate, seen = watched(model, trajectories)
    assert counted(seen) == (sum(int(t.loss_mask.sum()) for t in trajectories), 0.0)
    gate.check(0, model, DENSE, lambda mine: [mine])


def flipped(trajectories: list[Trajectory]) -> Trajectory:
    """One trajectory, whose fifth log-prob is off by one unit in the last place."""
    wrong = next(t for t in trajectories if t.group == 2 and t.sample == 1)
    at = int(np.flatnonzero(wrong.loss_mask)[4])
    wrong.logp_roll[at] = np.nextafter(wrong.logp_roll[at], np.float32(0))
    return wrong


def test_one_bit_of_one_token_is_named(model: Transformer) -> None:
    trajectories = sampled(model)
    wrong = flipped(trajectories)
    at = int(wrong.turns[0]) + 4
    gate, _ = watched(model, trajectories)
    text = message(gate, model)
    assert text.startswith("step 1: sampler and trainer differ under the same weights (version 0): ")
    assert f"group 2 sample 1, token {wrong.tokens[at]} at position {at}: sampler {float(wrong.logp_roll[at])!r}, trainer " in text
    assert "both paths agree in every op" in text, "the ops are sound, the record is not"


def test_nan_is_a_difference(model: Transformer) -> None:
    trajectories = sampled(model)
    trajectories[0].logp_roll[-1] = np.nan
    gate, _ = watched(model, trajectories)
    assert "sampler nan" in message(gate, model)


def test_another_rank_that_differs_stops_this_one_too(model: Transformer) -> None:
    gate, _ = watched(model, sampled(model))
    with pytest.raises(ParityError, match="^what the other one found$"):
        gate.check(7, model, DENSE, lambda mine: [mine, True if mine is False else "what the other one found"])


def test_tokens_of_other_weights_are_not_compared(model: Transformer) -> None:
    trajectories = sampled(model)
    flipped(trajectories)
    gate, seen = watched(model, trajectories, version=1)
    assert sum(metrics["train/logp_diff_tokens"].value() for metrics in seen) == 0
    gate.check(1, model, DENSE, lambda mine: [mine])


def test_report_counts_and_off_does_not_look(model: Transformer) -> None:
    trajectories = sampled(model)
    flipped(trajectories)
    gate, seen = watched(model, trajectories, "report")
    assert 0.0 < counted(seen)[1] < 1e-5
    gate.check(0, model, DENSE, lambda mine: [mine])
    gate, seen = watched(model, trajectories, "off")
    assert not any(seen) and gate.difference is None


# ---- mutants: ops as other systems have them


def torch_linear(patch: pytest.MonkeyPatch) -> None:
    for module in (layers, transformer):
        patch.setattr(module, "linear", lambda x, weight, bias=None, packed=None, wide=False: F.linear(x, weight, bias))


def torch_silu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layers, "swiglu", lambda gate, up: F.silu(gate) * up)


def paged_by(attend_one: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A PagedAttend.__call__ that gathers the keys of each sequence and attends with `attend_one(q, k, v, scale)`."""

    def call(self: PagedAttend, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        write_kv(k_TKH, v_TKH, self.cache.k[layer], self.cache.v[layer], self.slots_T)
        out, starts = [], self.cu_seqlens_q_S1.tolist()
        for s, context in enumerate(self.context_lens_S.tolist()):
            pages = self.block_table_SB[s, : -(-context // PAGE)].long()
            k = self.cache.k[layer, pages].permute(0, 3, 1, 2).flatten(0, 1)[:context]
            v = self.cache.v[layer, pages].transpose(1, 2).flatten(0, 1)[:context]
            out.append(attend_one(q_TNH[starts[s] : starts[s + 1]], k, v, self.scale))
        return torch.cat(out)

    return call


def packed_by(attend_one: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(self: PackedAttend, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        lengths = self.cu_seqlens_S1.diff().tolist()
        return torch.cat(
            [attend_one(q, k, v, self.scale) for q, k, v in zip(*(x.split(lengths) for x in (q_TNH, k_TKH, v_TKH)), strict=True)]
        )

    return call


def sdpa_one(q_QNH: torch.Tensor, k_JKH: torch.Tensor, v_JKH: torch.Tensor, scale: float) -> torch.Tensor:
    visible = torch.ones(len(q_QNH), len(k_JKH), dtype=torch.bool).tril(len(k_JKH) - len(q_QNH))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_QNH, k_JKH, v_JKH))
    return F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def unaligned_one(q_QNH: torch.Tensor, k_JKH: torch.Tensor, v_JKH: torch.Tensor, scale: float) -> torch.Tensor:
    """Sound but for one thing: the blocks of the online softmax are counted back from the end of the chunk, not from position 0."""
    num_queries, num_keys, group = len(q_QNH), len(k_JKH), q_QNH.shape[1] // k_JKH.shape[1]
    k_JNH, v_JNH = (x.repeat_interleave(group, 1) for x in (k_JKH, v_JKH))
    position_Q1 = torch.arange(num_keys - num_queries, num_keys)[:, None]
    out = []
    for q_1NH, position in zip(q_QNH.split(1), position_Q1.flatten().tolist(), strict=True):
        top, total, value = torch.full((q_1NH.shape[1], 1), -torch.inf), 0.0, 0.0
        for stop in range((num_keys - 1) % PAGE + 1, num_keys + PAGE, PAGE):
            keys = slice(max(0, stop - PAGE), min(stop, position + 1))
            if keys.start >= keys.stop:
                continue
            score_NJ = (k_JNH[keys] * q_1NH * scale).sum(-1).T
            new = torch.maximum(top, score_NJ.amax(1, keepdim=True))
            weight_NJ, alpha = (score_NJ - new).exp(), (top - new).exp()
            total = total * alpha + weight_NJ.sum(1, keepdim=True)
            value = value * alpha + (weight_NJ.T[..., None] * v_JNH[keys]).sum(0)
            top = new
        out.append(value / total)
    return torch.stack(out)


def shared_top_one(q_QNH: torch.Tensor, k_JKH: torch.Tensor, v_JKH: torch.Tensor, scale: float) -> torch.Tensor:
    """Sound but for one thing: every query subtracts the largest score of the whole chunk, not its own."""
    group, first = q_QNH.shape[1] // k_JKH.shape[1], len(k_JKH) - len(q_QNH)
    k_JNH, v_JNH = (x.repeat_interleave(group, 1) for x in (k_JKH, v_JKH))
    scores = [(k_JNH[: first + i + 1] * q_NH * scale).sum(-1).T for i, q_NH in enumerate(q_QNH)]
    top = max(float(score_NJ.detach().max()) for score_NJ in scores)
    weights = [(score_NJ - top).exp() for score_NJ in scores]
    return torch.stack([(w_NJ.T[..., None] * v_JNH[: w_NJ.shape[1]]).sum(0) / w_NJ.sum(1, keepdim=True) for w_NJ in weights])


def sdpa(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedAttend, "__call__", paged_by(sdpa_one))
    patch.setattr(PackedAttend, "__call__", packed_by(sdpa_one))


def unaligned_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedAttend, "__call__", paged_by(unaligned_one))
    patch.setattr(PackedAttend, "__call__", packed_by(unaligned_one))


def softmax_of_the_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedAttend, "__call__", paged_by(shared_top_one))
    patch.setattr(PackedAttend, "__call__", packed_by(shared_top_one))


def norm_of_the_batch(patch: pytest.MonkeyPatch) -> None:
    """Every norm is multiplied by the largest value of the whole batch and divided by it again: exact in real numbers only."""
    norm = layers.rmsnorm

    def shifted(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        largest = x.detach().abs().max() if x.numel() else 1.0
        return norm(x, weight, eps) * largest / largest

    patch.setattr(layers, "rmsnorm", shifted)


def residual_of_the_batch(patch: pytest.MonkeyPatch) -> None:
    """The sum before a norm is rounded to the magnitude of the whole batch."""
    norm_residual = layers.rmsnorm_residual

    def shifted(x: torch.Tensor, residual: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
        largest = residual.detach().abs().max() if x.numel() else 0.0
        return norm_residual(x, residual + largest - largest, *rest)

    patch.setattr(layers, "rmsnorm_residual", shifted)


MUTANTS = {
    torch_linear: ("proj", "head"), torch_silu: ("swiglu",), sdpa: ("attention",), unaligned_blocks: ("attention",),
    softmax_of_the_batch: ("attention",), norm_of_the_batch: ("norm",), residual_of_the_batch: ("x + residual",),
}  # fmt: skip


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_is_caught_and_its_op_named(mutate: Callable, model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    gate, seen = watched(model, sampled(model))
    assert counted(seen)[1] > 0.0
    text = message(gate, model)
    assert "The first op that differs is " in text, text
    op = text.split("The first op that differs is ")[1].split(",")[0]
    assert any(word in op for word in MUTANTS[mutate]), text


# ---- mixtures of experts


@pytest.mark.parametrize("replay", [True, False], ids=["replayed", "live"])
def test_a_mixture_passes_and_its_live_routes_are_those_recorded(mixture: Transformer, replay: bool) -> None:
    store = RouteStore(0, None)
    trajectories = sampled(mixture, store)
    gate, seen = watched(mixture, trajectories, store=store, replay=replay)
    assert counted(seen) == (sum(int(t.loss_mask.sum()) for t in trajectories), 0.0)
    compared = [metrics["train/route_diff_frac"] for metrics in seen]
    assert sum(m.total for m in compared) == 0, "the router decided the same twice"
    assert sum(m.count for m in compared) == 2 * sum(len(t.tokens) - 1 for t in trajectories), "every token but the last, in both layers"
    gate.check(0, mixture, MIXTURE, lambda mine: [mine])
    assert not store.rows, "every row was taken"


def grouped_by_torch(patch: pytest.MonkeyPatch) -> None:
    def grouped(x, weight_END, offsets_E1, rows_M=None, packed=None):  # noqa: ANN001, ANN202  the signature of the op
        x_MD = x if rows_M is None else x[rows_M]
        return torch.cat([F.linear(part, w) for part, w in zip(x_MD.split(offsets_E1.diff().tolist()), weight_END, strict=True)])

    patch.setattr(moe, "grouped_linear", grouped)


def combined_by_expert(patch: pytest.MonkeyPatch) -> None:
    """The outputs of a token are added in the order of the whole batch's largest expert first, not of its own slots."""

    def combine(y_MD: torch.Tensor, weights_TK: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
        slot = int(place_TK.float().mean(0).argmax()) if len(place_TK) else 0
        terms_TKD = y_MD[place_TK] * weights_TK[..., None]
        return sum(terms_TKD.roll(slot, 1).unbind(1))

    patch.setattr(moe, "combine", combine)


def router_by_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moe, "linear", lambda x, weight, bias=None, packed=None, wide=False: F.linear(x, weight, bias))


MOE_MUTANTS = {grouped_by_torch: ("experts",), combined_by_expert: ("experts",), router_by_torch: ("gate",)}


@pytest.mark.parametrize("mutate", MOE_MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_of_a_mixture_is_caught(mutate: Callable, mixture: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    store = RouteStore(0, None)
    gate, seen = watched(mixture, sampled(mixture, store), store=store)
    assert counted(seen)[1] > 0.0
    text = message(gate, mixture)
    op = text.split("The first op that differs is ")[1].split(",")[0]
    assert any(word in op for word in MOE_MUTANTS[mutate]), text


def test_rows_shifted_by_one_token_stop_a_synchronous_run(mixture: Transformer) -> None:
    """Twice over: the log-probs differ, and so does the live router."""
    store = RouteStore(0, None)
    trajectories = sampled(mixture, store)
    shifted = next(t for t in trajectories if t.group == 3 and t.sample == 0)
    payload = store.rows[shifted.key]
    bits, row = -(-len(shifted.tokens) // 8), 2 * 3
    store.keep(shifted, torch.cat([payload[:bits], payload[bits:].roll(row)]))
    gate, _ = watched(mixture, trajectories, store=store)
    assert gate.difference is not None, "the log-probs differ"
    assert gate.rerouted is not None and "group 3 sample 0, position " in gate.rerouted
    assert "sampler and trainer differ" in message(gate, mixture)
    gate.difference = None
    assert message(gate, mixture).startswith("step 1: the live router chose other experts than in rollout, under the same weights (version")
