"""Mixture of experts: a router picks K of E small MLPs for every token. One definition for Mixtral, Qwen3-MoE and GLM-4.5.

Which experts a token visits is a decision that rollout and training must not take twice: `route(layer, logits, live)` says whose it is, the
live router's or a recorded one (`miles_core/routing.py`). The weights of the experts always come from the live scores, so the router
learns either way. Every op is batch-invariant, and the experts' outputs are added in the order of the slots.

Sources: Mixtral, arXiv 2401.04088, section 2.1; sigmoid scores, correction bias, groups, shared experts: DeepSeek-V3, arXiv 2412.19437,
section 2.1.2.

Legend: T tokens, K slots of a token, E experts, M = T * K rows (one for each slot), D model, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kernels.combine import combine
from kernels.expert_order import expert_order
from kernels.grouped_linear import grouped_linear, pack_experts
from kernels.linear import linear
from kernels.router import select, weigh
from kernels.swiglu import swiglu
from miles_core.model.layers import MLP, Matrix

Route = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]  # (MoE layer, logits_TE, live ids_TK) -> ids_TK to use
RunExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # (x_RD, offsets_E1, rows_M) -> y_MD


@dataclass(frozen=True)
class MoEConfig:
    """Shapes and rules of the MoE layers. A group is E / num_groups experts in a row; top_groups of them stay eligible for a token."""

    num_experts: int
    top_k: int
    expert_size: int  # F
    layers: tuple[int, ...]  # which of the model's layers are MoE
    scoring: str = "softmax"  # or "sigmoid"
    normalise: bool = True  # divide the weights of the chosen by their sum
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    correction_bias: bool = False  # a term for each expert that takes part in choosing only
    shared_size: int = 0  # width of the MLP that every token visits; 0 = none


def routers(model: nn.Module) -> list[Router]:
    """Of every MoE layer, in order."""
    return [module for module in model.modules() if isinstance(module, Router)]


def live(layer: int, logits_TE: torch.Tensor, live_TK: torch.Tensor) -> torch.Tensor:
    """The route of a model that stands alone: what the router says now."""
    return live_TK


class Router(Matrix):
    """weight [E, D]. The correction bias is no parameter: no gradient reaches it, `routing.balance` moves it. Always float32."""

    def __init__(self, dim: int, c: MoEConfig):
        super().__init__(c.num_experts, dim)
        self.config = c
        if c.correction_bias:
            self.register_buffer("e_score_correction_bias", torch.empty(c.num_experts, dtype=torch.float32))

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (logits [T, E] float32, the ids [T, K] int64 that it would choose)."""
        c, logits_TE = self.config, linear(x_TD, self.weight, None, self.usable_pack(), wide=True)
        bias_E = self.e_score_correction_bias if c.correction_bias else None
        ids_TK = select(
            logits_TE.detach(), c.top_k, scoring=c.scoring, bias_E=bias_E, num_groups=c.num_groups, top_groups=c.top_groups
        )  # fmt: skip
        return logits_TE, ids_TK


class Experts(nn.Module):
    """E MLPs in three tensors: gate_proj and up_proj [E, F, D], down_proj [E, D, F].

    `exchange`, if set, runs them on the ranks that hold them (`parallel.ExpertExchange`); the tensors then hold this rank's share.
    """

    NAMES = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, dim: int, c: MoEConfig):
        super().__init__()
        self.num_experts = c.num_experts
        for name in self.NAMES:
            shape = (dim, c.expert_size) if name == "down_proj" else (c.expert_size, dim)
            setattr(self, name, nn.Parameter(torch.empty(c.num_experts, *shape)))
        self.packed = dict.fromkeys(self.NAMES)
        self.exchange: Callable[[RunExperts, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def pack(self) -> None:
        """Renew the packed copies for decode. Call it after each change of the weights."""
        self.packed = {name: pack_experts(getattr(self, name), self.packed[name]) for name in self.NAMES}

    def forward(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        order_M, place_TK, offsets_E1 = expert_order(ids_TK, self.num_experts)
        rows_M = order_M // ids_TK.shape[1]
        if self.exchange is None:
            y_MD = self.run(x_TD, offsets_E1, rows_M)
        else:
            y_MD = self.exchange(self.run, x_TD[rows_M], offsets_E1)
        return combine(y_MD, weights_TK, place_TK)

    def run(self, x_RD: torch.Tensor, offsets_E1: torch.Tensor, rows_M: torch.Tensor | None) -> torch.Tensor:
        """Row m, which is x[rows[m]], through the MLP of its expert: rows of expert e are offsets[e] .. offsets[e + 1] - 1."""

        def project(name: str, x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
            weight, packed = getattr(self, name), None if torch.is_grad_enabled() else self.packed[name]
            return grouped_linear(x, weight.to_local() if isinstance(weight, DTensor) else weight, offsets_E1, rows, packed)

        hidden_MF = swiglu(project("gate_proj", x_RD, rows_M), project("up_proj", x_RD, rows_M))
        return project("down_proj", hidden_MF, None)


class MoE(nn.Module):
    """In the place of a layer's MLP. `index` counts the MoE layers, which is how routes are recorded."""

    def __init__(self, dim: int, c: MoEConfig, index: int):
        super().__init__()
        self.config, self.index = c, index
        self.gate, self.experts = Router(dim, c), Experts(dim, c)
        self.shared_experts = MLP(dim, c.shared_size) if c.shared_size else None

    def forward(self, x_TD: torch.Tensor, route: Route) -> torch.Tensor:
        logits_TE, live_TK = self.gate(x_TD)
        ids_TK = route(self.index, logits_TE, live_TK)
        weights_TK = weigh(logits_TE, ids_TK, scoring=self.config.scoring, normalise=self.config.normalise, scale=self.config.scale)
        out_TD = self.experts(x_TD, ids_TK, weights_TK)
        return out_TD if self.shared_experts is None else out_TD + self.shared_experts(x_TD)
