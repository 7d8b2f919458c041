"""The transformer of both roles: Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE and GLM-4.5, told apart by data in ModelConfig, not by code.

A forward takes packed tokens, a callable that attends (`attend.py`) and one that routes (`moe.py`); everything else is the same for decode,
prefill and training, and every op comes from `kernels`, whose results do not depend on what else is in the batch. Parameter names are
those of Hugging Face without the leading "model." (experts: see `hf.py`). The file knows nothing of ranks: `parallel.py` shards it from
outside.

Legend: T packed tokens, M rows wanted, D model, N query heads, K key/value heads, H head dim, J pairs of it that turn with the position,
P positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels.linear import linear
from kernels.logprob import logprob
from kernels.rope import rope
from miles_core.model.layers import MLP, Embedding, Linear, Matrix, Norm
from miles_core.model.moe import Experts, MoE, MoEConfig, Route, live

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (layer, q_TNH, k_TKH, v_TKH) -> o_TNH


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder. `rope_scaling` is None or Hugging Face's dict of rope_type "llama3" or "linear"."""

    family: str  # llama | qwen2 | qwen3 | mixtral | qwen3_moe | glm4_moe
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int  # tokens of the longest context
    tie_embeddings: bool
    rope_scaling: dict | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rotary_dim: int | None = None  # leading dims of a head that turn with the position; None = all
    moe: MoEConfig | None = None


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.head_dim, self.rotary_dim = c.head_dim, c.rotary_dim or c.head_dim
        self.q_proj = Linear(c.hidden_size, c.num_heads * c.head_dim, c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, c.o_bias)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x_TD: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor, attend: Attend, layer: int) -> torch.Tensor:
        q_TNH, k_TKH, v_TKH = (proj(x_TD).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q_TNH, k_TKH = self.turn(self.q_norm(q_TNH), cos_TJ, sin_TJ), self.turn(self.k_norm(k_TKH), cos_TJ, sin_TJ)
        return self.o_proj(attend(layer, q_TNH, k_TKH, v_TKH).flatten(-2))

    def turn(self, x_TNH: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of the leading `rotary_dim` dims; the others stay as they are."""
        if self.rotary_dim == self.head_dim:
            return rope(x_TNH, cos_TJ, sin_TJ)
        turning, rest = x_TNH.split([self.rotary_dim, self.head_dim - self.rotary_dim], -1)
        return torch.cat([rope(turning, cos_TJ, sin_TJ), rest], -1)


class Block(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps), Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        if c.moe is not None and layer in c.moe.layers:
            self.mlp = MoE(c.hidden_size, c.moe, c.moe.layers.index(layer))
        else:
            self.mlp = MLP(c.hidden_size, c.intermediate_size, c.mlp_bias)

    def forward(
        self, x_TD: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor, attend: Attend, route: Route
    ) -> torch.Tensor:  # fmt: skip
        attended_TD = self.self_attn(self.input_layernorm(x_TD), cos_TJ, sin_TJ, attend, self.layer)
        hidden_TD, x_TD = self.post_attention_layernorm(attended_TD, residual=x_TD)
        return x_TD + (self.mlp(hidden_TD, route) if isinstance(self.mlp, MoE) else self.mlp(hidden_TD))


class Transformer(nn.Module):
    """Parameters are uninitialised until a checkpoint or a weight update fills them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.activation_checkpointing = False  # keep the input of each block only, and run it again in backward
        self.rope_PJ = rope_tables(config, 0)

    @property
    def head(self) -> Matrix:
        """Whose weight [V, D] gives the logits."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        rows_M: torch.Tensor,
        targets_M: torch.Tensor | None = None,
        sampling: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        route: Route = live,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """tokens and positions int64 [T], rows int64 [M] -> logits float32 [M, V]; with targets int64 [M] -> (log-prob [M], entropy [M]).

        `sampling` = (temperature [M], top_p [M], top_k [M]) of the distribution that the targets were sampled from. One entry point, so
        that hooks on the root (FSDP gathers parameters in them) cover embedding, norm and head.
        """
        cos_TJ, sin_TJ = self.rope_at(positions_T)
        x_TD = self.embed_tokens(tokens_T)
        for block in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_TD = checkpoint(block, x_TD, cos_TJ, sin_TJ, attend, route, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TD = block(x_TD, cos_TJ, sin_TJ, attend, route)
        hidden_MD = self.norm(x_TD[rows_M])
        if targets_M is None:
            return linear(hidden_MD, self.head.weight, None, self.head.usable_pack(), wide=True)
        return logprob(hidden_MD, self.head.weight, targets_M, *sampling, self.head.usable_pack())

    def rope_at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, J] at these positions, from tables that grow to the longest position seen."""
        longest = int(positions_T.max()) + 1 if len(positions_T) else 0
        if longest > len(self.rope_PJ[0]):
            size = min(self.config.max_position, 1 << (longest - 1).bit_length())
            assert longest <= size, f"position {longest - 1} in a model of {self.config.max_position} positions"
            self.rope_PJ = tuple(table.to(positions_T.device) for table in rope_tables(self.config, size))
        cos_PJ, sin_PJ = self.rope_PJ
        return cos_PJ[positions_T], sin_PJ[positions_T]

    @torch.no_grad()
    def pack_weights(self) -> None:
        """Pack every matrix for decode. Call it after each change of the weights; the trainer, whose weights always change, never does."""
        for module in self.modules():
            if isinstance(module, Matrix | Experts) and (module is self.head or not isinstance(module, Embedding)):
                module.pack()


@torch.inference_mode(False)
def rope_tables(config: ModelConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position and frequency, float32 [P, J], computed as Hugging Face does: all of it in float32, on the CPU.

    Normal tensors even if the engine's inference mode makes them: a later backward may save them.
    """
    dim = config.rotary_dim or config.head_dim
    exponent_J = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    frequency_J = _scale_frequencies(1.0 / config.rope_theta**exponent_J, config.rope_scaling)
    angle_PJ = torch.arange(num_positions, dtype=torch.float32, device="cpu")[:, None] * frequency_J
    return angle_PJ.cos(), angle_PJ.sin()


def _scale_frequencies(frequency_J: torch.Tensor, scaling: dict | None) -> torch.Tensor:
    """Lower frequencies, for contexts longer than those of pre-training.

    linear: all of them (Chen et al., arXiv 2306.15595, section 2.3). llama3: long waves only, with a smooth transition to short ones
    (Llama 3.1's release code, `apply_scaling`).
    """
    if scaling is None:
        return frequency_J
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return frequency_J / factor
    assert scaling["rope_type"] == "llama3", scaling
    original, low, high = scaling["original_max_position_embeddings"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength_J = 2 * math.pi / frequency_J
    smooth_J = ((original / wavelength_J - low) / (high - low)).clamp(0, 1)  # 0: long waves, divided; 1: short ones, kept
    return (1 - smooth_J) * frequency_J / factor + smooth_J * frequency_J
