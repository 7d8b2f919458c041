"""Mixtures of experts as whole runs: fifty strict steps, routers that are balanced or frozen, replay switched off.

    python -m pytest tests/e2e/test_mixture.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import Job, sentence, steps, succeed

from miles_core.assets import TINY, tokenizer
from miles_core.model import hf
from miles_core.model.layers import named_weights
from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import Transformer

SMALL = ("--prompts-per-step", 4, "--samples-per-prompt", 4, "--eval-prompts", 0, "--run-dir", "run")
RATE = 0.01
UNEVEN = """
from miles_core.tasks import Task, sort

def task(seed, data):
    return Task("uneven", sort.task(seed, "", "").prompt, lambda answer, text: sum(map(ord, text)) % 7 / 7, 10)
"""  # random weights never sort: rewards that differ all the same


def test_fifty_strict_steps(tmp_path: Path) -> None:
    """Sampler and trainer agree about every log-prob and every expert, on every step: each holds the other to it."""
    ended = succeed(tmp_path, "--steps", 50, "--rollout-ranks-per-node", 0, *SMALL)
    assert ended.out.count("route_diff 0.00%") == 50
    lines = steps(tmp_path / "run")
    assert len(lines) == 50
    for step in lines:
        assert step["train/logp_diff_max"] == step["train/logp_diff_frac"] == step["train/route_diff_frac"] == 0.0, step
        assert step["train/logp_diff_tokens"] == step["train/tokens"] > 0
        # A row is 3 layers x top-2 of 8 experts, one byte each; the last token of a sample has none; a bit for each token beside it.
        assert 5.5 < step["rollout/r3_bytes_per_token"] < 6.0 + 1 / 8


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GLM-4.5 with random weights that speaks the embedded policy's language."""
    path = tmp_path_factory.mktemp("glm")
    moe = MoEConfig(
        8, 2, 24, (1, 2), scoring="sigmoid", scale=1.5, num_groups=4, top_groups=2, correction_bias=True, shared_size=24
    )  # fmt: skip
    config = replace(hf.load_config(TINY), family="glm4_moe", hidden_size=48, intermediate_size=64, rotary_dim=12, moe=moe)
    model, generator = hf.build(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in named_weights(model):
            if name.endswith("correction_bias"):
                weight.zero_()
            else:
                weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.1, generator=generator)
    tokenizer.save(path)
    hf.save(path, config, named_weights(model), path)
    return path


def trained(cwd: Path, glm: Path, *flags: object, ranks: int = 0) -> tuple[Transformer, list[dict]]:
    (cwd / "uneven.py").write_text(UNEVEN)
    succeed(cwd, "--model", glm, "--task", "uneven.py", "--steps", 3, "--rollout-ranks-per-node", 0, *SMALL, *flags, ranks=ranks)
    lines = steps(cwd / "run")
    assert [step["train/logp_diff_max"] for step in lines] == [0.0] * 3
    return hf.load(cwd / "run/checkpoints/latest"), lines


@pytest.mark.parametrize("ranks", [0, 2])
def test_bias_moves_by_the_rate_towards_an_even_load(tmp_path: Path, glm: Path, ranks: int) -> None:
    dealt = ("--expert-parallel", 2) if ranks else ()
    model, lines = trained(tmp_path, glm, "--router-bias-rate", RATE, "--activation-checkpointing", *dealt, ranks=ranks)
    for layer in (1, 2):
        moved = model.layers[layer].mlp.gate.e_score_correction_bias / RATE
        assert torch.allclose(moved, moved.round(), atol=1e-4) and moved.abs().max() <= 3.001
        assert moved.min() < 0 < moved.max(), "some had too much, some too little"
        entropy = [step[f"train/expert_entropy/layer_{layer}"] for step in lines]
        assert all(0 < value < 1 for value in entropy)
    assert "train/router_loss" not in lines[0]


def test_frozen_routers_stay_and_balanced_ones_move(tmp_path: Path, glm: Path) -> None:
    start = hf.load(glm)
    for name, flags in (("frozen", ("--freeze-router",)), ("balanced", ("--router-balance-coef", 0.1, "--router-z-coef", 0.01))):
        (tmp_path / name).mkdir()
        model, lines = trained(tmp_path / name, glm, *flags)
        same = [torch.equal(a.mlp.gate.weight, b.mlp.gate.weight) for a, b in zip(model.layers[1:], start.layers[1:], strict=True)]
        assert same == [name == "frozen"] * 2
        assert not torch.equal(model.layers[1].mlp.experts.up_proj, start.layers[1].mlp.experts.up_proj)
        assert ("train/router_loss" in lines[0]) == (name == "balanced")
    assert all(step["train/router_loss"] > 0 for step in lines)


def test_without_replay_nothing_is_recorded(tmp_path: Path) -> None:
    succeed(tmp_path, "--steps", 3, *SMALL, "--routing-replay", "off", ranks=2)
    for step in steps(tmp_path / "run"):
        assert not {"train/route_diff_frac", "rollout/r3_bytes_per_token", "perf/r3_fetch_s"} & step.keys()
        assert step.get("train/logp_diff_max", 0.0) == 0.0 and step["train/expert_entropy"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--router-bias-rate", 0.1], "--router-bias-rate: the routers of --model tiny have no correction bias; use --router-balance-coef"),
        (["--expert-parallel", 2], "--expert-parallel 2 does not divide the 1 training ranks"),
        (["--router-z-coef", -1], "--router-z-coef must be a number >= 0"),
        (["--routing-replay", "yes"], "--routing-replay: invalid choice: 'yes'"),
    ],
)
def test_flags(tmp_path: Path, arguments: list, said: str) -> None:
    assert said in sentence(Job(tmp_path, "--dry-run", *arguments).end())


def test_flags_of_routers_are_refused_for_a_dense_model(tmp_path: Path) -> None:
    config = replace(hf.load_config(TINY), family="qwen3", moe=None)
    dense = hf.build(config)
    for parameter in dense.parameters():
        torch.nn.init.ones_(parameter)
    (tmp_path / "dense").mkdir()
    tokenizer.save(tmp_path / "dense")
    hf.save(tmp_path / "dense", config, dense.named_parameters(), tmp_path / "dense")
    for flag in (("--router-balance-coef", 0.1), ("--freeze-router",)):
        said = sentence(Job(tmp_path, "--model", "dense", "--dry-run", *flag).end())
        assert f"{flag[0]} is for a mixture of experts, and --model dense is dense: leave it out" in said
