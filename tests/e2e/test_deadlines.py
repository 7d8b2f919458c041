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


# What the other rank was waiting for when its deadline passed: as it happens.
LOCK = r"TimeoutError: waited 4 s for the ring's lock: is process {pid} stopped\?"
GROUP = r"TimeoutError: waited 4 s for group \d+\b.*rank {rank} \(\w+( leader)?, pid {pid}\) was \w+"
ROUTES = r"routes of group \d+ sample \d from rank {rank} did not arrive \(the deadline is 4 s\)"
SLOT = (r"TimeoutError: no slot of the ring became free, and nothing was heard for \d s: "
        r"rank {rank} \(training leader, pid {pid}\) was .* \(step \d+\) \d\.\d s ago")  # fmt: skip
COLLECTIVE = "Timed out"


@pytest.mark.parametrize(
    ("rank", "flags", "waits"),
    [
        (0, ("--max-staleness", 0), (GROUP, ROUTES, LOCK)),
        (1, ("--max-staleness", 0), (SLOT, LOCK)),
        (1, ("--rollout-ranks-per-node", 0), (GROUP, COLLECTIVE, LOCK)),
    ],
    ids=["rollout", "training", "both in turn"],
)
def test_a_stopped_rank(tmp_path: Path, rank: int, flags: tuple, waits: tuple) -> None:
    job = Job(tmp_path, *FLAGS, "--timeout", TIMEOUT_S, *flags, ranks=2)
    job.wait_until(lambda: "step    2/" in job.out, "two steps")
    pid, stopped = job.rank_pid(rank), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    job.wait_until(lambda: "Error" in job.files[1].read_text(), "an error")
    said_after = time.monotonic() - stopped
    ended = job.end()
    assert said_after < 4 * TIMEOUT_S, f"{said_after:.1f} s; {ended}"
    assert ended.code == 1 and time.monotonic() - stopped < KILL_S + 6 * TIMEOUT_S, str(ended)
    said = ended.err.replace("\n", " ")
    assert any(re.search(wait.format(rank=rank, pid=pid), said) for wait in waits), str(ended)
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
