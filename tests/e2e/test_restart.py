"""kill -9 of a rank, whichever and whenever: the job starts again by itself, and every group is trained on exactly once.

    python -m pytest tests/e2e/test_restart.py
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from harness import TASK, Job, consumed_groups, steps, succeed

FLAGS = ("--task", TASK, "--steps", 9, "--save-every", 4, "--prompts-per-step", 2, "--samples-per-prompt", 4, "--eval-prompts", 2)
NAMES = ("step", "train/loss", "train/grad_norm", "train/lr", "rollout/reward_mean", "train/entropy", "train/ratio_max")


def run_of(cwd: Path) -> Path:
    (run,) = (cwd / "runs").iterdir()  # a restart goes on in the directory of the first start
    return run


def test_asynchronous_run_survives_three_kills(tmp_path: Path) -> None:
    """The training rank, a rollout rank, the training rank; the last time while a checkpoint is being written, if it comes to that."""
    job = Job(tmp_path, *FLAGS, "--max-staleness", 3, ranks=3, MAX_RESTARTS="3", E2E_REWARD_S="0.05")
    log, took = [], []
    for life, (rank, after) in enumerate([(2, "step 2/"), (0, "step 4/"), (2, "step 6/")]):
        ready = f"{after} of life {life + 1}"
        job.wait_until(lambda after=after, life=life: job.out.count("run directory:") > life and after in job.out, ready)
        log.append(job.rank_pid(rank))
        os.kill(log[-1], signal.SIGKILL)
        killed, lines = time.monotonic(), job.out.count("step ")
        job.wait_until(lambda lines=lines: job.out.count("/9 [") > 0 and job.out.count("step ") > lines + 1, "a step after the restart")
        took.append(time.monotonic() - killed)
    ended = job.end()
    assert ended.code == 0, str(ended)
    for pid in log:
        assert f"(pid {pid}) was killed by SIGKILL (out of memory? see dmesg); starting all ranks again" in ended.err
    found = steps(run_of(tmp_path))
    assert [step["step"] for step in found] == list(range(1, 10))
    assert sorted(g for step in found for g in consumed_groups(step, 2)) == list(range(18))
    assert all(step.get("train/logp_diff_max", 0.0) == 0.0 and 0 <= step["train/staleness_max"] <= 3 for step in found)
    lives = [json.loads(line) for line in (run_of(tmp_path) / "incarnations.jsonl").read_text().splitlines()]
    assert [line["incarnation"] for line in lives] == [1, 2, 3, 4]
    print("seconds from the kill to the next step:", took)


def test_synchronous_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """One rollout rank and a kill against two and none: the same bits."""
    flags = (*FLAGS, "--max-staleness", 0)
    (tmp_path / "quiet").mkdir()
    succeed(tmp_path / "quiet", *flags, "--run-dir", "run", "--rollout-ranks-per-node", 2, ranks=3)
    job = Job(tmp_path, *flags, ranks=2, MAX_RESTARTS="1", E2E_REWARD_S="0.05")
    job.wait_until(lambda: "step 6/" in job.out, "step 6")
    os.kill(job.rank_pid(1), signal.SIGKILL)
    ended = job.end()
    assert ended.code == 0 and "resumed at step 4" in ended.out, str(ended)
    figures = [[[step[name] for name in NAMES] for step in steps(run)] for run in (run_of(tmp_path), tmp_path / "quiet/run")]
    assert figures[0] == figures[1]
    weights = [(run / "checkpoints/latest/model.safetensors").read_bytes() for run in (run_of(tmp_path), tmp_path / "quiet/run")]
    assert weights[0] == weights[1]
