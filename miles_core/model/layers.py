"""The modules that layers are made of: weights, and one op of `kernels` each. Parameters are uninitialised until something fills them.

Legend: T tokens, D model, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from kernels.embedding import embedding
from kernels.linear import PackedWeight, linear, pack
from kernels.rmsnorm import rmsnorm, rmsnorm_residual
from kernels.swiglu import swiglu


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint and a weight update hold: every parameter, then every buffer (the correction biases of routers)."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class Matrix(nn.Module):
    """A weight [N, K] and, for decode, a copy of it in the order that the kernel reads (`pack`)."""

    def __init__(self, num_out: int, num_in: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.packed: PackedWeight | None = None

    def pack(self) -> None:
        """Renew the packed copy. Call it after each change of the weight."""
        self.packed = pack(self.weight, self.packed)

    def usable_pack(self) -> PackedWeight | None:
        """The packed copy, only where no gradient is wanted: a trainer's weights change under it."""
        return None if torch.is_grad_enabled() else self.packed


class Linear(Matrix):
    def __init__(self, num_in: int, num_out: int, bias: bool = False):
        super().__init__(num_out, num_in)
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.usable_pack())


class Embedding(Matrix):
    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        return embedding(ids_T, self.weight)


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(dim)), eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of x; with a residual, (the norm of x + residual, x + residual)."""
        if residual is None:
            return rmsnorm(x, self.weight, self.eps)
        return rmsnorm_residual(x, residual, self.weight, self.eps)


class MLP(nn.Module):
    def __init__(self, dim: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.gate_proj = Linear(dim, intermediate_size, bias)
        self.up_proj = Linear(dim, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, dim, bias)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_TD), self.up_proj(x_TD)))
