"""A rank that stops without dying (SIGSTOP): the job ends within its deadline and says who, doing what, and since when.

    python -m pytest tests/e2e/test_deadlines.py
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, Job

TIMEOUT_S = 4.0
KILL_S = 5.0  # after which the launcher kills a rank that does not listen
FLAGS = ("--steps", 1000, "--prompts-per-step", 2, "--samples-per-prompt", 4, "--eval-prompts", 0, "--run-dir", "run")


@pytest.mark.parametrize(
    ("rank", "flags", "said"),
    [
        (0, ("--max-staleness", 0), r"(TimeoutError: waited 4 s for group \d+ .*rank 0 \(rollout, pid {pid}\) was \w+"
                                    r"|routes of group \d+ sample \d from rank 0 did not arrive \(the deadline is 4 s\))"),
        (1, ("--max-staleness", 0), r"TimeoutError: no slot of the ring became free, and nothing was heard for \d s: "
                                    r"rank 1 \(training leader, pid {pid}\) was .* \(step \d+\) \d\.\d s ago"),
        (1, ("--rollout-ranks-per-node", 0), r"(TimeoutError: waited 4 s for group|Timed out)"),
    ],
    ids=["rollout", "training", "both in turn"],  # the last one waits for a group, or in a collective, as it happens
)  # fmt: skip
def test_a_stopped_rank(tmp_path: Path, rank: int, flags: tuple, said: str) -> None:
    job = Job(tmp_path, *FLAGS, "--timeout", TIMEOUT_S, *flags, ranks=2)
    job.wait_until(lambda: "step    2/" in job.out, "two steps")
    pid, stopped = job.rank_pid(rank), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    job.wait_until(lambda: "Error" in job.files[1].read_text(), "an error")
    assert time.monotonic() - stopped < 4 * TIMEOUT_S
    ended = job.end()
    assert ended.code == 1 and time.monotonic() - stopped < KILL_S + 6 * TIMEOUT_S, str(ended)
    assert re.search(said.format(pid=pid), ended.err.replace("\n", " ")), str(ended)
    table = ended.err[ended.err.index("what the ranks of node 0 did last:") :].splitlines()[1:]
    lines = [line for line in table if f"pid {pid})" in line]
    ages = [float(re.search(r"([\d.]+) s ago", line)[1]) for line in lines]
    assert ages and max(ages) > TIMEOUT_S * 0.7, "the board shows who fell silent"


def test_what_a_running_job_does_can_be_looked_at(tmp_path: Path) -> None:
    job = Job(tmp_path, *FLAGS, ranks=3)
    job.wait_until(lambda: "step    3/" in job.out, "three steps")
    look = [sys.executable, "-m", "miles_core.status", str(tmp_path / "run"), "--once"]
    seen = subprocess.run(look, cwd=ROOT, capture_output=True, text=True)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end().code == 0
    assert seen.returncode == 0, seen.stderr
    first, *ranks = seen.stdout.splitlines()
    assert re.fullmatch(r"node0: step \d+, live versions of its rollout ranks \[\d+\]", first)
    assert [line.split(" (")[0].strip() for line in ranks] == ["rank 0", "rank 1", "rank 2"]
    assert "(rollout, pid" in ranks[0] and "(training leader, pid" in ranks[1] and "(training, pid" in ranks[2]
    assert all(float(re.search(r"([\d.]+) s ago", line)[1]) < 20 for line in ranks)
    after = subprocess.run(look, cwd=ROOT, capture_output=True, text=True)
    assert after.returncode == 0 and re.fullmatch(r"node0: its run has ended \(pid \d+\)\n", after.stdout)
    nothing = subprocess.run([*look[:-2], str(tmp_path), "--once"], cwd=ROOT, capture_output=True, text=True)
    assert nothing.returncode == 2 and nothing.stderr.startswith(f"error: {tmp_path} has no status")
