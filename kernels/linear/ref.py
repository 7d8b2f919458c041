"""y = x W^T + b: the definition in torch, row-invariant by always calling F.linear with the same number of rows.

Legend: M rows, K inputs, N outputs.
"""

import torch
import torch.nn.functional as F

ROWS = 16  # F.linear picks its algorithm by the shape: below 4 rows a thread it differs from the rest, so every call gets ROWS rows


def linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [M, K], [N, K], [N] -> [M, N]. The rows are padded with zeros to a multiple of ROWS and multiplied ROWS at a time."""
    num_rows = len(x_MK)
    if num_rows == 0:
        return x_MK.new_empty(0, len(weight_NK))
    padded = F.pad(x_MK, (0, 0, 0, -num_rows % ROWS))
    return torch.cat([F.linear(rows, weight_NK, bias_N) for rows in padded.split(ROWS)])[:num_rows]
