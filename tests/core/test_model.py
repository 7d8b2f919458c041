"""The transformer against transformers, and its gradients against a second definition in plain float64 torch.

    python -m pytest tests/core/test_model.py
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import CONFIGS, LLAMA3_ROPE, random_model, random_tokens, tiny

from miles_core.assets import tokenizer
from miles_core.model import hf, hf_config
from miles_core.model.attend import PackedAttend
from miles_core.model.layers import named_weights
from miles_core.model.transformer import ModelConfig, Transformer, rope_tables

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (70, 1, 129, 33)


def cu_seqlens(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed_inputs(config: ModelConfig, lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor, PackedAttend]:
    """Tokens and positions [T] of sequences of these lengths, and what attends over them."""
    positions = torch.cat([torch.arange(n) for n in lengths])
    return random_tokens(config, sum(lengths)), positions, PackedAttend(cu_seqlens(lengths), config.head_dim**-0.5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_are_those_of_transformers(config: ModelConfig, tmp_path: Path) -> None:
    """A checkpoint saved by us and loaded by transformers; every position of every sequence of a packed batch."""
    from transformers import AutoModelForCausalLM

    model = random_model(config)
    tokenizer.save(tmp_path)
    hf.save(tmp_path, config, named_weights(model), tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    assert hf_config.FAMILIES[type(reference).__name__] == config.family

    tokens_T, positions_T, attend = packed_inputs(config)
    with torch.no_grad():
        logits_TV = model(tokens_T, positions_T, attend, torch.arange(len(tokens_T)))
        expected_TV = torch.cat([reference(ids[None]).logits[0] for ids in tokens_T.split(LENGTHS)])
    assert 1.0 < expected_TV.std() < 10.0, "logits too flat, or too wild, to test anything"
    assert (logits_TV - expected_TV).abs().max() < 2e-4
    assert torch.equal(logits_TV.argmax(-1), expected_TV.argmax(-1))


def reference_logp(p: dict[str, torch.Tensor], c: ModelConfig, tokens_T: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """log p(token t + 1 | tokens <= t) [T - 1] of one sequence in the dtype of the parameters: the model once more, without our ops."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.rms_norm_eps) * p[f"{name}.weight"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def turn(x_TNH: torch.Tensor) -> torch.Tensor:
        """Pairs (j, j + H / 2) as complex numbers, turned by position x frequency."""
        cos, sin = (table.to(x_TNH.dtype) for table in rope_tables(c, len(tokens_T)))
        turned = torch.complex(*x_TNH.chunk(2, -1)) * torch.complex(cos, sin)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    def heads(x: torch.Tensor, layer: str, kind: str) -> torch.Tensor:
        x_TNH = linear(x, f"{layer}.self_attn.{kind}_proj").unflatten(-1, (-1, c.head_dim))
        x_TNH = norm(x_TNH, f"{layer}.self_attn.{kind}_norm") if c.qk_norm and kind != "v" else x_TNH
        x_TNH = x_TNH if kind == "v" else turn(x_TNH)
        return x_TNH.transpose(0, 1).repeat_interleave(1 if kind == "q" else c.num_heads // c.num_kv_heads, 0)

    x = p["embed_tokens.weight"][tokens_T]
    for i in range(c.num_layers):
        layer = f"layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (heads(h, layer, kind) for kind in "qkv")
        scores = (q @ k.mT / math.sqrt(c.head_dim)).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        x = x + linear(F.silu(linear(h, f"{layer}.mlp.gate_proj")) * linear(h, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    head = p.get("lm_head.weight", p["embed_tokens.weight"])
    logits = norm(x, "norm")[:-1] @ head.T / temperature[:, None]
    return logits.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]


def training_logp(model: Transformer, lengths: tuple[int, ...]) -> torch.Tensor:
    """Log-prob of every token but the first of each sequence, one packed forward of training; temperature grows along the rows."""
    tokens_T, positions_T, attend = packed_inputs(model.config, lengths)
    rows_M = (positions_T > 0).nonzero()[:, 0] - 1
    temperature_M = torch.linspace(0.5, 1.5, len(rows_M))
    off = (torch.ones(len(rows_M)), torch.zeros(len(rows_M), dtype=torch.int64))
    return model(tokens_T, positions_T, attend, rows_M, tokens_T[rows_M + 1], (temperature_M, *off))[0]


@pytest.mark.parametrize("name", ["llama-tied-llama3-rope", "llama-biases-linear-rope", "qwen2-tied", "qwen3"])
def test_gradients_are_those_of_float64(name: str) -> None:
    config, lengths = CONFIGS[name], (40, 7, 66)
    model = random_model(config)
    weight_M = torch.randn(sum(lengths) - len(lengths), generator=torch.Generator().manual_seed(2))
    logp_M = training_logp(model, lengths)
    (logp_M * weight_M).sum().backward()

    exact = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    tokens = packed_inputs(config, lengths)[0].split(lengths)
    temperatures = torch.linspace(0.5, 1.5, len(weight_M)).double().split([n - 1 for n in lengths])
    exact_M = torch.cat([reference_logp(exact, config, ids, t) for ids, t in zip(tokens, temperatures, strict=True)])
    (exact_M * weight_M.double()).sum().backward()

    assert (logp_M - exact_M).abs().max() < 1e-4
    for name, p in model.named_parameters():
        error = (p.grad - exact[name].grad).norm() / exact[name].grad.norm()
        assert error < 1e-4, f"{name}: relative error of the gradient {error:.1e}"


@pytest.mark.parametrize("name", ["llama", "qwen3-tied-biases"])
def test_activation_checkpointing_changes_no_bit(name: str) -> None:
    model, results = random_model(CONFIGS[name]), []
    for model.activation_checkpointing in (False, True):
        model.zero_grad()
        logp_M = training_logp(model, LENGTHS)
        logp_M.sum().backward()
        results.append([logp_M.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_activation_checkpointing_keeps_one_tensor_of_a_block() -> None:
    """What autograd saves of each block is its input (and the rotation, which all blocks share)."""
    model, saved = random_model(CONFIGS["llama"]), []
    num_tokens, width = sum(LENGTHS), model.config.hidden_size
    for model.activation_checkpointing in (False, True):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            training_logp(model, LENGTHS)
        saved.append(sum(sizes))
    assert saved[1] < saved[0] / 5 and saved[1] < 10 * num_tokens * width, saved


def test_packed_weights_are_for_inference_only() -> None:
    """They give the same bits; once the weights have changed they are refused, and a forward with gradients does without them."""
    model = random_model(CONFIGS["qwen3"])
    tokens_T, positions_T, attend = packed_inputs(model.config)

    def logits() -> torch.Tensor:
        return model(tokens_T, positions_T, attend, torch.arange(len(tokens_T)))

    with torch.no_grad():
        plain = logits()
        model.pack_weights()
        assert model.layers[1].mlp.up_proj.packed is not None and model.lm_head.packed is not None
        assert torch.equal(logits(), plain)
        model.layers[1].mlp.up_proj.weight.mul_(1.5)
        with pytest.raises(AssertionError, match="pack it again"):
            logits()
    changed = logits().detach()
    assert not torch.equal(changed, plain)
    with torch.inference_mode():
        model.pack_weights()
        assert torch.equal(logits(), changed)


def test_a_tied_head_is_packed_as_head() -> None:
    model = random_model(CONFIGS["qwen2-tied"])
    model.pack_weights()
    assert model.lm_head is None and "lm_head.weight" not in dict(model.named_parameters())
    assert model.embed_tokens.packed.weight is model.embed_tokens.weight


def test_rotation_tables_grow_to_the_longest_position_and_no_further() -> None:
    model = random_model(tiny("llama", max_position=100))
    seen = []
    for longest in (0, 4, 5, 70):
        with torch.inference_mode():
            cos_TJ, sin_TJ = model.rope_at(torch.tensor([longest, 0]))
        expected = rope_tables(model.config, longest + 1)
        assert torch.equal(cos_TJ[0], expected[0][longest]) and torch.equal(sin_TJ[0], expected[1][longest])
        seen.append(len(model.rope_PJ[0]))
    assert seen == [1, 8, 8, 100]
    assert not model.rope_PJ[0].is_inference(), "tables made by the engine must serve a trainer too"
    with pytest.raises(AssertionError, match="position 100 in a model of 100 positions"):
        model.rope_at(torch.tensor([100]))


def test_llama3_rotation_by_hand() -> None:
    """Waves shorter than 64 / 4 positions stay, longer than 64 / 1 slow down by 8, and one between by the mean of both speeds."""
    config = tiny("llama", head_dim=6, rope_theta=(64 / 2.5 / (2 * math.pi)) ** 3, rope_scaling=LLAMA3_ROPE)
    frequency_J = torch.tensor([1.0, 2 * math.pi * 2.5 / 64, (2 * math.pi * 2.5 / 64) ** 2])
    expected_J = frequency_J * torch.tensor([1.0, (1 + 1 / 8) / 2, 1 / 8])
    cos_PJ, sin_PJ = rope_tables(config, 2)
    torch.testing.assert_close(torch.atan2(sin_PJ[1], cos_PJ[1]), expected_J, rtol=1e-5, atol=0)


def test_the_model_does_not_import_transformers() -> None:
    code = "import sys, miles_core.model.transformer, miles_core.model.hf; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
