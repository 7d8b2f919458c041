"""What a run keeps of its steps: steps.jsonl, the groups that each was trained on, and as much of the journal as may be wanted again.

    records = Records(run_dir, incarnation, resume_step, keep)          # the rank that logs
    records.log(step, groups)                                           # after each optimizer step
    records.checkpointed()                                              # when a checkpoint is being written

With the journal steps.jsonl is what `--replay` trains from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from miles_core import checkpoint, journal, rundir
from miles_core.journal_file import Damaged, scan


class Records:
    """`keep`: the journal goes back to the oldest of so many checkpoints; 0 = nothing is ever removed. Lines of erased steps are cut."""

    def __init__(self, run_dir: Path, incarnation: int, resume_step: int = 0, keep: int = 0):
        self.run_dir, self.incarnation, self.keep = run_dir, incarnation, keep
        self.groups: dict[Path, frozenset[int]] = {}  # of closed files of the journal, which do not change
        path = run_dir / "steps.jsonl"
        rundir.write_durably(path, "".join(_line(*line) for line in read_steps(run_dir).items() if line[0] <= resume_step))
        self.file = path.open("a", buffering=1)

    def log(self, step: int, groups: Iterable[int]) -> None:
        self.file.write(_line(step, groups))

    def checkpointed(self) -> None:
        """Force steps.jsonl to disk, and remove what the journal holds beyond the oldest of the last `keep` checkpoints."""
        os.fsync(self.file.fileno())
        kept = checkpoint.newest(self.run_dir / "checkpoints", self.keep) if self.keep else []
        if kept and len(kept) == self.keep:
            self.prune(checkpoint.consumed(checkpoint.meta_of(kept[0])))

    def prune(self, consumed: Iterable[int]) -> int:
        """Remove files of which every group is consumed, but not the last one of a writer that lives: more may come. Returns how many."""
        done, paths, removed = set(consumed), journal.files(self.run_dir / "journal"), 0
        last_of = {path.name.rpartition("-")[0]: path for path in paths}
        for path in paths:
            if int(path.name.partition("-")[0]) == self.incarnation and path in last_of.values():
                continue
            if path not in self.groups:
                try:
                    self.groups[path] = frozenset(entry.group for entry in scan(path).entries)
                except Damaged:
                    continue  # for a person to look at
            if self.groups[path] <= done:
                path.unlink()
                del self.groups[path]
                removed += 1
        return removed

    def close(self) -> None:
        self.file.close()


def _line(step: int, groups: Iterable[int]) -> str:
    return json.dumps({"step": step, "groups": sorted(groups)}) + "\n"


def read_steps(run_dir: Path) -> dict[int, list[int]]:
    """{step: its groups} of a run; a last line that a crash cut off is left out."""
    path = run_dir / "steps.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["step"]: line["groups"] for line in (json.loads(text) for text in lines if text.endswith("}"))}
