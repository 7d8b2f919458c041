"""AdamW, global gradient clipping and the learning-rate schedule: one rank and N ranks on one path.

    optimizer = Optimizer(model, lr=..., ...)
    grad_norm = optimizer.step(version)          # after backward of every micro-batch; version = optimizer steps taken before

Parameters are plain tensors or FSDP2 DTensors, whose gradients must be *sums* over ranks (the loss already divided by a global
count). The schedule is a function of `version`, so resuming needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_
_BLOCK = 1 << 16  # values; 512 KiB of float64


def learning_rate(version: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of the step that turns `version` into `version + 1`.

    Linear warm-up reaches `peak` at step number `warmup_steps`. After it: "constant"; or "linear" / "cosine" decay, which would reach 0 at
    step `total_steps + 1`, so that the last step still learns.
    """
    if version < warmup_steps:
        return peak * (version + 1) / warmup_steps
    done = min(1.0, (version - warmup_steps) / max(1, total_steps - warmup_steps))
    factors = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return peak * factors[schedule]


def grad_norm(parameters: Mapping[str, torch.Tensor]) -> float:
    """L2 norm of the gradients of all parameters, equal on every rank (collective over the mesh when they are DTensors).

    Squares are added in float64: how the parameters are sharded shows only beyond the 12th digit, while float32 is off by 1e-3 for
    a tensor of 28 million values.
    """
    mesh, total = None, 0.0
    for name, parameter in parameters.items():
        assert parameter.grad is not None, f"{name} got no gradient"
        total = total + _square_sum(_local(parameter.grad))
        if isinstance(parameter.grad, DTensor) and parameter.grad.device_mesh.ndim == 1:
            mesh = parameter.grad.device_mesh  # of all training ranks; dealt experts are on a 2-D mesh of the same
    if mesh is not None:
        dist.all_reduce(total, group=mesh.get_group())
    return math.sqrt(float(total))


def _square_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64, block by block so that the float64 copy stays in cache. Empty (an uneven shard) gives 0."""
    total = values.new_zeros((), dtype=torch.float64)
    for block in values.flatten().split(_BLOCK):
        block = block.double()
        total += block.dot(block)
    return total


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient: a view."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


class Optimizer:
    """AdamW (arXiv 1711.05101) over a model that has its final (sharded) parameters. `adamw` is torch's optimizer, for checkpoints.

    Weight decay applies to matrices only: norms and biases have too few values to overfit, and decay would move their scale.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        schedule: str,
        warmup_steps: int,
        total_steps: int,
    ):
        # By name, once and for all: while FSDP2 has weights gathered, the model shows other tensors than those that are optimised.
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.max_grad_norm = max_grad_norm
        self._schedule = {"peak": lr, "schedule": schedule, "warmup_steps": warmup_steps, "total_steps": total_steps}
        groups = [
            {"params": [p for p in self.parameters.values() if p.ndim == 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters.values() if p.ndim == 3], "weight_decay": weight_decay},  # experts: another mesh
            {"params": [p for p in self.parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)

    def learning_rate(self, version: int) -> float:
        return learning_rate(version, **self._schedule)

    def step(self, version: int) -> float:
        """One step; gradients are freed. Returns the gradient norm before clipping. Every training rank calls it.

        Raises RuntimeError on every rank when the norm is not finite: weights and optimizer state are then untouched.
        """
        norm = grad_norm(self.parameters)
        if not math.isfinite(norm):
            raise RuntimeError(f"step {version + 1}: the gradient norm is {norm}; not finite on this rank: {self._not_finite()}")
        if self.max_grad_norm and norm > self.max_grad_norm:
            torch._foreach_mul_(self._local_gradients(), self.max_grad_norm / (norm + _CLIP_EPS))
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate(version)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return norm

    def _local_gradients(self) -> list[torch.Tensor]:
        return [_local(p.grad) for p in self.parameters.values()]

    def _not_finite(self) -> str:
        gradients = zip(self.parameters, self._local_gradients(), strict=True)
        bad = [name for name, gradient in gradients if not bool(torch.isfinite(gradient).all())]
        return ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "") if bad else "nothing (see the other ranks)"
