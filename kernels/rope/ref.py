"""Rotary position embedding (Su et al., arXiv 2104.09864, eq. 34) in the "rotate half" layout of Hugging Face: the definition in torch."""

import torch


def rope(x_TNH: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor) -> torch.Tensor:
    """float32 [T, N, H], cos and sin [T, J = H / 2] -> [T, N, H]: dimension j turns with dimension j + H / 2."""
    first, second = x_TNH.chunk(2, dim=-1)
    cos, sin = cos_TJ[:, None], sin_TJ[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
