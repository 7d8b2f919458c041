"""A run that is asked to stop saves, ends with 0, and goes on with the same command as if it had never stopped.

    python -m pytest tests/e2e/test_stop.py
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from harness import TASK, Job, consumed_groups, steps, succeed

FLAGS = ("--task", TASK, "--steps", 9, "--prompts-per-step", 2, "--samples-per-prompt", 4, "--eval-prompts", 2, "--run-dir", "run")


@pytest.mark.parametrize(
    ("ranks", "number", "staleness"),
    [(0, signal.SIGINT, 0), (2, signal.SIGINT, 2), (2, signal.SIGTERM, 0)],
    ids=["Ctrl-C, one rank", "Ctrl-C", "SIGTERM"],
)
def test_stop_and_go_on(tmp_path: Path, ranks: int, number: signal.Signals, staleness: int) -> None:
    """The terminal interrupts the whole foreground group, SLURM signals every process of the job."""
    flags = (*FLAGS, "--max-staleness", staleness)
    job = Job(tmp_path, *flags, ranks=ranks, E2E_REWARD_S="0.2")
    job.wait_until(lambda: "step 2/" in job.out, "two steps")
    sent = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(job.process.pid, number)
    else:
        for pid in job.pids():  # reward processes too
            os.kill(pid, number)
    ended = job.end()
    assert ended.code == 0 and time.monotonic() - sent < 20, str(ended)
    assert ended.err == "", str(ended)
    done = len(steps(tmp_path / "run"))
    assert 2 <= done < 9
    assert f"stopped by {number.name} after step {done} of 9: {done} steps" in ended.out
    assert "go on with the same command and --run-dir run: nothing of what was finished is lost" in ended.out
    assert "(held out)" not in ended.out, "no evaluation once it is asked to stop"
    assert (tmp_path / f"run/checkpoints/step_{done:06d}").exists()
    again = succeed(tmp_path, *flags, ranks=ranks)
    assert f"resumed at step {done}" in again.out
    assert [step["step"] for step in steps(tmp_path / "run")] == list(range(1, 10))
    assert sorted(g for step in steps(tmp_path / "run") for g in consumed_groups(step, 2)) == list(range(18)), "each group once"
    assert all(step["rollout/verdict/ok"] == 1 for step in steps(tmp_path / "run")), "no sample was judged by how its process ended"


@pytest.mark.parametrize(
    ("ranks", "flags", "where", "done"),
    [
        (3, ("--rollout-ranks-per-node", 1), "1 train:score 28 SIGTERM", 2),  # 4 micro-batches of 3 lines a step
        (0, (), "0 train:score 4 SIGTERM", 0),
    ],
    ids=["two trainers", "one process, first step"],
)
def test_sigterm_in_the_middle_of_a_step_leaves_it(tmp_path: Path, ranks: int, flags: tuple, where: str, done: int) -> None:
    """A step can take longer than who sends SIGTERM waits: it is left, none of its groups counts, and it is done again from the journal."""
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    flags += ("--task", TASK, "--steps", 5, "--prompts-per-step", 2, "--samples-per-prompt", 8, "--run-dir", "run", "--max-staleness", 0)
    flags += ("--max-new-tokens", 16, "--max-context", 48, "--micro-batch-tokens", 48, "--eval-prompts", 0)
    for cwd in (whole, halted):
        cwd.mkdir()
    ended = Job(halted, *flags, ranks=ranks, script="tests/chaos/die_here.py", CHAOS=where).end()
    assert ended.code == 0 and ended.err == "" and f"after step {done} of 5" in ended.out, str(ended)
    assert (halted / f"run/checkpoints/step_{done:06d}").exists() == (done > 0)
    again = succeed(halted, *flags, ranks=ranks)
    assert (f"resumed at step {done}" in again.out) == (done > 0)
    found = steps(halted / "run")
    assert sorted(g for step in found for g in consumed_groups(step, 2)) == list(range(10)), "each group once"
    assert found[done]["ring/restored"] >= 2, "what the step had is not made again"
    succeed(whole, *flags, ranks=ranks)
    names = ("step", "train/loss", "train/grad_norm", "train/entropy", "rollout/reward_mean")
    assert [[step[n] for n in names] for step in found] == [[step[n] for n in names] for step in steps(whole / "run")]
    assert len({(cwd / "run/checkpoints/latest/model.safetensors").read_bytes() for cwd in (whole, halted)}) == 1


def test_a_second_interrupt_leaves_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, *FLAGS, "--max-staleness", 0, ranks=2, E2E_REWARD_S="0.2")
    job.wait_until(lambda: "step 2/" in job.out, "two steps")
    trainer = job.rank_pid(1)
    os.kill(trainer, signal.SIGSTOP)  # else it would be gone by the time of the second one
    os.killpg(job.process.pid, signal.SIGINT)
    time.sleep(0.5)
    os.killpg(job.process.pid, signal.SIGINT)
    job.wait_until(lambda: "interrupted" in job.files[1].read_text(), "the end of the other rank")
    time.sleep(0.5)  # for torchrun to see it
    os.kill(trainer, signal.SIGCONT)
    ended = job.end()
    assert ended.code == 130 and "interrupted" in ended.err and ended.seconds < 60, str(ended)
    assert not (tmp_path / "run/checkpoints/latest").exists()
