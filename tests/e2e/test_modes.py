"""Every way to arrange a run: worlds, pacing, transports, losses. Properties that hold whatever the arrangement.

    python -m pytest tests/e2e/test_modes.py

Rewards name their groups (group_task.py), so that the metrics show which groups each step was trained on.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from harness import TASK, consumed_groups, steps, succeed

NUM_GROUPS = 16
SYNC_FLAGS = (
    *("--max-staleness", 0, "--prompts-per-step", 4, "--steps", 4, "--kl-coef", 0.01, "--activation-checkpointing"),
    *("--temperature", 0.7, "--top-p", 0.9, "--top-k", 20, "--micro-batch-tokens", 128, "--max-context", 64),
)
WORLDS = {  # ranks, flags
    "one": (0, ()),
    "one-cramped": (0, ("--kv-tokens", 128, "--max-sequences", 3, "--prefill-tokens", 7)),  # preemption, chunks of a prompt
    "1-rollout-1-train": (2, ("--rollout-ranks-per-node", 1)),
    "2-rollout-1-train": (3, ("--rollout-ranks-per-node", 2)),
    "4-rollout-1-train": (5, ("--rollout-ranks-per-node", 4)),
    "1-rollout-2-train": (3, ("--rollout-ranks-per-node", 1)),
    "2-colocated": (2, ("--rollout-ranks-per-node", 0)),
    "2-colocated-experts-dealt": (2, ("--rollout-ranks-per-node", 0, "--expert-parallel", 2)),
    "1-rollout-2-train-experts-dealt": (3, ("--rollout-ranks-per-node", 1, "--expert-parallel", 2, "--routing-replay", "record")),
    "2-colocated-zero-3": (2, ("--rollout-ranks-per-node", 0, "--reshard-after-forward")),
}
ASYNC_FLAGS = ("--prompts-per-step", 2, "--steps", 8)
MODES = {  # ranks, max_staleness, flags
    "broadcast-keep": (
        *(2, 1, ("--weight-transport", "broadcast", "--on-update", "keep", "--loss", "gspo", "--aggregation", "sequence_mean")),
    ),
    "2-rollout-decoupled": (
        *(3, 3, ("--rollout-ranks-per-node", 2, "--anchor", "decoupled", "--loss", "cispo", "--aggregation", "fixed_length")),
    ),
    "2-train-broadcast": (
        *(3, 3, ("--rollout-ranks-per-node", 1, "--weight-transport", "broadcast", "--advantage", "reinforce_pp", "--dual-clip", 3)),
    ),
    "skip-zero-std": (2, 1, ("--skip-zero-std", "--advantage", "rloo", "--icepop-low", 0.5, "--icepop-high", 2, "--lr-schedule", "linear")),
    "one-ahead-of-itself": (0, 2, ("--advantage", "grpo_no_std", "--kl-coef", 0.1, "--kl-kind", "k2")),
}


def run(cwd: Path, ranks: int, *flags: object) -> list[dict]:
    """The lines of all steps of a run that must end well, and whose checkpoint must hold every group as consumed."""
    fixed = ("--task", TASK, "--samples-per-prompt", 4, "--eval-prompts", 2, "--run-dir", "run")
    succeed(cwd, *fixed, *flags, ranks=ranks)
    meta = json.loads((cwd / "run/checkpoints/latest/train_state/meta.json").read_text())
    assert (meta["base"], meta["beyond"]) == (NUM_GROUPS, []), meta
    return steps(cwd / "run")


@pytest.fixture(scope="module")
def sync_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    return {world: run(tmp_path_factory.mktemp(world), ranks, *SYNC_FLAGS, *flags) for world, (ranks, flags) in WORLDS.items()}


@pytest.mark.parametrize("world", WORLDS)
def test_synchronous_run_is_on_policy(sync_runs: dict, world: str) -> None:
    assert len(sync_runs[world]) == 4
    for number, step in enumerate(sync_runs[world]):
        assert step["train/logp_diff_max"] == step["train/logp_diff_frac"] == 0.0, step
        assert step["train/logp_diff_tokens"] == step["train/tokens"] > 0, step
        assert step["train/staleness_max"] == step["rollout/version_span_max"] == step["train/route_diff_frac"] == 0, step
        assert consumed_groups(step, 4) == list(range(4 * number, 4 * number + 4)), step


@pytest.mark.parametrize("world", ["one-cramped", "1-rollout-1-train", "2-rollout-1-train", "4-rollout-1-train"])
def test_how_it_is_rolled_out_changes_no_bit(sync_runs: dict, world: str) -> None:
    def figures(step: dict) -> dict:
        return {name: value for name, value in step.items() if name.startswith(("train/", "rollout/")) and "hit_rate" not in name}

    assert [figures(step) for step in sync_runs[world]] == [figures(step) for step in sync_runs["one"]]


@pytest.mark.parametrize("world", [world for world in WORLDS if "2-train" in world or "2-colocated" in world])
def test_two_training_ranks_compute_the_step_of_one(sync_runs: dict, world: str) -> None:
    """The same samples; loss and gradient differ by rounding alone (FSDP adds up in another order)."""
    first, reference = sync_runs[world][0], sync_runs["one"][0]
    assert first["rollout/reward_mean"] == reference["rollout/reward_mean"]
    assert first["train/tokens"] == reference["train/tokens"]
    assert first["train/loss"] == pytest.approx(reference["train/loss"], abs=1e-6)
    assert first["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_asynchronous_run(tmp_path: Path, mode: str) -> None:
    ranks, max_staleness, flags = MODES[mode]
    lines = run(tmp_path, ranks, *ASYNC_FLAGS, "--max-staleness", max_staleness, *flags)
    assert len(lines) == 8
    assert sorted(group for step in lines for group in consumed_groups(step, 2)) == list(range(NUM_GROUPS))
    stale = [step["train/staleness_max"] for step in lines if "train/staleness_max" in step]
    assert 1 <= max(stale) <= max_staleness, stale  # the ring is larger than a step, so the second step is trained on first weights
    for step in lines:
        assert step.get("train/logp_diff_max", 0.0) == 0.0, step
        assert math.isfinite(step["train/loss"]) and math.isfinite(step["train/grad_norm"]), step
    assert lines[0]["train/logp_diff_tokens"] == lines[0]["train/tokens"] > 0  # before the first update every token is fresh


ALWAYS_RIGHT = """
from miles_core.tasks import Task, sort

def task(seed, data):
    return Task("easy", sort.task(seed, "", "").prompt, lambda answer, text: 1.0, 10)
"""


def test_step_without_a_sample_to_learn_from(tmp_path: Path) -> None:
    """Every group is left out by --skip-zero-std: the step happens all the same, and its rewards are reported."""
    (tmp_path / "easy.py").write_text(ALWAYS_RIGHT)
    flags = ("--task", "easy.py", "--skip-zero-std", "--prompts-per-step", 2, "--steps", 2, "--eval-prompts", 0, "--run-dir", "run")
    ended = succeed(tmp_path, *flags)
    assert "nan" in ended.out
    for step in steps(tmp_path / "run"):
        assert (step["train/tokens"], step["train/loss"], step["train/grad_norm"]) == (0, 0, 0), step
        assert (step["rollout/reward_mean"], step["rollout/zero_std_frac"], step["train/staleness_mean"]) == (1, 1, None), step
