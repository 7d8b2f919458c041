"""config.json <-> ModelConfig.

Read here rather than by transformers, so that both spellings in use (4.x and 5.x) mean the same thing and an unknown feature is refused
instead of ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import ModelConfig

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
}
_ROPE_NEEDS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


def load_config(model_dir: Path) -> ModelConfig:
    """config.json -> ModelConfig. ValueError for anything that this transformer does not do."""
    raw = read_json(model_dir / "config.json")
    name = (raw.get("architectures") or ["(none named)"])[0]
    if name not in FAMILIES:
        raise ValueError(f"{model_dir}: architecture {name} is not supported; supported are {', '.join(FAMILIES)}")
    family, attention_bias = FAMILIES[name], bool(raw.get("attention_bias"))
    try:
        hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
        default_theta = 1e6 if family == "mixtral" else 1e4
        rope = {"rope_theta": raw.get("rope_theta", default_theta)} | (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})
        config = ModelConfig(
            family=family,
            vocab_size=raw["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=raw.get("num_key_value_heads") or num_heads,
            head_dim=(head_dim := raw.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads)),  # as transformers
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=_rope_scaling(rope, model_dir),
            max_position=raw["max_position_embeddings"],
            tie_embeddings=bool(raw.get("tie_word_embeddings")),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family in ("llama", "qwen3", "qwen3_moe") and attention_bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias")),
            qk_norm=family in ("qwen3", "qwen3_moe") or (family == "glm4_moe" and bool(raw.get("use_qk_norm"))),
            rotary_dim=_rotary_dim(raw, rope, head_dim, family),
            moe=_moe(raw, family, model_dir),
        )
    except KeyError as error:
        raise ValueError(f"{model_dir}/config.json has no {error}") from error
    _refuse_unsupported(raw, rope, config, model_dir)
    return config


def _rotary_dim(raw: dict, rope: dict, head_dim: int, family: str) -> int | None:
    """None where the whole head turns."""
    default = 0.5 if family == "glm4_moe" else 1.0
    factor = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or default
    return None if factor == 1.0 else int(head_dim * factor)


def _moe(raw: dict, family: str, model_dir: Path) -> MoEConfig | None:
    """The mixture of experts of a config, each family in its own words. ValueError for numbers that do not fit together."""
    if family not in ("mixtral", "qwen3_moe", "glm4_moe"):
        return None
    num_layers, top_k = raw["num_hidden_layers"], raw["num_experts_per_tok"]
    every = tuple(range(num_layers))
    if family == "mixtral":
        moe = MoEConfig(raw["num_local_experts"], top_k, raw["intermediate_size"], every)
    elif family == "qwen3_moe":
        dense, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step", 1)
        layers = tuple(i for i in every if i not in dense and (i + 1) % step == 0)
        num_experts = raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]
        moe = MoEConfig(num_experts, top_k, raw["moe_intermediate_size"], layers, normalise=bool(raw.get("norm_topk_prob")))
    else:
        size = raw["moe_intermediate_size"]
        moe = MoEConfig(
            raw["n_routed_experts"], top_k, size, every[raw.get("first_k_dense_replace", 1) :], scoring="sigmoid",
            normalise=bool(raw.get("norm_topk_prob", True)), scale=float(raw.get("routed_scaling_factor", 1.0)),
            num_groups=raw.get("n_group", 1), top_groups=raw.get("topk_group", 1), correction_bias=True,
            shared_size=size * raw.get("n_shared_experts", 1),
        )  # fmt: skip
    eligible = moe.num_experts // moe.num_groups * moe.top_groups
    for refused, what in (
        (moe.num_experts > 1 << 16, f"{moe.num_experts} experts are not supported; at most 65536 are (a route is recorded in 16 bits)"),
        (moe.num_experts % moe.num_groups, f"{moe.num_experts} experts do not divide into {moe.num_groups} groups"),
        (not 1 <= moe.top_groups <= moe.num_groups, f"topk_group {moe.top_groups} is not between 1 and n_group {moe.num_groups}"),
        (moe.num_groups > 1 and moe.num_experts < 2 * moe.num_groups, "a group of experts must have two or more"),
        (not 1 <= moe.top_k <= eligible, f"num_experts_per_tok {moe.top_k} is not between 1 and the {eligible} experts that can be chosen"),
        (raw.get("router_jitter_noise", 0.0) != 0.0, "router_jitter_noise is not supported; set it to 0"),
    ):
        if refused:
            raise ValueError(f"{model_dir}: {what}")
    return moe


def _rope_scaling(rope: dict, model_dir: Path) -> dict | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in _ROPE_NEEDS:
        raise ValueError(f"{model_dir}: rope type {kind} is not supported; supported are default, {', '.join(_ROPE_NEEDS)}")
    missing = [key for key in _ROPE_NEEDS[kind] if rope.get(key) is None]
    if missing:
        raise ValueError(f"{model_dir}/config.json: rope type {kind} needs {', '.join(missing)}")
    return {"rope_type": kind, **{key: rope[key] for key in _ROPE_NEEDS[kind]}}


def _refuse_unsupported(raw: dict, rope: dict, c: ModelConfig, model_dir: Path) -> None:
    layer_types = raw.get("layer_types")
    windowed = raw.get("use_sliding_window", c.family == "mixtral" and raw.get("sliding_window") is not None)
    sliding = "sliding_attention" in layer_types if layer_types else bool(windowed)
    partial = c.rotary_dim is not None and (c.family != "glm4_moe" or c.rotary_dim % 2)
    for refused, what in (
        (raw.get("hidden_act", "silu") != "silu", f"activation {raw.get('hidden_act')} is not supported; only silu is"),
        (sliding, "sliding-window attention is not supported; every layer must attend to the whole context"),
        (partial, f"partial_rotary_factor {(c.rotary_dim or 0) / c.head_dim:g} is not supported; the whole head must turn"),
        ("quantization_config" in raw, "quantised weights are not supported; give a float32, bfloat16 or float16 checkpoint"),
        (c.num_heads % c.num_kv_heads, f"{c.num_heads} attention heads are no multiple of {c.num_kv_heads} key/value heads"),
        (c.head_dim % 8, f"head_dim {c.head_dim} is no multiple of 8, which the attention kernel needs"),
    ):
        if refused:
            raise ValueError(f"{model_dir}: {what}")


def raw_config(c: ModelConfig, stop_ids: tuple[int, ...]) -> dict[str, Any]:
    """The config.json of a float32 checkpoint, spelled so that transformers 4.x and 5.x read it."""
    raw = {
        "architectures": [name for name, family in FAMILIES.items() if family == c.family],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": c.rope_scaling,
        "max_position_embeddings": c.max_position,
        "tie_word_embeddings": c.tie_embeddings,
        "eos_token_id": list(stop_ids),
        "torch_dtype": "float32",
    }
    if c.family not in ("qwen2", "mixtral"):
        raw["attention_bias"] = c.qkv_bias
    if c.family in ("llama", "qwen3"):
        raw["mlp_bias"] = c.mlp_bias
    return raw | (_raw_moe(c, c.moe) if c.moe is not None else {})


def _raw_moe(c: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    dense = [i for i in range(c.num_layers) if i not in moe.layers]
    if c.family == "mixtral":
        return {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, "router_jitter_noise": 0.0, "sliding_window": None}
    raw = {"num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.expert_size, "norm_topk_prob": moe.normalise}
    if c.family == "qwen3_moe":
        return raw | {"num_experts": moe.num_experts, "mlp_only_layers": dense, "decoder_sparse_step": 1}
    partial = (c.rotary_dim or c.head_dim) / c.head_dim
    return raw | {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_size // moe.expert_size,
        "first_k_dense_replace": len(dense),
        "routed_scaling_factor": moe.scale,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "use_qk_norm": c.qk_norm,
        "partial_rotary_factor": partial,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta, "partial_rotary_factor": partial, **(c.rope_scaling or {})},
    }


def read_json(path: Path) -> dict[str, Any]:
    """A file of a model directory. ValueError when it is not there, or not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} is not a model directory in Hugging Face layout: it has no {path.name}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
