"""A run that was killed goes on with the same command.

    python -m pytest tests/e2e/test_resume.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from harness import TASK, Job, consumed_groups, sentence, steps, succeed

FLAGS = (
    *("--task", TASK, "--steps", 8, "--save-every", 4, "--prompts-per-step", 2, "--samples-per-prompt", 4),
    *("--eval-prompts", 2, "--run-dir", "run", "--lr-schedule", "cosine"),
)
SYNC, ASYNC = ("--max-staleness", 0), ("--max-staleness", 2)
CHECKPOINTS = Path("run/checkpoints")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("uninterrupted")
    succeed(cwd, *FLAGS, *SYNC)
    return cwd


def killed_after_the_first_checkpoint(cwd: Path, *flags: object) -> None:
    """Two ranks; the one that trains is killed. Slow rewards keep the job from ending before that."""
    job = Job(cwd, *FLAGS, *flags, ranks=2, E2E_REWARD_S="0.1")
    job.wait_until((cwd / CHECKPOINTS / "step_000004").exists, "the checkpoint of step 4")
    os.kill(job.rank_pid(1), signal.SIGKILL)
    assert job.end().code == 128 + signal.SIGKILL
    assert not (cwd / CHECKPOINTS / "step_000008").exists()


def figures(cwd: Path) -> list[list[float]]:
    """What a synchronous run must repeat to the bit."""
    names = ("step", "train/loss", "train/grad_norm", "train/lr", "rollout/reward_mean", "train/entropy", "train/ratio_max")
    return [[step[name] for name in names] for step in steps(cwd / "run")]


def weights(cwd: Path) -> bytes:
    return (cwd / CHECKPOINTS / "latest/model.safetensors").read_bytes()


def consumed(cwd: Path) -> list[int]:
    return sorted(group for step in steps(cwd / "run") for group in consumed_groups(step, 2))


def test_synchronous_run_resumes_bit_for_bit(uninterrupted: Path, tmp_path: Path) -> None:
    killed_after_the_first_checkpoint(tmp_path, *SYNC)
    half_written = tmp_path / CHECKPOINTS / ".tmp_step_000006"
    half_written.mkdir()
    (half_written / "model.safetensors").write_bytes(b"half")
    ended = succeed(tmp_path, *FLAGS, *SYNC, ranks=2)
    assert "run directory: run, resumed at step 4" in ended.out
    assert not half_written.exists()
    assert figures(tmp_path) == figures(uninterrupted) and weights(tmp_path) == weights(uninterrupted)
    assert consumed(tmp_path) == list(range(16))


def test_asynchronous_run_resumes(tmp_path: Path) -> None:
    """Every group is trained on once, over both lives of the run."""
    killed_after_the_first_checkpoint(tmp_path, *ASYNC)
    succeed(tmp_path, *FLAGS, *ASYNC, ranks=2)
    assert [step["step"] for step in steps(tmp_path / "run")] == list(range(1, 9))
    assert consumed(tmp_path) == list(range(16))
    assert all(step.get("train/logp_diff_max", 0.0) == 0.0 and step["train/staleness_max"] <= 2 for step in steps(tmp_path / "run"))


@pytest.mark.parametrize("file", ["model.safetensors", "train_state/__0_0.distcp"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(uninterrupted: Path, tmp_path: Path, file: str) -> None:
    """Loudly; and what was sampled from the versions that this erases is made again."""
    shutil.copytree(uninterrupted / "run", tmp_path / "run", symlinks=True)
    path = tmp_path / CHECKPOINTS / "step_000008" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    ended = succeed(tmp_path, *FLAGS, *SYNC)
    said = f"{CHECKPOINTS}/step_000008/{file} is not what was saved (size or digest differ)"
    assert f"WARNING: {said}. Set aside as {CHECKPOINTS}/damaged_step_000008; trying the one before" in ended.out
    assert "run directory: run, resumed at step 4" in ended.out
    assert figures(tmp_path) == figures(uninterrupted)
    last = steps(tmp_path / "run")[-1]
    assert (last["ring/restored"], last["ring/made_again"]) == (2, 6), "those of step 5 were sampled from version 4, which counts"
    assert (tmp_path / CHECKPOINTS / "step_000008/model.safetensors").read_bytes() == weights(uninterrupted)


def test_an_older_checkpoint_can_be_asked_for_and_what_came_after_is_set_aside(uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted / "run", tmp_path / "run", symlinks=True)
    ended = succeed(tmp_path, *FLAGS, *SYNC, "--resume", CHECKPOINTS / "step_000004")
    assert f"{CHECKPOINTS}/erased_step_000008: set aside, the run goes on from step 4" in ended.out
    assert figures(tmp_path) == figures(uninterrupted) and weights(tmp_path) == weights(uninterrupted)
    assert [json.loads(line) for line in (tmp_path / "run/incarnations.jsonl").read_text().splitlines()] == [
        {"incarnation": 1, "version": 0, "parent": 0, "trainers": 1},
        {"incarnation": 2, "version": 4, "parent": 1, "trainers": 1},
    ]
    said = sentence(Job(tmp_path, *FLAGS, "--resume", "run/checkpoints/step_000005").end())
    assert said.startswith("--resume run/checkpoints/step_000005 is no checkpoint: give auto, none, or a directory")


def test_from_the_beginning(uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted / "run", tmp_path / "run", symlinks=True)
    succeed(tmp_path, *FLAGS, *SYNC, "--resume", "none", "--steps", 4, "--lr-schedule", "constant")
    assert [step["step"] for step in steps(tmp_path / "run")] == [1, 2, 3, 4]
    assert steps(tmp_path / "run")[-1]["ring/restored"] == 0
    names = sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir())
    assert names == ["erased_step_000004", "erased_step_000008", "latest", "step_000004"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--run-dir run has done its 8 steps: raise --steps above that, or give another directory"),
        (("--steps", 9, "--prompts-per-step", 3), "--prompts-per-step 3 cannot resume a run of 2: a step is another one then"),
    ],
    ids=["done", "another-step"],
)
def test_refuses_to_resume(uninterrupted: Path, tmp_path: Path, flags: tuple, said: str) -> None:
    shutil.copytree(uninterrupted / "run", tmp_path / "run", symlinks=True)
    assert sentence(Job(tmp_path, *FLAGS, *SYNC, *flags).end()) == said
