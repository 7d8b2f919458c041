"""Row lookup. A copy, so torch's own is exact and invariant; it is here so that every op of the model has one door."""

from __future__ import annotations

import torch

from kernels.embedding import ref


def embedding(ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """int64 [...], float32 [V, D] -> [..., D]; differentiable in the weight."""
    return ref.embedding(ids_T, weight_VD)
