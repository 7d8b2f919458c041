"""The slots of all tokens in the order of their experts, on the GPU, without atomics: one program an expert.

A program reads all ids twice: it counts those of the experts before its own, which says where its rows begin, and then gives its own slots
their places in order. The program after the last expert takes what is no expert's id, so that order and place are always permutations.

Legend: T tokens, K slots, E experts, M = T * K rows, X lanes of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.tiles import Spec, arch_of, check, require, tile

SUPPORTED = "ids int64 [T, K], at least 1 expert"


@triton.jit
def _ids(ids_ptr, m_X, M, E):
    """E for what is no expert's id, and one more past the end."""
    id_X = tl.load(ids_ptr + m_X, mask=m_X < M, other=0)
    return tl.where(m_X < M, tl.where((id_X >= 0) & (id_X < E), id_X, E), E + 1)


@triton.jit(do_not_specialize=["M", "E"])
def _expert_order(ids_ptr, order_ptr, place_ptr, offsets_ptr, M, E, X: tl.constexpr):
    expert = tl.program_id(0)
    before_X = tl.zeros((X,), tl.int32)
    for start in range(0, M, X):
        before_X += (_ids(ids_ptr, start + tl.arange(0, X), M, E) < expert).to(tl.int32)
    before = tl.sum(before_X)
    tl.store(offsets_ptr + expert, before)
    for start in range(0, M, X):
        m_X = start + tl.arange(0, X)
        own_X = _ids(ids_ptr, m_X, M, E) == expert
        place_X = before + tl.cumsum(own_X.to(tl.int32), 0) - 1
        tl.store(order_ptr + place_X, m_X.to(tl.int64), mask=own_X)
        tl.store(place_ptr + m_X, place_X.to(tl.int64), mask=own_X)
        before += tl.sum(own_X.to(tl.int32))


@torch.library.custom_op("miles_spmd::expert_order", mutates_args=())
def expert_order(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 [T, K] -> order int64 [M], place int64 [T, K], offsets int32 [E + 1]. Slots whose id is no expert's come after offsets[E]."""
    order_M, place_TK, offsets_E1 = _outputs(ids_TK, num_experts)
    check("expert_order", ids_TK)
    t = tile("expert_order", torch.float32, 1, 1, arch_of(ids_TK))
    arguments = (ids_TK, order_M, place_TK, offsets_E1, ids_TK.numel(), num_experts)
    _expert_order[(num_experts + 1,)](*arguments, X=t.block_n, num_warps=t.warps, num_stages=t.stages)
    return order_M, place_TK, offsets_E1


@expert_order.register_fake
def _outputs(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    require("expert_order", ids_TK.ndim == 2 and ids_TK.dtype is torch.int64 and num_experts > 0, SUPPORTED, ids_TK)
    order_M, offsets_E1 = ids_TK.new_empty(ids_TK.numel()), ids_TK.new_empty(num_experts + 1, dtype=torch.int32)
    return order_M, torch.empty_like(ids_TK), offsets_E1


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """The one variant there is; it sees no floats."""
    t = tile("expert_order", torch.float32, 1, 1, arch)
    pointers = {"ids_ptr": "*i64", "order_ptr": "*i64", "place_ptr": "*i64", "offsets_ptr": "*i32"}
    signature = {**pointers, "M": "i32", "E": "i32", "X": "constexpr"}
    return [Spec("[T, K]", _expert_order, signature, {"X": t.block_n}, t.warps, t.stages, dtype)]
