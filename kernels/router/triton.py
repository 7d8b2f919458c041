"""The router of a mixture of experts on the GPU: all experts of a token in one program, chosen by integers that order as the choices do.

The meaning is `kernels/router/ref.py`. The k-th expert is the largest key that is left, and a key names its expert, so a choice needs one
maximum and there are no ties. A program has as many tokens as fit; each is summed over its own row of the block, in one order.

Legend: T tokens, E experts, K slots, G groups; capitals as suffixes are the block's share of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.logprob.triton import order_key
from kernels.tiles import Spec, Tile, arch_of, check, power_of_two, require, tile

ID_BITS = 12  # of an expert's id in its key
MAX_EXPERTS = 1 << ID_BITS
_OUT = tl.constexpr(-(2**62))  # below every key
_WIDTH = f"float32 [T, E], 1 <= E <= {MAX_EXPERTS}"
SUPPORTED = f"logits {_WIDTH}, bias float32 [E] or None"
SUPPORTED_WEIGH = f"logits {_WIDTH}, ids int64 [T, K], K at least 1"


@triton.jit
def _scores(logits_ptr, t, e, E: tl.constexpr, SIGMOID: tl.constexpr):
    """One row a token; 0 past the last expert."""
    z_TE = tl.load(logits_ptr + t.to(tl.int64)[:, None] * E + e[None, :], mask=(e < E)[None, :], other=-float("inf"))
    if SIGMOID:
        divisor_TE = 1.0 + tl.exp(-z_TE)
        score_TE = tl.math.div_rn(tl.full(divisor_TE.shape, 1.0, tl.float32), divisor_TE)
    else:
        e_TE = tl.where((e < E)[None, :], tl.exp(z_TE - tl.max(z_TE, 1)[:, None]), 0.0)
        score_TE = tl.math.div_rn(e_TE, tl.zeros_like(e_TE) + tl.sum(e_TE, 1)[:, None])
    return score_TE


@triton.jit
def _or_least(x):
    """What is not a number comes last."""
    return tl.where(x == x, x, -float("inf"))


@triton.jit
def _id_of(key, ID_BITS: tl.constexpr):
    return ((1 << ID_BITS) - 1) - (key & ((1 << ID_BITS) - 1))


@triton.jit
def _choice_of(key, ID_BITS: tl.constexpr):
    ordered = (key >> ID_BITS).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_groups(
    key_TE,
    e,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    """The keys of the experts in the best groups, _OUT for the others."""
    group, g = e // (E // GROUPS), tl.arange(0, BLOCK_G)
    worth_TG = tl.full([BLOCK_T, BLOCK_G], _OUT, tl.int64)
    for i in range(GROUPS):
        own_TE = tl.where((group == i)[None, :], key_TE, _OUT)
        best_T = tl.max(own_TE, 1)
        second_T = tl.max(tl.where(own_TE == best_T[:, None], _OUT, own_TE), 1)
        worth_T = _or_least(_choice_of(best_T, ID_BITS) + _choice_of(second_T, ID_BITS))
        worth_TG = tl.where((g == i)[None, :], order_key(worth_T, i, ID_BITS)[:, None], worth_TG)
    kept_TE = tl.full(key_TE.shape, _OUT, tl.int64)
    for _ in range(TOP_GROUPS):
        best_T = tl.max(worth_TG, 1)
        worth_TG = tl.where(worth_TG == best_T[:, None], _OUT, worth_TG)
        kept_TE = tl.where(group[None, :] == _id_of(best_T, ID_BITS)[:, None], key_TE, kept_TE)
    return kept_TE


@triton.jit(do_not_specialize=["T"])
def _select(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    t, e = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    choice_TE = _scores(logits_ptr, tl.minimum(t, T - 1), e, E, SIGMOID)  # tokens past the end read the last one, and are not stored
    if BIAS:
        choice_TE += tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :]
    key_TE = tl.where((e < E)[None, :], order_key(_or_least(choice_TE), e[None, :], ID_BITS), _OUT)
    if GROUPS > 1:
        key_TE = _best_groups(key_TE, e, E, GROUPS, TOP_GROUPS, BLOCK_T, BLOCK_G, ID_BITS)
    for k in range(K):
        best_T = tl.max(key_TE, 1)
        tl.store(ids_ptr + t.to(tl.int64) * K + k, _id_of(best_T, ID_BITS), mask=t < T)
        key_TE = tl.where(key_TE == best_T[:, None], _OUT, key_TE)


@triton.jit(do_not_specialize=["T", "scale"])
def _weigh(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    T,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t, e, slot = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    token = tl.minimum(t, T - 1).to(tl.int64)
    score_TE = _scores(logits_ptr, token, e, E, SIGMOID)
    weight_TK, total_T = tl.zeros((BLOCK_T, BLOCK_K), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    for k in range(K):
        id_T = tl.load(ids_ptr + token * K + k)
        score_T = tl.sum(tl.where(e[None, :] == id_T[:, None], score_TE, 0.0), 1)  # a copy: all other terms are 0
        score_T = tl.where((id_T >= 0) & (id_T < E), score_T, float("nan"))
        total_T += score_T
        weight_TK = tl.where((slot == k)[None, :], score_T[:, None], weight_TK)
    if NORMALISE:
        weight_TK = tl.math.div_rn(weight_TK, tl.zeros_like(weight_TK) + (total_T + 1e-20)[:, None])
    place_TK = weights_ptr + t.to(tl.int64)[:, None] * K + slot[None, :]
    tl.store(place_TK, weight_TK * scale, mask=(t < T)[:, None] & (slot < K)[None, :])


def _select_constants(num_experts: int, top_k: int, num_groups: int, top_groups: int, sigmoid: bool, bias: bool, t: Tile) -> dict[str, Any]:
    counts = {"E": num_experts, "K": top_k, "GROUPS": num_groups, "TOP_GROUPS": top_groups}
    blocks = {"BLOCK_T": t.block_m, "BLOCK_E": t.block_n, "BLOCK_G": power_of_two(num_groups)}
    return {**counts, "SIGMOID": sigmoid, "BIAS": bias, **blocks, "ID_BITS": ID_BITS}


def _weigh_constants(num_experts: int, top_k: int, sigmoid: bool, normalise: bool, t: Tile) -> dict[str, Any]:
    blocks = {"BLOCK_T": t.block_m, "BLOCK_E": t.block_n, "BLOCK_K": power_of_two(top_k)}
    return {"E": num_experts, "K": top_k, "SIGMOID": sigmoid, "NORMALISE": normalise, **blocks}


@torch.library.custom_op("miles_spmd::router_select", mutates_args=())
def select(
    logits_TE: torch.Tensor, top_k: int, sigmoid: bool, bias_E: torch.Tensor | None = None, num_groups: int = 1, top_groups: int = 1
) -> torch.Tensor:
    """float32 [T, E] -> int64 [T, top_k]; the sizes are those that `kernels.router.select` lets through."""
    ids_TK = _ids(logits_TE, top_k, sigmoid, bias_E, num_groups, top_groups)
    check("router.select", logits_TE, bias_E)
    num_tokens, num_experts = logits_TE.shape
    t = tile("router", logits_TE.dtype, 1, num_experts, arch_of(logits_TE))
    if num_tokens:
        constants = _select_constants(num_experts, top_k, num_groups, top_groups, sigmoid, bias_E is not None, t)
        bias = logits_TE if bias_E is None else bias_E  # any pointer of that type: it is not read
        grid = (triton.cdiv(num_tokens, t.block_m),)
        _select[grid](logits_TE, bias, ids_TK, num_tokens, **constants, num_warps=t.warps, num_stages=t.stages)
    return ids_TK


@select.register_fake
def _ids(
    logits_TE: torch.Tensor, top_k: int, sigmoid: bool, bias_E: torch.Tensor | None = None, num_groups: int = 1, top_groups: int = 1
) -> torch.Tensor:
    fits = _fits(logits_TE) and (bias_E is None or (bias_E.shape == logits_TE.shape[1:] and bias_E.dtype is torch.float32))
    require("router.select", fits and 0 < top_k <= logits_TE.shape[1], SUPPORTED, logits_TE, bias_E)
    return logits_TE.new_empty(logits_TE.shape[0], top_k, dtype=torch.int64)


@torch.library.custom_op("miles_spmd::router_weigh", mutates_args=())
def weigh(logits_TE: torch.Tensor, ids_TK: torch.Tensor, sigmoid: bool, normalise: bool, scale: float) -> torch.Tensor:
    """float32 [T, E], int64 [T, K] -> float32 [T, K]. An id outside of 0 .. E - 1 has the weight NaN."""
    weights_TK = _weights(logits_TE, ids_TK, sigmoid, normalise, scale)
    check("router.weigh", logits_TE, ids_TK)
    (num_tokens, num_experts), top_k = logits_TE.shape, ids_TK.shape[1]
    t = tile("router", logits_TE.dtype, 1, num_experts, arch_of(logits_TE))
    if num_tokens:
        constants = _weigh_constants(num_experts, top_k, sigmoid, normalise, t)
        grid = (triton.cdiv(num_tokens, t.block_m),)
        _weigh[grid](logits_TE, ids_TK, weights_TK, num_tokens, scale, **constants, num_warps=t.warps, num_stages=t.stages)
    return weights_TK


@weigh.register_fake
def _weights(logits_TE: torch.Tensor, ids_TK: torch.Tensor, sigmoid: bool, normalise: bool, scale: float) -> torch.Tensor:
    fits = _fits(logits_TE) and ids_TK.ndim == 2 and ids_TK.shape[0] == logits_TE.shape[0] and ids_TK.shape[1] > 0
    require("router.weigh", fits and ids_TK.dtype is torch.int64, SUPPORTED_WEIGH, logits_TE, ids_TK)
    return logits_TE.new_empty(ids_TK.shape)


def _fits(logits_TE: torch.Tensor) -> bool:
    return logits_TE.ndim == 2 and logits_TE.dtype is torch.float32 and 0 < logits_TE.shape[1] <= MAX_EXPERTS


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """Qwen3-MoE, DeepSeek-V3, and the widest row; logits are float32 whatever the model's dtype."""
    variants = []
    for num_experts, top_k, groups, sigmoid in ((128, 8, (1, 1), False), (256, 8, (8, 4), True), (MAX_EXPERTS, 8, (1, 1), False)):
        t = tile("router", torch.float32, 1, num_experts, arch)
        constants = _select_constants(num_experts, top_k, *groups, sigmoid, sigmoid, t)
        pointers = {"logits_ptr": "*fp32", "bias_ptr": "*fp32", "ids_ptr": "*i64"}
        signature = {**pointers, "T": "i32", **dict.fromkeys(constants, "constexpr")}
        label = f"[T, {num_experts}] top-{top_k}"
        grouped = f", {groups[1]} of {groups[0]} groups, bias" if sigmoid else ""
        variants.append(Spec(f"select {label}{grouped}", _select, signature, constants, t.warps, t.stages, dtype))
        constants = _weigh_constants(num_experts, top_k, sigmoid, True, t)
        pointers = {"logits_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32"}
        signature = {**pointers, "T": "i32", "scale": "fp32", **dict.fromkeys(constants, "constexpr")}
        variants.append(Spec(f"weigh {label}", _weigh, signature, constants, t.warps, t.stages, dtype))
    return variants
