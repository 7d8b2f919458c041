"""The transformer of both roles: Llama, Qwen2 and Qwen3 dense, told apart by data in ModelConfig, not by code.

A forward takes packed tokens and a callable that attends (`attend.py`); everything else is the same for decode, prefill and training,
and every op comes from `kernels`, whose results do not depend on what else is in the batch. Parameter names are those of Hugging Face
without the leading "model.". The file knows nothing of ranks: `parallel.py` shards it from outside.

Legend: T packed tokens, M rows wanted, D model, N query heads, K key/value heads, H head dim, J = H / 2, P positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels.embedding import embedding
from kernels.linear import PackedWeight, linear, pack
from kernels.logprob import logprob
from kernels.rmsnorm import rmsnorm, rmsnorm_residual
from kernels.rope import rope
from kernels.swiglu import swiglu

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (layer, q_TNH, k_TKH, v_TKH) -> o_TNH


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a dense decoder. `rope_scaling` is None or Hugging Face's dict of rope_type "llama3" or "linear"."""

    family: str  # llama | qwen2 | qwen3
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


class Matrix(nn.Module):
    """A weight [N, K] and, for decode, a copy of it in the order that the kernel reads (`Transformer.pack_weights`)."""

    def __init__(self, num_out: int, num_in: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.packed: PackedWeight | None = None

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


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.hidden_size, c.num_heads * c.head_dim, c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, c.o_bias)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x_TD: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor, attend: Attend, layer: int) -> torch.Tensor:
        q_TNH, k_TKH, v_TKH = (proj(x_TD).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q_TNH, k_TKH = rope(self.q_norm(q_TNH), cos_TJ, sin_TJ), rope(self.k_norm(k_TKH), cos_TJ, sin_TJ)
        return self.o_proj(attend(layer, q_TNH, k_TKH, v_TKH).flatten(-2))


class MLP(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, c.mlp_bias)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_TD), self.up_proj(x_TD)))


class Block(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps), Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x_TD: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor, attend: Attend) -> torch.Tensor:
        attended_TD = self.self_attn(self.input_layernorm(x_TD), cos_TJ, sin_TJ, attend, self.layer)
        normed_TD, x_TD = self.post_attention_layernorm(attended_TD, x_TD)
        return x_TD + self.mlp(normed_TD)


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
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """tokens and positions int64 [T], rows int64 [M] -> logits float32 [M, V]; with targets int64 [M] -> (log-prob [M], entropy [M]).

        `sampling` = (temperature [M], top_p [M], top_k [M]) of the distribution that the targets were sampled from. One entry point, so
        that hooks on the root (FSDP gathers parameters in them) cover embedding, norm and head.
        """
        cos_TJ, sin_TJ = self.rope_at(positions_T)
        x_TD = self.embed_tokens(tokens_T)
        for block in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_TD = checkpoint(block, x_TD, cos_TJ, sin_TJ, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TD = block(x_TD, cos_TJ, sin_TJ, attend)
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
        for module in (*(m for m in self.modules() if isinstance(m, Linear) and m is not self.lm_head), self.head):
            module.packed = pack(module.weight, module.packed)


@torch.inference_mode(False)
def rope_tables(config: ModelConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position and frequency, float32 [P, J], computed as Hugging Face does: all of it in float32, on the CPU.

    Normal tensors even if the engine's inference mode makes them: a later backward may save them.
    """
    exponent_J = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
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
