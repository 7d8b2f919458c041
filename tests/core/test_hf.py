"""Checkpoints in and out: what we write transformers reads, what it writes we read, and what does not fit is refused in one sentence.

    python -m pytest tests/core/test_hf.py
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, LLAMA3_ROPE, random_model, tiny

from miles_core.assets import tokenizer
from miles_core.model import hf
from miles_core.model.attend import PackedAttend
from miles_core.model.layers import named_weights
from miles_core.model.transformer import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
END = tokenizer.VOCABULARY[tokenizer.END]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A directory with a tokenizer, as a source for `save`."""
    path = tmp_path / "tokenizer"
    path.mkdir()
    tokenizer.save(path)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path, words: Path) -> Path:
    """A whole model directory, tied Qwen2, for tests to break."""
    return saved(CONFIGS["qwen2-tied"], tmp_path / "model", words)


def saved(config: ModelConfig, path: Path, words: Path) -> Path:
    hf.save(path, config, named_weights(random_model(config)), words)
    return path


def edit(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_tensors(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


def assert_same_weights(model_dir: Path, expected: dict[str, torch.Tensor]) -> None:
    found = dict(named_weights(hf.load(model_dir)))
    assert found.keys() == expected.keys()
    assert all(p.dtype is torch.float32 and torch.equal(p, expected[name]) for name, p in found.items())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_saved_and_loaded_is_the_same(config: ModelConfig, tmp_path: Path, words: Path) -> None:
    path = saved(config, tmp_path / "model", words)
    assert hf.load_config(path) == config
    assert_same_weights(path, dict(named_weights(random_model(config))))
    assert hf.load_stop_ids(path) == (END,)
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == [END]
    prompts = [hf.load_tokenizer(p).apply_chat_template([{"role": "user", "content": "539214="}], tokenize=False) for p in (path, words)]
    assert prompts[0] == prompts[1] and "539214=" in prompts[0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_transformers_saves_again_what_we_saved(config: ModelConfig, tmp_path: Path, words: Path) -> None:
    """Through transformers and back: its own spelling of config.json means the same, the weights are the same."""
    from transformers import AutoModelForCausalLM

    path = saved(config, tmp_path / "model", words)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.generation_config.eos_token_id == [END] and model.dtype is torch.float32
    model.save_pretrained(tmp_path / "again")
    assert hf.load_config(tmp_path / "again") == config
    assert_same_weights(tmp_path / "again", dict(named_weights(random_model(config))))


def test_a_tokenizer_object_is_saved_too(tmp_path: Path, words: Path) -> None:
    config = CONFIGS["llama"]
    hf.save(tmp_path / "model", config, named_weights(random_model(config)), hf.load_tokenizer(words))
    assert hf.load_tokenizer(tmp_path / "model").encode("539214=") == hf.load_tokenizer(words).encode("539214=")
    assert hf.load_stop_ids(tmp_path / "model") == (END,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_exactly(dtype: torch.dtype, checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))
    assert_same_weights(checkpoint, {name: p.to(dtype).float() for name, p in random_model(CONFIGS["qwen2-tied"]).named_parameters()})


def test_shards(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is larger than the limit (unless one tensor is), the index names every tensor, and both readers put them together."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(hf, "SHARD_BYTES", 50_000)
    config = CONFIGS["llama"]
    path = saved(config, tmp_path / "model", words)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(path.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 3 and sum(t.nbytes for file in files for t in load_file(file).values()) == index["metadata"]["total_size"]
    assert all(len(held := load_file(file)) == 1 or sum(t.nbytes for t in held.values()) <= 50_000 for file in files)
    assert {name: file.name for file in files for name in load_file(file)} == index["weight_map"]
    expected = dict(named_weights(random_model(config)))
    assert_same_weights(path, expected)
    theirs = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(theirs[name if name == "lm_head.weight" else f"model.{name}"], p) for name, p in expected.items())
    files[1].unlink()
    with pytest.raises(ValueError, match=f"no weights: {files[1].name} not found"):
        hf.load(path)


def test_save_wants_every_tensor_once(tmp_path: Path, words: Path) -> None:
    config = CONFIGS["llama"]
    tensors = list(named_weights(random_model(config)))
    for wrong, message in ((tensors[:-1], "lm_head.weight"), (tensors + tensors[:1], "embed_tokens.weight came twice")):
        with pytest.raises(AssertionError, match=message):
            hf.save(tmp_path / "model", config, wrong, words)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE, "rope_parameters": None, "torch_dtype": "bfloat16"},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE, "rope_type": None}, "rope_parameters": None},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}, "dtype": "bfloat16"},
    ],
    ids=["4.x", "older", "5.x"],
)
def test_every_spelling_of_the_rotation(spelling: dict, tmp_path: Path, words: Path) -> None:
    config = tiny("llama", rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    path = saved(config, tmp_path / "model", words)
    edit(path / "config.json", **spelling)
    assert hf.load_config(path) == config


def test_defaults_of_an_old_llama(tmp_path: Path, words: Path) -> None:
    """Keys that the first Llama checkpoints did not have mean what transformers takes them to mean."""
    path = saved(tiny("llama", num_kv_heads=4, head_dim=8, hidden_size=32), tmp_path / "model", words)
    later = "num_key_value_heads head_dim rope_theta rope_scaling attention_bias mlp_bias tie_word_embeddings rms_norm_eps"
    edit(path / "config.json", **dict.fromkeys(later.split()))
    config = hf.load_config(path)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.tie_embeddings) == (4, 8, 10000.0, False)
    assert config.rms_norm_eps == 1e-6 and config.rope_scaling is None and not (config.qkv_bias or config.o_bias or config.mlp_bias)


def test_families_read_the_same_keys_differently(checkpoint: Path, tmp_path: Path, words: Path) -> None:
    """As transformers does: Qwen3 without a head_dim has 128, and Qwen2 has biases on q, k, v alone whatever the config says."""
    edit(checkpoint / "config.json", attention_bias=True, mlp_bias=True)
    assert hf.load_config(checkpoint) == CONFIGS["qwen2-tied"]
    path = saved(CONFIGS["qwen3"], tmp_path / "qwen3", words)
    edit(path / "config.json", head_dim=None)
    assert hf.load_config(path).head_dim == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, Qwen2"),
        ({"architectures": None}, "architecture .none named. is not supported"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"hidden_act": "gelu"}, "activation gelu is not supported; only silu is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type yarn is not supported; supported are default, linear, llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type yarn is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type llama3 needs low_freq_factor, high_freq_factor, orig"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        ({"num_key_value_heads": 2}, "5 attention heads are no multiple of 2 key/value heads"),
        ({"head_dim": 10}, "head_dim 10 is no multiple of 8"),
    ],
)
def test_refused_configs(changes: dict, message: str, checkpoint: Path) -> None:
    edit(checkpoint / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        hf.load_config(checkpoint)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is not between 1 and the 4 experts that can be chosen"),
        ("mixtral", {"num_local_experts": 65537}, "65537 experts are not supported; at most 65536 are"),
        ("mixtral", {"sliding_window": 4096}, "sliding-window attention is not supported"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is not supported"),
        ("qwen3-moe", {"num_experts_per_tok": 0}, "num_experts_per_tok 0 is not between 1 and the 7 experts"),
        ("qwen3-moe", {"moe_intermediate_size": None}, "config.json has no 'moe_intermediate_size'"),
        ("glm4-moe", {"n_group": 3}, "8 experts do not divide into 3 groups"),
        ("glm4-moe", {"topk_group": 5}, "topk_group 5 is not between 1 and n_group 4"),
        ("glm4-moe", {"topk_group": 1}, "num_experts_per_tok 3 is not between 1 and the 2 experts that can be chosen"),
        ("glm4-moe", {"n_group": 8, "topk_group": 4}, "a group of experts must have two or more"),
    ],
)
def test_refused_mixtures(name: str, changes: dict, message: str, tmp_path: Path, words: Path) -> None:
    path = saved(CONFIGS[name], tmp_path / "model", words)
    edit(path / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        hf.load_config(path)


def test_fewer_experts_than_the_config_says_are_refused(tmp_path: Path, words: Path) -> None:
    path = saved(CONFIGS["mixtral"], tmp_path / "model", words)
    edit(path / "config.json", num_local_experts=5)
    with pytest.raises(ValueError, match=r"lacks tensors: layers.0.block_sparse_moe.experts.4.w1.weight, .* and 1 more") as error:
        hf.load(path)
    assert "wrong shape" not in str(error.value)
    edit(path / "config.json", num_local_experts=3)
    with pytest.raises(ValueError, match="has tensors that the model does not: layers.0.block_sparse_moe.experts.3.w1.weight"):
        hf.load(path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, words: Path) -> None:
    """GLM-4.5 keeps them behind the model's own layers."""
    path = saved(CONFIGS["glm4-moe"], tmp_path / "model", words)
    edit_tensors(path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(2, 2)}))
    assert_same_weights(path, dict(named_weights(random_model(CONFIGS["glm4-moe"]))))


def test_upcycled_from_dense_to_the_same_function(tmp_path: Path, words: Path) -> None:
    """Every expert is the MLP, so whichever are chosen, the logits are those of the dense model up to rounding."""
    source = saved(CONFIGS["llama"], tmp_path / "dense", words)
    subprocess.run(
        [sys.executable, "-m", "miles_core.model.upcycle", source, tmp_path / "mixture", "--experts", "4", "--top-k", "2"],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    dense, mixture = hf.load(source), hf.load(tmp_path / "mixture")
    assert (mixture.config.family, mixture.config.moe.num_experts, mixture.config.moe.top_k) == ("mixtral", 4, 2)
    tokens_T, attend = torch.arange(50), PackedAttend(torch.tensor([0, 50], dtype=torch.int32), 24**-0.5)
    with torch.no_grad():
        expected, found = (model(tokens_T, tokens_T, attend, tokens_T) for model in (dense, mixture))
    assert expected.std() > 1 and (found - expected).abs().max() < 1e-4
    experts = mixture.layers[0].mlp.experts.up_proj
    assert torch.equal(experts[0], experts[3]) and mixture.layers[0].mlp.gate.weight.std() > 0.01
    again = [sys.executable, "-m", "miles_core.model.upcycle", tmp_path / "mixture", tmp_path / "again"]
    refused = subprocess.run(again, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.startswith("error: upcycle: only a Llama without biases"), refused.stderr


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GATE), "lacks tensors: layers.1.mlp.gate_proj.weight$"),
        (lambda t: t.update({"model.extra": torch.ones(1)}), "has tensors that the model does not: extra$"),
        (lambda t: t.update({GATE: torch.ones(72, 41)}), r"wrong shape: layers.1.mlp.gate_proj.weight \[72, 41\] instead of \[72, 40\]$"),
        (lambda t: t.update({GATE: t[GATE].double()}), r"another dtype than F32, BF16, F16: layers.1.mlp.gate_proj.weight \(F64\)$"),
        (lambda t: t.update({"lm_head.weight": torch.ones(2, 40)}), r"wrong shape: lm_head.weight \[2, 40\] instead of \[131, 40\]$"),
        (lambda t: t.update({"lm_head.weight": torch.ones(131, 40)}), "lm_head.weight differs from the embeddings it is tied to"),
        (lambda t: [t.pop(name) for name in list(t) if "layers.0" in name], r"(layers.0.\S+, ){4}layers.0.\S+ and 7 more$"),
    ],
    ids=["missing", "extra", "shape", "dtype", "tied shape", "tied but different", "many"],
)
def test_tensors_that_do_not_fit(change: Callable, message: str, checkpoint: Path) -> None:
    edit_tensors(checkpoint, change)
    with pytest.raises(ValueError, match=message):
        hf.load(checkpoint)


def test_a_tied_head_may_be_stored_twice(checkpoint: Path) -> None:
    """Some exporters do; some also store the frequencies of the rotation."""
    head = {"lm_head.weight": random_model(CONFIGS["qwen2-tied"]).embed_tokens.weight.detach()}
    edit_tensors(checkpoint, lambda t: t.update(head | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_same_weights(checkpoint, dict(random_model(CONFIGS["qwen2-tied"]).named_parameters()))


def test_an_untied_head_must_be_there(tmp_path: Path, words: Path) -> None:
    path = saved(CONFIGS["llama"], tmp_path / "model", words)
    edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="lacks tensors: lm_head.weight$"):
        hf.load(path)


def test_broken_directories(checkpoint: Path, tmp_path: Path) -> None:
    for name, damage, message in (
        ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-100]), "model.safetensors is not a whole safetensors file"),
        ("model.safetensors", lambda file: file.write_text("not here"), "model.safetensors is not a whole safetensors file"),
        ("model.safetensors", Path.unlink, "no weights: model.safetensors not found"),
        ("config.json", lambda file: file.write_text("{"), "config.json is not valid JSON"),
        ("config.json", Path.unlink, "is not a model directory in Hugging Face layout: it has no config.json"),
    ):
        damage(checkpoint / name)
        with pytest.raises(ValueError, match=message):
            hf.load(checkpoint)
    with pytest.raises(ValueError, match="no tokenizer: it has none of tokenizer.json"):
        hf.load_tokenizer(tmp_path)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no usable tokenizer"):
        hf.load_tokenizer(checkpoint)


def test_stop_ids_are_gathered_from_everywhere(tmp_path: Path, words: Path) -> None:
    path = saved(CONFIGS["llama"], tmp_path / "model", words)
    edit(path / "config.json", eos_token_id=7)
    edit(path / "generation_config.json", eos_token_id=[9, 5])
    assert hf.load_stop_ids(path) == (END, 5, 7, 9)
    for file in ("config.json", "generation_config.json"):
        edit(path / file, eos_token_id=None)
    assert hf.load_stop_ids(path) == (END,)
    edit(path / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match="no end-of-sequence token, so no answer could end"):
        hf.load_stop_ids(path)


def test_generation_settings_travel_with_the_tokenizer(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(checkpoint / "generation_config.json", top_p=0.8, do_sample=True, eos_token_id=7)
    config, tensors = hf.load_config(checkpoint), list(hf.load(checkpoint).named_parameters())
    hf.save(tmp_path / "next", config, tensors, checkpoint)
    monkeypatch.setattr(hf, "load_tokenizer", None)  # a run has loaded it once, and need not at every checkpoint
    hf.save(tmp_path / "run", config, tensors, checkpoint, (END, 7))
    for name in ("next", "run"):
        settings = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert settings == {"top_p": 0.8, "do_sample": True, "eos_token_id": [END, 7]}


def test_a_full_disk_is_one_sentence(tmp_path: Path, words: Path) -> None:
    """A limit on the size of files stands for the full disk; the tokenizer still fits, the weights do not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(ValueError, match="^cannot save to .*/model: .*File too large") as error:
            saved(CONFIGS["llama"], tmp_path / "model", words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot save to .*: .*Not a directory"):
        saved(CONFIGS["llama"], words / "tokenizer.json" / "model", words)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    assert hf.resolve(str(tmp_path)) == tmp_path
    for name in (str(tmp_path / "missing"), "./missing", "missing", "a/b/c", "~/model", "../a"):
        with pytest.raises(ValueError, match="no such directory, and not a Hub id"):
            hf.resolve(name)


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path: Path) -> None:
    """Where nothing answers, and where the user has said that there is no network."""
    code = """
import huggingface_hub.constants
from miles_core.model import hf
for huggingface_hub.constants.HF_HUB_OFFLINE in (False, True):
    try:
        hf.resolve("Qwen/Qwen3-0.6B")
    except ValueError as error:
        print(error)
"""
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("--model Qwen/Qwen3-0.6B: no such directory here, and the Hub cannot be reached") for line in lines), lines
