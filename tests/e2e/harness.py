"""Runs a whole job as a user would, with a deadline, and checks that nothing of it is left.

    job = Job(tmp_path, "--steps", "2", ranks=2)           # launch/run.sh; ranks=0: plain python train.py
    job.wait_until(lambda: "step 1/" in job.out, "a first step")
    os.kill(job.rank_pid(1), signal.SIGKILL)
    ended = job.end()                                      # waits; ended.code, ended.out, ended.err

Every process of a job inherits a mark in its environment, by which it is found whatever its parent, group or session has become.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles_core.guard import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
TASK = Path(__file__).parent / "group_task.py"
DEADLINE_S = 120.0
LEFT_S = 5.0  # how long what is killed may take to disappear
_MARK = "MILES_E2E_JOB"
# What env.sh, torchrun or SLURM would set: a job gets it from what starts it, not from whoever runs the tests.
_NOT_INHERITED = ("OMP_", "TORCH", "GLOO_", "NPROC", "SLURM_", "LOGLEVEL", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "DRY", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Ended:
    """How a job ended: exit code (-n: killed by signal n), what it printed, and its duration."""

    code: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.out[-4000:]}\n--- stderr\n{self.err[-4000:]}"


class Job:
    """One job, started at once. `ranks` 0: one process, without torchrun. `script`: a file of ours, or "-m module"."""

    def __init__(self, cwd: Path, *arguments: object, ranks: int = 0, script: str = "train.py", deadline_s: float = DEADLINE_S, **env: str):
        command = [sys.executable, *(script.split() if script.startswith("-m ") else [str(ROOT / script)])]
        if ranks and script == "train.py":
            command = [str(ROOT / "launch/run.sh")]
        elif ranks:
            torchrun = ("--standalone", "--local-addr", "localhost", "--max-restarts", env.get("MAX_RESTARTS", "0"))
            command[1:1] = [str(ROOT / "launch/torchrun.py"), *torchrun, "--nproc-per-node", str(ranks)]
            env = {"GLOO_SOCKET_IFNAME": "lo"} | env  # as in launch/env.sh
        self.mark = f"{_MARK}={uuid.uuid4().hex}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        ours = {"MAX_RESTARTS": "0", "NPROC": str(ranks), "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.files = [cwd / f"job-{self.mark[-8:]}.{name}" for name in ("out", "err")]
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.started, self.deadline_s = time.monotonic(), deadline_s
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            self.process = subprocess.Popen(
                [*command, *map(str, arguments)], cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                env=kept | ours | env | dict([self.mark.split("=")]), preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )  # fmt: skip

    @property
    def out(self) -> str:
        return self.files[0].read_text()

    def pids(self) -> list[int]:
        """Processes of this job that are still there."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self.mark in environment(pid)]

    def rank_pid(self, rank: int) -> int:
        """The process of one rank of a torchrun. Its reward processes inherit RANK, but no rank is the child of a rank."""
        of_rank = [pid for pid in self.pids() if f"RANK={rank}" in environment(pid)]
        return next(pid for pid in of_rank if _parent(pid) not in of_rank)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Until `condition` holds. Fails when the job ends before that, and at the deadline."""
        while not condition():
            if self.process.poll() is not None or time.monotonic() - self.started > self.deadline_s:
                raise AssertionError(f"waited for {what}: {self.end()}")
            time.sleep(0.01)

    def end(self) -> Ended:
        """Wait for the end. Asserts that it came before the deadline, and that no process and no shared memory is left."""
        try:
            self.process.wait(max(0.0, self.deadline_s - (time.monotonic() - self.started)))
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
        seconds = time.monotonic() - self.started
        left = _after(LEFT_S, self.pids) if in_time else self.pids()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        ended = Ended(self.process.wait(LEFT_S), *(file.read_text() for file in self.files), seconds)
        assert in_time, f"still running at the deadline of {self.deadline_s:.0f} s: {ended}"
        assert not left, f"processes {left} were left behind: {ended}"
        in_shm = _after(LEFT_S, lambda: sorted(set(os.listdir("/dev/shm")) - self.shared_memory))
        assert not in_shm, f"/dev/shm holds {in_shm}: {ended}"
        return ended


def two_nodes(cwd: Path, *arguments: object, deadline_s: float = DEADLINE_S, **env: str) -> list[Job]:
    """Two torchrun agents of two ranks each on this machine, started as slurm.sbatch starts one on every node. Ranks 0 and 2 roll out."""
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    meet = f"--nnodes 2 --rdzv-backend c10d --rdzv-id {port} --rdzv-endpoint localhost:{port} --local-addr localhost"
    env = {"TORCHRUN_ARGS": meet, "GLOO_SOCKET_IFNAME": "lo"} | env
    return [Job(cwd, *arguments, ranks=2, deadline_s=deadline_s, **env) for _ in range(2)]


def find(jobs: list[Job], rank: int) -> tuple[Job, int]:
    """The agent and the process of a rank, once it is there. Which agent becomes node 0 is theirs to decide."""

    def agents() -> list[Job]:
        return [job for job in jobs if any(f"RANK={rank}" in environment(pid) for pid in job.pids())]

    jobs[0].wait_until(lambda: bool(agents()), f"rank {rank}")
    (job,) = agents()
    return job, job.rank_pid(rank)


def succeed(cwd: Path, *arguments: object, **kwargs: object) -> Ended:
    """Run a job that must end well."""
    ended = Job(cwd, *arguments, **kwargs).end()
    assert ended.code == 0, str(ended)
    return ended


def sentence(ended: Ended) -> str:
    """The one sentence of a job that ended by a mistake of its user: exit code 2, and nothing else on stderr."""
    lines = ended.err.splitlines()
    assert ended.code == 2 and len(lines) == 1 and lines[0].startswith("error: "), str(ended)
    return lines[0].removeprefix("error: ")


def lines(run_dir: Path) -> list[dict]:
    """Every line of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(run_dir: Path) -> list[dict]:
    """The line of every optimizer step, in order."""
    return [line for line in lines(run_dir) if "train/loss" in line]


def consumed_groups(step: dict, prompts_per_step: int) -> list[int]:
    """Group numbers that one step was trained on, read from its mean reward (see group_task.py)."""
    return [bit for bit, digit in enumerate(reversed(f"{int(step['rollout/reward_mean'] * prompts_per_step):b}")) if digit == "1"]


def _after(seconds: float, find: Callable[[], list]) -> list:
    """What `find` still finds when it is given so long to find nothing."""
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def environment(pid: int) -> list[str]:
    """NAME=value of a process."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is somebody else's
        return []


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
