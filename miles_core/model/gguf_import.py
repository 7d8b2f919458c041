"""A llama.cpp model file (GGUF, architecture llama, BPE vocabulary) -> a Hugging Face model directory in float32.

    python -m miles_core.model.gguf_import FILE.gguf DIR         # needs the `gguf` package; launch/smollm2.sh calls it

llama.cpp turns neighbouring dimensions (2 j, 2 j + 1) where Hugging Face turns j with j + H / 2, so its converter permutes the rows of
attn_q and attn_k, and this undoes it. Quantised tensors are dequantised.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from miles_core.model import hf
from miles_core.model.transformer import ModelConfig

NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head",
}  # fmt: skip
CONTROL = 3  # token type of special tokens in GGUF


def main(file: Path, directory: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    for key, supported in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if fields.get(key) != supported:
            raise ValueError(f"{file}: {key} {fields.get(key)} is not supported; only {supported} is")
    config = model_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(fields, directory)
    hf.save(directory, config, ((hf_name(t.name), read_tensor(t, config)) for t in reader.tensors), directory)


def model_config(fields: dict[str, Any], tied: bool) -> ModelConfig:
    """From the metadata of the file. Integers and floats are stored exactly, but eps is float32: 1e-5 reads as 9.99999974e-06."""
    num_heads, hidden_size = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return ModelConfig(
        family="llama",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=num_heads,
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=hidden_size // num_heads,
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_theta=fields["llama.rope.freq_base"],
        max_position=fields["llama.context_length"],
        tie_embeddings=tied,
    )


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight."""
    *block, kind, suffix = name.split(".")
    return ".".join([*(["layers", block[1]] if block else []), NAMES[kind], suffix])


def read_tensor(tensor: Any, config: ModelConfig) -> torch.Tensor:
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    for kind, num_heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
        if f".{kind}." in tensor.name:
            values = unpermute(values, num_heads)
    return torch.from_numpy(np.array(values, np.float32))


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """[N H, D]: rows 2 j and 2 j + 1 of every head go to j and j + H / 2."""
    return rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE that splits digits one by one, as SmolLM2's."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
           for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))},
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
