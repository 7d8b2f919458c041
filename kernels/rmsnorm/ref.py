"""Root mean square norm (Zhang and Sennrich, arXiv 1910.07467, eq. 4): the definition in torch."""

import torch


def rmsnorm(x_MD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [M, D], [D] -> [M, D]: x / sqrt(mean(x^2) + eps) * weight."""
    return x_MD * (1.0 / torch.sqrt(x_MD.square().mean(-1, keepdim=True) + eps)) * weight_D


def rmsnorm_residual(
    x_MD: torch.Tensor, residual_MD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [M, D], [M, D], [D] -> (the norm of x + residual, x + residual), both [M, D]."""
    sum_MD = x_MD + residual_MD
    return rmsnorm(sum_MD, weight_D, eps), sum_MD
