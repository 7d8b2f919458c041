"""The weighted sum of a token's experts: the definition in torch.

Legend: T tokens, K slots, M = T * K rows in the order of their experts, N columns.
"""

import torch


def combine(y_MN: torch.Tensor, weights_TK: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
    """float32 [M, N], [T, K], int64 [T, K] -> [T, N]: the sum over the slots in their order, each product fused with the addition."""
    rows = [y_MN[place_T] for place_T in place_TK.unbind(1)]
    weights = [weight_T1.double() for weight_T1 in weights_TK.split(1, 1)]
    out_TN = (rows[0] * weights[0]).float()
    for row_TN, weight_T1 in zip(rows[1:], weights[1:], strict=True):
        out_TN = (row_TN * weight_T1 + out_TN).float()
    return out_TN
