"""kill -9 of a rank: the job starts again by itself, without a flag, and every group is trained on exactly once. More in tests/chaos.

    python -m pytest tests/e2e/test_restart.py
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from harness import TASK, Job, consumed_groups, steps

FLAGS = ("--task", TASK, "--steps", 9, "--save-every", 4, "--prompts-per-step", 2, "--samples-per-prompt", 4, "--eval-prompts", 2)


def test_a_killed_job_goes_on_by_itself_where_it_was(tmp_path: Path) -> None:
    job = Job(tmp_path, *FLAGS, "--max-staleness", 3, ranks=3, MAX_RESTARTS="1", E2E_REWARD_S="0.1")
    job.wait_until(lambda: "step 5/" in job.out, "five steps")
    pid = job.rank_pid(2)
    os.kill(pid, signal.SIGKILL)
    ended = job.end()
    assert ended.code == 0, str(ended)
    assert ended.err.splitlines() == [
        f"torchrun: local rank 2 (pid {pid}) was killed by SIGKILL (out of memory? see dmesg); starting all ranks again, restart 1 of 1"
    ]
    (run,) = (tmp_path / "runs").iterdir()  # a restart goes on in the directory of the first start
    found = steps(run)
    assert [step["step"] for step in found] == list(range(1, 10))
    assert sorted(g for step in found for g in consumed_groups(step, 2)) == list(range(18))
    assert found[-1]["ring/restored"] > 0
    assert [json.loads(line)["incarnation"] for line in (run / "incarnations.jsonl").read_text().splitlines()] == [1, 2]
