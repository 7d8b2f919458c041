"""Hugging Face checkpoints in and out: config.json <-> ModelConfig, safetensors <-> named tensors, tokenizers, stop ids.

Config files are read here rather than by transformers, so that both spellings in use (4.x and 5.x) mean the same thing and an unknown
feature is refused instead of ignored. transformers serves for tokenizers only, and is imported when one is asked for.

Tensor names are those of the files without the leading "model.". A tied head is stored once, as embed_tokens.weight.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from miles_core.model.transformer import ModelConfig, Transformer

# transformers looks for a package named `kernels` (Hugging Face's hub kernels) and would find our folder.
os.environ.setdefault("USE_HUB_KERNELS", "0")

Tokenizer = Any  # transformers.PreTrainedTokenizerBase, without importing it

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
SHARD_BYTES = 4 << 30  # of one safetensors file
_ROPE_NEEDS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
_READABLE = ("F32", "BF16", "F16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
                    "tokenizer.model", "chat_template.jinja", "chat_template.json")  # fmt: skip


def resolve(model: str | Path) -> Path:
    """A local directory as it is; ORGANISATION/NAME is a Hub id and is downloaded once. ValueError where there is neither."""
    if Path(model).is_dir():
        return Path(model)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model)):
        raise ValueError(f"--model {model}: no such directory, and not a Hub id (ORGANISATION/NAME)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = "it is unknown there, or private" if getattr(error, "response", None) is not None else "the Hub cannot be reached"
        raise ValueError(f"--model {model}: no such directory here, and {reason} ({type(error).__name__}); give a directory") from error


# ---- config.json


def load_config(model_dir: Path) -> ModelConfig:
    """config.json -> ModelConfig. ValueError for anything that this transformer does not do."""
    raw = _read_json(model_dir / "config.json")
    name = (raw.get("architectures") or ["(none named)"])[0]
    if name not in FAMILIES:
        raise ValueError(f"{model_dir}: architecture {name} is not supported; supported are {', '.join(FAMILIES)}")
    family, attention_bias = FAMILIES[name], bool(raw.get("attention_bias"))
    try:
        hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
        rope = {"rope_theta": raw.get("rope_theta", 10000.0)} | (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})
        config = ModelConfig(
            family=family,
            vocab_size=raw["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=raw.get("num_key_value_heads") or num_heads,
            head_dim=raw.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads),  # as transformers
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=_rope_scaling(rope, model_dir),
            max_position=raw["max_position_embeddings"],
            tie_embeddings=bool(raw.get("tie_word_embeddings")),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias")),
            qk_norm=family == "qwen3",
        )
    except KeyError as error:
        raise ValueError(f"{model_dir}/config.json has no {error}") from error
    _refuse_unsupported(raw, rope, config, model_dir)
    return config


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
    sliding = "sliding_attention" in layer_types if layer_types else bool(raw.get("use_sliding_window"))
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    for refused, what in (
        (raw.get("hidden_act", "silu") != "silu", f"activation {raw.get('hidden_act')} is not supported; only silu is"),
        (sliding, "sliding-window attention is not supported; every layer must attend to the whole context"),
        (partial != 1.0, f"partial_rotary_factor {partial} is not supported; the whole head must turn"),
        ("quantization_config" in raw, "quantised weights are not supported; give a float32, bfloat16 or float16 checkpoint"),
        (c.num_heads % c.num_kv_heads, f"{c.num_heads} attention heads are no multiple of {c.num_kv_heads} key/value heads"),
        (c.head_dim % 8, f"head_dim {c.head_dim} is no multiple of 8, which the attention kernel needs"),
    ):
        if refused:
            raise ValueError(f"{model_dir}: {what}")


def _raw_config(c: ModelConfig, stop_ids: tuple[int, ...]) -> dict[str, Any]:
    """The config.json of a float32 checkpoint, spelled so that transformers 4.x and 5.x read it."""
    attention_bias = c.qkv_bias if c.family != "qwen2" else True
    assert (c.qkv_bias, c.o_bias, c.qk_norm) == (attention_bias, attention_bias and c.family != "qwen2", c.family == "qwen3"), c
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
    return raw if c.family == "qwen2" else raw | {"attention_bias": attention_bias, "mlp_bias": c.mlp_bias}


# ---- weights


def build(config: ModelConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Transformer:
    """The model with uninitialised parameters."""
    with torch.device(device):
        return Transformer(config).to(dtype)


def load(model_dir: Path) -> Transformer:
    """The model with the weights of a checkpoint, float32 on the CPU. ValueError unless the tensors are exactly those expected."""
    config = load_config(model_dir)
    check_weights(model_dir, config)
    model = build(config)
    parameters = dict(model.named_parameters())
    tied_head = None
    with torch.no_grad():
        for name, tensor in read_tensors(model_dir):
            if name in parameters:
                parameters[name].copy_(tensor)
            else:
                tied_head = tensor  # check_weights let no other name pass
    if tied_head is not None and not torch.equal(tied_head.float(), parameters["embed_tokens.weight"]):
        raise ValueError(f"{model_dir}: lm_head.weight differs from the embeddings it is tied to; set tie_word_embeddings to false")
    return model


def check_weights(model_dir: Path, config: ModelConfig) -> None:
    """Expected tensors = tensors in the files, by name, shape and dtype. Reads headers only. ValueError names five that differ."""
    expected = expected_shapes(config)
    found: dict[str, tuple[int, ...]] = {}
    unreadable: set[str] = set()
    for name, piece in _slices(model_dir):
        found[name] = tuple(piece.get_shape())
        if piece.get_dtype() not in _READABLE:
            unreadable.add(f"{name} ({piece.get_dtype()})")
    if config.tie_embeddings and "lm_head.weight" in found:  # some exporters write a tied head a second time
        expected["lm_head.weight"] = expected["embed_tokens.weight"]
    wrong = {f"{n} {list(found[n])} instead of {list(expected[n])}" for n in expected.keys() & found.keys() if expected[n] != found[n]}
    for what, names in (
        ("lacks tensors", expected.keys() - found.keys()),
        ("has tensors that the model does not", found.keys() - expected.keys()),
        ("has tensors of the wrong shape", wrong),
        (f"has tensors of another dtype than {', '.join(_READABLE)}", unreadable),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{model_dir}: the checkpoint {what}: {', '.join(sorted(names)[:5])}{more}")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the model, in the model's order."""
    return {name: tuple(p.shape) for name, p in build(config, "meta").named_parameters()}


def read_tensors(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor in the files, in the dtype they are stored in."""
    for name, piece in _slices(model_dir):
        yield name, piece[:]


def _slices(model_dir: Path) -> Iterator[tuple[str, Any]]:
    """(our name, safetensors slice) of every tensor in the files. A slice reads its header only, until it is indexed."""
    for path in _weight_files(model_dir):
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
        with file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                if not name.endswith(".rotary_emb.inv_freq"):  # a constant that old exporters wrote; transformers ignores it too
                    yield name.removeprefix("model."), file.get_slice(name)


def _weight_files(model_dir: Path) -> list[Path]:
    index, single = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.exists() and not single.exists() else [single.name]
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise ValueError(f"{model_dir}: no weights: {', '.join(missing[:5])} not found (safetensors is the format that is read)")
    return [model_dir / name for name in names]


# ---- saving


def save(path: Path, config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], tokenizer: Path | Tokenizer) -> None:
    """Write a model directory that `load` and transformers' AutoModelForCausalLM read, weights in float32.

    tensors: every full tensor by our name. tokenizer: the model directory that it comes from (its files are copied, with the
    generation settings), or a tokenizer object. ValueError if the disk does not take it. Not atomic: write beside, then rename.
    """
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if isinstance(tokenizer, str | Path):
            generation = _copy_tokenizer(Path(tokenizer), path)
        else:
            tokenizer.save_pretrained(path)
            generation = {"eos_token_id": [tokenizer.eos_token_id]}
        _write_json(path / "generation_config.json", generation)
        _write_json(path / "config.json", _raw_config(config, tuple(generation["eos_token_id"])))
        _save_tensors(path, config, tensors)


def _copy_tokenizer(source: Path, target: Path) -> dict[str, Any]:
    """Copy the tokenizer's files. Returns the generation settings of `source` with every stop id in them."""
    for name in _TOKENIZER_FILES:
        if (source / name).exists() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    settings = source / "generation_config.json"
    return (_read_json(settings) if settings.exists() else {}) | {"eos_token_id": list(load_stop_ids(source))}


def _save_tensors(path: Path, config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Shards of at most SHARD_BYTES, written as the tensors come, so that a model larger than memory's half can be saved."""
    expected, shards, shard, size = expected_shapes(config), [], {}, 0
    seen: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors:
        assert name not in seen, f"{name} came twice"
        seen[name] = tuple(tensor.shape)
        tensor = tensor.detach().to("cpu", torch.float32).contiguous()
        if shard and size + tensor.nbytes > SHARD_BYTES:
            shards.append(_save_shard(path, len(shards), shard))
            shard, size = {}, 0
        shard[name if name == "lm_head.weight" else f"model.{name}"] = tensor
        size += tensor.nbytes
    shards.append(_save_shard(path, len(shards), shard))
    assert seen == expected, f"not the model's tensors: {sorted(set(seen.items()) ^ set(expected.items()))[:5]}"
    if len(shards) == 1:
        os.replace(path / "model-00001.safetensors", path / "model.safetensors")
        return
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        os.replace(path / f"model-{i + 1:05d}.safetensors", path / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    total = sum(4 * torch.Size(shape).numel() for shape in seen.values())
    _write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _save_shard(path: Path, index: int, shard: dict[str, torch.Tensor]) -> list[str]:
    file = path / f"model-{index + 1:05d}.safetensors"
    save_file(shard, file, metadata={"format": "pt"})
    shutil.copymode(path / "config.json", file)  # safetensors makes it readable to its owner only
    return list(shard)


# ---- tokenizer


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a model directory, through transformers. ValueError if there is none that loads."""
    if not any((model_dir / name).exists() for name in _TOKENIZER_FILES):
        raise ValueError(f"{model_dir}: no tokenizer: it has none of {', '.join(_TOKENIZER_FILES)}")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"transformers fails ({error}); uninstall the package `kernels` if you have it: ours has its name") from error
    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{model_dir}: no usable tokenizer: {str(error).splitlines()[0]}") from error


def load_stop_ids(model_dir: Path, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """Token ids that end an answer, ascending: eos of generation_config.json and config.json, and the tokenizer's own. At least one."""
    eos = (tokenizer or load_tokenizer(model_dir)).eos_token_id
    ids = set() if eos is None else {eos}
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(model_dir / name).get("eos_token_id") if (model_dir / name).exists() else None
        ids |= {eos} if isinstance(eos, int) else set(eos or ())
    if not ids:
        raise ValueError(f"{model_dir}: no end-of-sequence token, so no answer could end; set eos_token_id in generation_config.json")
    return tuple(sorted(ids))


# ---- files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} is not a model directory in Hugging Face layout: it has no {path.name}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot save to {path}: {error}") from error
