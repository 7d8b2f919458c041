"""A job of two nodes, here two torchrun agents of two ranks each on one machine, started as slurm.sbatch starts them.

    python -m pytest tests/e2e/test_nodes.py
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from harness import TASK, consumed_groups, find, steps, two_nodes

FLAGS = (
    *("--task", TASK, "--steps", 9, "--save-every", 4, "--prompts-per-step", 2, "--samples-per-prompt", 4, "--eval-prompts", 2),
    *("--max-staleness", 3, "--timeout", 60),
)
ENV = {"MAX_RESTARTS": "1", "E2E_REWARD_S": "0.1"}


def test_a_rank_of_one_node_is_killed_and_all_nodes_start_again(tmp_path: Path) -> None:
    """Of node 1: node 0, which logs and keeps the checkpoints, has counted no failure then. Other ranks: chaos/long.py."""
    jobs = two_nodes(tmp_path, *FLAGS, **ENV)
    logging, _ = find(jobs, 1)
    logging.wait_until(lambda: "step 5/" in logging.out, "five steps")
    agent, pid = find(jobs, 3)
    os.kill(pid, signal.SIGKILL)
    ended = dict(zip(jobs, [job.end() for job in jobs], strict=True))
    assert [e.code for e in ended.values()] == [0, 0], str(list(ended.values()))
    killed = f"local rank 1 (pid {pid}) was killed by SIGKILL (out of memory? see dmesg); starting all ranks again, restart 1 of 1"
    said = {True: f"torchrun: {killed}", False: "torchrun: a rank of another node failed; starting all ranks again"}
    for job, e in ended.items():
        assert e.err.splitlines() == [said[job is agent]], str(e)
    (run,) = (tmp_path / "runs").iterdir()  # not a second one
    found = steps(run)
    assert [step["step"] for step in found] == list(range(1, 10))
    assert sorted(g for step in found for g in consumed_groups(step, 2)) == list(range(18))
    assert [json.loads(line)["incarnation"] for line in (run / "incarnations.jsonl").read_text().splitlines()] == [1, 2]


def test_sigterm_to_one_node_ends_all_in_order(tmp_path: Path) -> None:
    jobs = two_nodes(tmp_path, *FLAGS, "--run-dir", "run", **ENV)
    logging, _ = find(jobs, 1)
    logging.wait_until(lambda: "step 2/" in logging.out, "two steps")
    other, _ = find(jobs, 3)
    other.process.send_signal(signal.SIGTERM)
    ended = [job.end() for job in jobs]
    assert [(e.code, e.err) for e in ended] == [(0, ""), (0, "")], str(ended)
    done = len(steps(tmp_path / "run"))
    assert 2 <= done < 9 and (tmp_path / f"run/checkpoints/step_{done:06d}").exists()
