"""`--replay RUN_DIR` trains on what a run has journalled: the same losses and weights to the bit, whole or in part.

    python -m pytest tests/e2e/test_replay.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness import TASK, Job, sentence, steps, succeed

FLAGS = (
    *("--task", TASK, "--steps", 8, "--save-every", 3, "--prompts-per-step", 2, "--samples-per-prompt", 4, "--eval-prompts", 0),
    *("--max-staleness", 3, "--lr-schedule", "cosine", "--keep-checkpoints", 3, "--journal-keep", 0),
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run of a mixture of experts, with two rollout ranks; uneven rewards mix up the order of its groups."""
    cwd = tmp_path_factory.mktemp("recorded")
    succeed(cwd, *FLAGS, "--run-dir", "run", "--rollout-ranks-per-node", 2, ranks=3, E2E_REWARD_S="0.03")
    return cwd / "run"


def training(run_dir: Path) -> list[dict]:
    """All that a step's arithmetic decides."""
    names = ("train/", "rollout/")
    return [{k: v for k, v in step.items() if k.startswith(names) or k == "step"} for step in steps(run_dir)]


def test_the_whole_run_again(recorded: Path, tmp_path: Path) -> None:
    ended = succeed(tmp_path, "--replay", recorded, "--run-dir", "again")
    assert "rank   0  node 0  local 0  rollout + train" in ended.out
    assert max(step["train/staleness_max"] for step in training(recorded)) >= 1, "it was asynchronous"
    assert training(tmp_path / "again") == training(recorded)
    weights = [(path / "checkpoints/latest/model.safetensors").read_bytes() for path in (tmp_path / "again", recorded)]
    assert weights[0] == weights[1]
    assert (tmp_path / "again/steps.jsonl").read_text() == (recorded / "steps.jsonl").read_text()


def test_on_another_number_of_training_ranks(recorded: Path, tmp_path: Path) -> None:
    """The same groups in the same steps; figures agree but for rounding, and it says so."""
    ended = succeed(tmp_path, "--replay", recorded, "--steps", 3, "--run-dir", "again", "--lr-schedule", "constant", ranks=2)
    assert "replay: recorded on 1 training ranks, replayed on 2: sums are rounded otherwise, not bit for bit" in ended.out
    assert (tmp_path / "again/steps.jsonl").read_text() == "".join((recorded / "steps.jsonl").read_text().splitlines(keepends=True)[:3])
    for a, b in zip(steps(tmp_path / "again"), steps(recorded), strict=False):
        assert a["rollout/reward_mean"] == b["rollout/reward_mean"] and a["train/tokens"] == b["train/tokens"]
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-3, abs=1e-5)


def test_a_part_of_it(recorded: Path, tmp_path: Path) -> None:
    """From a checkpoint on, with the learning rates of the whole run."""
    succeed(tmp_path, "--replay", recorded, "--steps", "4:6", "--run-dir", "again")
    assert training(tmp_path / "again") == training(recorded)[3:6]
    weights = [(path / "checkpoints/step_000006/model.safetensors").read_bytes() for path in (tmp_path / "again", recorded)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--steps", "5:8"), "--steps 5:... needs the checkpoint of step 4; {run} has step_000003, step_000006, step_000008"),
        (("--steps", "7:12"), "--replay {run}: the groups of step 9 are not in its journal (it ends with step 8, and it can begin at step "
                              "1, 4, 7); give --steps A:B, and record with --journal-keep 0 to keep everything"),
        (("--steps", "6:5"), "--steps 6:5 is empty: the second is the last step"),
    ],
    ids=["no checkpoint", "too far", "empty"],
)  # fmt: skip
def test_refuses_what_is_not_recorded(recorded: Path, tmp_path: Path, flags: tuple, said: str) -> None:
    assert sentence(Job(tmp_path, "--replay", recorded, *flags).end()) == said.format(run=recorded)
    assert not (tmp_path / "runs").exists()


def test_a_damaged_group_stops_a_replay(recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded, tmp_path / "run", symlinks=True)
    file = sorted((tmp_path / "run/journal").iterdir())[0]
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    said = sentence(Job(tmp_path, "--replay", "run").end())
    assert said.startswith("--replay run: group ") and said.endswith(f"of run/journal/{file.name} is damaged: its checksum does not match")
    said = sentence(Job(tmp_path, "--replay", "nowhere").end())
    assert said.startswith("--replay nowhere is no run directory: its config.json cannot be read")
