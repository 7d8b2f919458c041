"""Rows in the order of their experts: the definition in torch."""

import torch


def expert_order(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 [T, K] -> order int64 [M], place int64 [T, K], offsets int32 [E + 1]."""
    ids_M = ids_TK.reshape(-1)
    order_M = ids_M.argsort(stable=True)
    place_M = torch.empty_like(order_M)
    place_M[order_M] = torch.arange(len(order_M), device=order_M.device)
    counts_E = torch.bincount(ids_M, minlength=num_experts)
    return order_M, place_M.view_as(ids_TK), torch.nn.functional.pad(counts_E.cumsum(0), (1, 0)).int()
