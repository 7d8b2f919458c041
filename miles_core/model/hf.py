"""Hugging Face checkpoints in and out: safetensors <-> named tensors, tokenizers, stop ids; for config.json see `hf_config.py`.

transformers serves for tokenizers only, and is imported when one is asked for.

Tensor names are those of the files without the leading "model.", but for two things. A tied head is stored once, as embed_tokens.weight.
The experts of a layer are one tensor here (layers.3.mlp.experts.up_proj [E, F, D]) and E tensors in the files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from miles_core.model.hf_config import load_config, raw_config, read_json
from miles_core.model.layers import named_weights
from miles_core.model.moe import Experts
from miles_core.model.transformer import ModelConfig, Transformer

__all__ = ["build", "check_weights", "expected_shapes", "load", "load_config", "load_stop_ids", "load_tokenizer", "resolve", "save"]

# transformers looks for a package named `kernels` (Hugging Face's hub kernels) and would find our folder.
os.environ.setdefault("USE_HUB_KERNELS", "0")

Tokenizer = Any  # transformers.PreTrainedTokenizerBase, without importing it

SHARD_BYTES = 4 << 30  # of one safetensors file
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


# ---- weights


def build(config: ModelConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Transformer:
    """The model with uninitialised weights. Correction biases of routers are float32 whatever the dtype of the parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Transformer(config)
    finally:
        torch.set_default_dtype(before)


def load(model_dir: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Transformer:
    """The model with the weights of a checkpoint. ValueError unless the tensors are exactly those expected."""
    config = load_config(model_dir)
    check_weights(model_dir, config)
    model = build(config, device, dtype)
    weights, homes = dict(named_weights(model)), file_tensors(config)
    tied_head = None
    with torch.no_grad():
        for name, tensor in read_tensors(model_dir, config):
            if name in homes:
                homes[name].place(weights).copy_(tensor)
            else:
                tied_head = tensor  # check_weights let no other name pass
    if tied_head is not None and not torch.equal(tied_head.to(device, dtype), weights["embed_tokens.weight"]):
        raise ValueError(f"{model_dir}: lm_head.weight differs from the embeddings it is tied to; set tie_word_embeddings to false")
    return model


def check_weights(model_dir: Path, config: ModelConfig) -> None:
    """Expected tensors = tensors in the files, by name, shape and dtype. Reads headers only. ValueError names five that differ."""
    expected = {name: home.shape for name, home in file_tensors(config).items()}
    found: dict[str, tuple[int, ...]] = {}
    unreadable: set[str] = set()
    for name, piece in _slices(model_dir, config):
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
    return {name: tuple(w.shape) for name, w in named_weights(build(config, "meta"))}


class Home(NamedTuple):
    """Where a tensor of the files stands in the model: `name`, or expert `expert` of it."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None

    def place(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return weights[self.name] if self.expert is None else weights[self.name][self.expert]


def file_tensors(config: ModelConfig) -> dict[str, Home]:
    """Name in the files -> its home, for every tensor of the model, in the model's order."""
    homes: dict[str, Home] = {}
    for name, shape in expected_shapes(config).items():
        names = file_names(name, config)
        for expert, file_name in enumerate(names):
            homes[file_name] = Home(name, shape) if len(shape) < 3 else Home(name, shape[1:], expert)
    return homes


def file_names(name: str, config: ModelConfig) -> list[str]:
    """The names in the files of one of the model's tensors: one for each expert of a stack."""
    spelled = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if config.family == "mixtral" else {}
    if config.family == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    stack, dot, matrix = name.rpartition(".experts.")
    if not dot:
        return [name]
    assert matrix in Experts.NAMES, name
    return [f"{stack}.experts.{expert}.{spelled.get(matrix, matrix)}.weight" for expert in range(config.moe.num_experts)]


def read_tensors(model_dir: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor in the files, in the dtype they are stored in."""
    for name, piece in _slices(model_dir, config):
        yield name, piece[:]


def _slices(model_dir: Path, config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """(name without "model.", safetensors slice) of every tensor in the files. A slice reads its header only, until it is indexed."""
    # GLM-4.5 keeps the layers that predict several tokens at once behind the others; transformers does not load them either.
    beyond = re.compile(rf"layers\.{config.num_layers}\." if config.family == "glm4_moe" else r"(?!)")
    for path in _weight_files(model_dir):
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
        with file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                ours = name.removeprefix("model.")
                if not ours.endswith(".rotary_emb.inv_freq") and not beyond.match(ours):  # a constant that old exporters wrote
                    yield ours, file.get_slice(name)


def _weight_files(model_dir: Path) -> list[Path]:
    index, single = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() and not single.exists() else [single.name]
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise ValueError(f"{model_dir}: no weights: {', '.join(missing[:5])} not found (safetensors is the format that is read)")
    return [model_dir / name for name in names]


# ---- saving


def save(
    path: Path, config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], tokenizer: Path | Tokenizer,
    stop_ids: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Write a model directory that `load` and transformers' AutoModelForCausalLM read, weights in float32.

    tensors: every full tensor by our name. tokenizer: the model directory that it comes from (its files are copied, with the
    generation settings), or a tokenizer object. stop_ids: of that directory, if they are known; else its tokenizer is loaded to find them.
    ValueError if the disk does not take it. Not atomic: write beside, then rename.
    """
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if isinstance(tokenizer, str | Path):
            generation = _copy_tokenizer(Path(tokenizer), path) | {"eos_token_id": list(stop_ids or load_stop_ids(Path(tokenizer)))}
        else:
            tokenizer.save_pretrained(path)
            generation = {"eos_token_id": [tokenizer.eos_token_id]}
        _write_json(path / "generation_config.json", generation)
        _write_json(path / "config.json", raw_config(config, tuple(generation["eos_token_id"])))
        _save_tensors(path, config, tensors)


def _copy_tokenizer(source: Path, target: Path) -> dict[str, Any]:
    """Copy the tokenizer's files. Returns the generation settings of `source`."""
    for name in _TOKENIZER_FILES:
        if (source / name).exists() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    settings = source / "generation_config.json"
    return read_json(settings) if settings.exists() else {}


def _save_tensors(path: Path, config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Shards of at most SHARD_BYTES, written as the tensors come, so that a model larger than memory's half can be saved."""
    expected, shards, shard, size = expected_shapes(config), [], {}, 0
    seen: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors:
        assert name not in seen, f"{name} came twice"
        seen[name] = tuple(tensor.shape)
        tensor = tensor.detach().to("cpu", torch.float32).contiguous()
        names = file_names(name, config)
        for file_name, piece in zip(names, tensor if len(names) > 1 or tensor.ndim == 3 else [tensor], strict=True):
            if shard and size + piece.nbytes > SHARD_BYTES:
                shards.append(_save_shard(path, len(shards), shard))
                shard, size = {}, 0
            shard[file_name if file_name == "lm_head.weight" else f"model.{file_name}"] = piece.contiguous()
            size += piece.nbytes
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
        eos = read_json(model_dir / name).get("eos_token_id") if (model_dir / name).exists() else None
        ids |= {eos} if isinstance(eos, int) else set(eos or ())
    if not ids:
        raise ValueError(f"{model_dir}: no end-of-sequence token, so no answer could end; set eos_token_id in generation_config.json")
    return tuple(sorted(ids))


# ---- files


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot save to {path}: {error}") from error
