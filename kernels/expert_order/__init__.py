"""The slots of all tokens in the order of their experts, so that each expert's rows follow each other (grouped_linear, combine).

Integers, so exact: the same as a stable sort, by counting on a CPU and without atomics on a GPU.

Legend: T tokens, K slots, E experts, M = T * K rows.
"""

from __future__ import annotations

import torch

from kernels.cpu.loader import load
from kernels.dispatch import dense, on_triton
from kernels.expert_order import ref


def expert_order(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 [T, K] -> (order int64 [M], place int64 [T, K], offsets int32 [E + 1]).

    Sorted row m is slot order[m] = t * K + k, by expert and, within one, by slot; slot (t, k) is sorted row place[t, k]; the rows of
    expert e are [offsets[e], offsets[e + 1]). An id outside of 0 .. E - 1 is an AssertionError on a CPU; on a GPU, where nobody looks, such
    slots come after offsets[E].
    """
    assert ids_TK.ndim == 2 and ids_TK.dtype is torch.int64 and num_experts > 0, (ids_TK.shape, ids_TK.dtype, num_experts)
    if on_triton(ids_TK):
        from kernels.expert_order.triton import expert_order as triton_expert_order

        return triton_expert_order(dense(ids_TK), num_experts)
    lib = load()
    if lib is None:
        assert ids_TK.numel() == 0 or 0 <= ids_TK.min() <= ids_TK.max() < num_experts, (ids_TK.min(), ids_TK.max(), num_experts)
        return ref.expert_order(ids_TK, num_experts)
    ids = ids_TK.contiguous()
    num_rows = ids.numel()
    order_M, place_TK = ids.new_empty(num_rows), torch.empty_like(ids)
    offsets_E1 = torch.empty(num_experts + 1, dtype=torch.int32)
    bad = lib.expert_order(ids.data_ptr(), order_M.data_ptr(), place_TK.data_ptr(), offsets_E1.data_ptr(), num_rows, num_experts)
    assert bad < 0, f"expert_order: slot {bad} names expert {ids.view(-1)[bad]} of {num_experts}"
    return order_M, place_TK, offsets_E1
