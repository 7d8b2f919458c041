"""The run directory: what was run, with which code, before the first step.

runs/<date-time>/
  config.json       the resolved config
  launch            which launch (one torchrun with all its restarts, one SLURM job) opened it last
  code/             train.py, rollout.py, git.txt (revision and uncommitted changes)
  metrics.jsonl     one line a step          tensorboard/
  steps.jsonl       the groups of each step  incarnations.jsonl     one line a start: see start.py
  checkpoints/      step_000100/ ... latest -> step_000100
  journal/          every finished group     status/                where to look at a run that runs
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
from datetime import datetime
from pathlib import Path

from miles_core.shm import process_start

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs")


def launch_id() -> str:
    """Names the launch that this process belongs to: the same in every restart by torchrun, and nowhere else.

    The rendezvous id where it is one (slurm.sbatch: the job's number, which a requeued job keeps), else the process that started us.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    parent = os.getppid()
    return name if name != "none" else f"{socket.gethostname()}-{parent}-{process_start(parent)}"


def choose(run_dir: str, restarted: bool) -> tuple[Path, bool]:
    """(the directory asked for, that of an earlier start of this launch, or a new one named by the time of day; whether this is a restart
    of the launch that opened it). `restarted`: by torchrun, on any node. Called by one rank; the others are told."""
    restarted = restarted or int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
    for path in [Path(run_dir)] if run_dir else (file.parent for file in sorted(RUNS.glob("*/launch"), reverse=True)):
        if restarted and _opened_by(path) == launch_id():
            return path, True
    return Path(run_dir) if run_dir else RUNS / datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3], False


def _opened_by(path: Path) -> str:
    try:
        return (path / "launch").read_text().strip()
    except OSError:
        return ""


def _git(*args: str) -> str:
    try:
        return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}\n"


def lock(path: Path) -> None:
    """Make the run directory, and keep other runs out of it for as long as this process lives (one rank). ValueError when one is in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ValueError(f"--run-dir {path} cannot be written: {error}") from error
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # by the kernel, so it goes with us; never closed
    except BlockingIOError as error:
        owner = os.read(fd, 200).decode()
        raise ValueError(f"--run-dir {path} is in use by {owner}: wait until that has ended, or give another directory") from error
    os.ftruncate(fd, 0)
    os.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode())


def open_run(path: Path, config_json: str) -> None:
    """Fill in a run directory that is ours (one rank). A changed config of a resumed run is announced, field by field."""
    try:
        (path / "code").mkdir(parents=True, exist_ok=True)
        recorded = path / "config.json"
        if recorded.exists():
            old, new = json.loads(recorded.read_text()), json.loads(config_json)
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    print(f"resuming with --{name.replace('_', '-')} {new.get(name)} (was {old.get(name)})", flush=True)
        write_durably(recorded, config_json)
        write_durably(path / "launch", launch_id() + "\n")
        (path / "code" / "git.txt").write_text(_git("rev-parse", "HEAD") + _git("diff", "HEAD"))
        for script in ("train.py", "rollout.py"):
            shutil.copy(ROOT / script, path / "code" / script)
    except OSError as error:
        raise ValueError(f"--run-dir {path} cannot be written: {error}") from error


def write_durably(path: Path, text: str) -> None:
    """Replace a file at once: a crash leaves the old content or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Force a file, or the names in a directory, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
