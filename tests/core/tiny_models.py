"""Tiny configurations of every family, odd where oddness could hurt, and random weights that make logits spread."""

from __future__ import annotations

from dataclasses import replace

import torch

from miles_core.model import hf
from miles_core.model.layers import named_weights
from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import ModelConfig, Transformer

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def tiny(family: str, **changes) -> ModelConfig:
    """One configuration: grouped queries, a head dim that is no multiple of a vector, a vocabulary that is no multiple of a panel."""
    base = {
        "family": family, "vocab_size": 131, "hidden_size": 40, "intermediate_size": 72, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 24, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position": 512, "tie_embeddings": False,
        "qkv_bias": family == "qwen2", "qk_norm": family in ("qwen3", "qwen3_moe"),
    }  # fmt: skip
    return ModelConfig(**{**base, **changes})


GLM = MoEConfig(
    8, 3, 20, (1, 2), scoring="sigmoid", scale=1.7, num_groups=4, top_groups=2, correction_bias=True, shared_size=40,
)  # fmt: skip
CONFIGS = {
    "llama": tiny("llama"),
    "llama-tied-llama3-rope": tiny("llama", tie_embeddings=True, rope_theta=5e5, rope_scaling=LLAMA3_ROPE),
    "llama-biases-linear-rope": tiny(
        "llama", num_kv_heads=4, qkv_bias=True, o_bias=True, mlp_bias=True, rope_scaling={"rope_type": "linear", "factor": 4.0}
    ),
    "llama-wide": tiny("llama", hidden_size=207, intermediate_size=401, num_heads=3, num_kv_heads=1, head_dim=64),
    "qwen2-tied": tiny("qwen2", tie_embeddings=True, num_heads=5, num_kv_heads=1, head_dim=8, rope_theta=1e6),
    "qwen3": tiny("qwen3", head_dim=40),
    "mixtral": tiny("mixtral", moe=MoEConfig(4, 2, 72, (0, 1)), rope_theta=1e6),
    "qwen3-moe": tiny("qwen3_moe", moe=MoEConfig(7, 3, 20, (0, 1), normalise=False)),
    "qwen3-moe-dense-first-tied": tiny("qwen3_moe", tie_embeddings=True, num_layers=3, moe=MoEConfig(5, 5, 24, (1, 2))),
    "glm4-moe": tiny("glm4_moe", num_layers=3, rotary_dim=12, moe=GLM),
    "glm4-moe-biases-norms": tiny(
        "glm4_moe", qkv_bias=True, qk_norm=True, rotary_dim=12,
        moe=replace(GLM, layers=(0, 1), num_experts=6, num_groups=1, top_groups=1, top_k=1, shared_size=20, normalise=False, scale=1.0),
    ),
    "qwen3-tied-biases": tiny("qwen3", tie_embeddings=True, qkv_bias=True, o_bias=True, rms_norm_eps=1e-6),
}


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """Weights such that every layer matters and logits are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    model = hf.build(config)
    with torch.no_grad():
        for name, p in named_weights(model):
            if name.endswith("correction_bias"):
                p.normal_(0.0, 0.1, generator=generator)
            elif "norm" in name:
                p.normal_(1.0, 0.3, generator=generator)
            else:
                p.normal_(0.0, 0.3 if p.ndim == 1 else 1.5 * config.hidden_size**-0.5, generator=generator)
    return model


def random_tokens(config: ModelConfig, count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))
