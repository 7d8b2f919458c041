"""From a llama.cpp file to a model directory: names, the order of rows, the tokenizer. launch/smollm2.sh converts real weights.

    python -m pytest tests/core/test_hf_gguf.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, tiny
from tokenizers.pre_tokenizers import ByteLevel

from kernels.rope import rope
from miles_core.model import gguf_import, hf
from miles_core.model.transformer import rope_tables

ROOT = Path(__file__).resolve().parents[2]
LETTERS = sorted(ByteLevel.alphabet())  # one letter for each of the 256 bytes
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture
def fields() -> dict[str, Any]:
    """The metadata of a small GGUF file: three special tokens, the bytes, three merges."""
    tokens = [*SPECIAL, *LETTERS, "Ġt", "Ġth", "11"]
    return {
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.embedding_length": 32, "llama.block_count": 2,
        "llama.feed_forward_length": 72, "llama.rope.freq_base": 1e5, "llama.context_length": 512,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["Ġ t", "Ġt h", "1 1"],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}",
    }  # fmt: skip


def test_every_tensor_gets_its_name() -> None:
    kinds = [kind for kind in gguf_import.NAMES if kind not in ("token_embd", "output_norm", "output")]
    names = [f"blk.{layer}.{kind}.weight" for layer in range(2) for kind in kinds]
    names += ["token_embd.weight", "output_norm.weight", "output.weight"]
    assert {gguf_import.hf_name(name) for name in names} == hf.expected_shapes(CONFIGS["llama"]).keys()


def test_rows_of_neighbouring_pairs_become_halves() -> None:
    """A query projection in llama.cpp's order, turned in neighbouring pairs = ours, turned in halves, once its outputs are put in order."""
    num_heads, head_dim, width, position = 3, 8, 5, 7
    generator = torch.Generator().manual_seed(0)
    rows, x = torch.randn(num_heads * head_dim, width, generator=generator), torch.randn(width, generator=generator)
    cos, sin = (table[position] for table in rope_tables(tiny("llama", head_dim=head_dim), position + 1))

    pairs = (rows @ x).view(num_heads, head_dim // 2, 2)  # the two numbers that llama.cpp turns together
    turned = torch.stack([pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin])
    ours = torch.from_numpy(gguf_import.unpermute(rows.numpy(), num_heads)) @ x
    halves = rope(ours.view(1, num_heads, head_dim), cos[None], sin[None])[0].view(num_heads, 2, head_dim // 2)
    torch.testing.assert_close(halves.transpose(0, 1), turned)


def test_the_config_is_read(fields: dict[str, Any]) -> None:
    config = gguf_import.model_config(fields, tied=True)
    assert config == tiny(
        "llama", vocab_size=262, hidden_size=32, head_dim=8, intermediate_size=72, rope_theta=1e5, rms_norm_eps=1e-5, tie_embeddings=True
    )


def test_the_tokenizer_is_rebuilt(fields: dict[str, Any], tmp_path: Path) -> None:
    """Merges apply, digits stay apart although "11" is in the vocabulary, marks are one token each, every byte comes back."""
    gguf_import.write_tokenizer(fields, tmp_path)
    tokenizer = hf.load_tokenizer(tmp_path)
    assert tokenizer.tokenize("a thing 11") == ["a", "Ġth", "i", "n", "g", "Ġ", "1", "1"]
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, 3 + LETTERS.index("a"), 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<|im_start|>a<|im_end|>"
    text = "naïve 漢字\t\x00\n  11 th"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (2, 1, 2)
    assert hf.load_stop_ids(tmp_path) == (2,)


def test_the_script_leaves_a_model_alone(tmp_path: Path) -> None:
    """With a model in place it says where, and neither installs nor fetches."""
    (tmp_path / "config.json").write_text("{}")
    run = subprocess.run(["bash", ROOT / "launch" / "smollm2.sh", f"{tmp_path}/"], capture_output=True, text=True, timeout=20)
    assert (run.returncode, run.stdout) == (0, f"{tmp_path}\n"), run.stderr
