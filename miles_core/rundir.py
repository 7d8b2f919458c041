"""The run directory: what was run, with which code, before the first step.

runs/<date-time>/
  config.json       the resolved config
  code/             train.py, rollout.py, git.txt (revision and uncommitted changes)
  metrics.jsonl     one line a step          tensorboard/
  checkpoints/      step_000100/ ... latest -> step_000100
"""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def choose(run_dir: str) -> Path:
    """The directory asked for, or a new one named by the time of day. Called by one rank; the others are told."""
    return Path(run_dir) if run_dir else Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]


def _git(*args: str) -> str:
    try:
        return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}\n"


def open_run(path: Path, config_json: str) -> None:
    """Create or reopen a run directory (one rank). A changed config of a resumed run is announced, field by field."""
    try:
        (path / "code").mkdir(parents=True, exist_ok=True)
        recorded = path / "config.json"
        if recorded.exists():
            old, new = json.loads(recorded.read_text()), json.loads(config_json)
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    print(f"resuming with --{name.replace('_', '-')} {new.get(name)} (was {old.get(name)})", flush=True)
        recorded.write_text(config_json)
        (path / "code" / "git.txt").write_text(_git("rev-parse", "HEAD") + _git("diff", "HEAD"))
        for script in ("train.py", "rollout.py"):
            shutil.copy(ROOT / script, path / "code" / script)
    except OSError as error:
        raise ValueError(f"--run-dir {path} cannot be written: {error}") from error
