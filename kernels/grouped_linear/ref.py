"""A linear layer with a weight for each expert: the definition in torch, row-invariant as kernels/linear/ref.py is.

Legend: R rows of x, M rows in the order of their experts, D inputs, N outputs, E experts.
"""

import torch

from kernels.linear.ref import linear


def grouped_linear(
    x_RD: torch.Tensor, weight_END: torch.Tensor, offsets_E1: torch.Tensor, rows_M: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [R, D], [E, N, D], int32 [E + 1], int64 [M] or None -> [M, N]."""
    x_MD = x_RD if rows_M is None else x_RD[rows_M]
    counts = offsets_E1.diff().tolist()
    return torch.cat([linear(x, weight) for x, weight in zip(x_MD.split(counts), weight_END, strict=True)])
