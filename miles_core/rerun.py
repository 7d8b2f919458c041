"""`--replay RUN_DIR`: train on the groups that a run has journalled, the same ones in each step, and generate nothing.

    recording = Recording(run_dir)                       # one rank, or all: only reads
    path = recording.checkpoint_before(first_step)       # what to start from; None = the initial model
    recording.check(first_step, last_step)
    rollout = Rerun(recording, ring, index, store, version)      # in the place of a colocated rank's rollout half

With the same flags and as many training ranks, losses and weights are those of the recorded run to the bit, synchronous or not: a step's
arithmetic depends on which groups it has, never on when they came.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from miles_core import checkpoint, journal
from miles_core.journal_file import FIELDS_HERE, Damaged, Entry, load
from miles_core.metrics import Metric
from miles_core.records import read_steps
from miles_core.ring import Claim, Ring
from miles_core.route_transport import RouteStore
from miles_core.start import incarnations, lineage


class Recording:
    """What a run has recorded of the timeline that it ended with."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.steps = run_dir, read_steps(run_dir)
        lines = incarnations(run_dir)
        if not lines or not self.steps:
            raise ValueError(f"--replay {run_dir} has recorded no steps: give the directory of a run, runs/<date-time>")
        ends = dict(lineage(lines, max(line["incarnation"] for line in lines)))
        self.num_trainers = {line["trainers"] for line in lines}
        self.entries: dict[int, Entry] = {}
        for contents in journal.read(run_dir / "journal")[0]:
            if contents.header["fields"] != FIELDS_HERE:
                raise ValueError(f"--replay {run_dir}: {contents.path.name} was written by another version of this program")
            for entry in contents.entries:  # in order of incarnations: what was made again takes the place of what it replaced
                end = ends.get(entry.incarnation, -1)
                if end is None or entry.newest <= end:
                    self.entries[entry.group] = entry

    def compare(self, num_trainers: int) -> None:
        """Say so if a replay on so many training ranks cannot be the recorded run to the bit."""
        if self.num_trainers != {num_trainers}:
            recorded = " and ".join(map(str, sorted(self.num_trainers)))
            print(f"replay: recorded on {recorded} training ranks, replayed on {num_trainers}: sums are rounded otherwise, not bit for bit")

    def check(self, first: int, last: int) -> None:
        """ValueError when a step, a group or the checkpoint to begin with is not there, and which steps are."""
        missing = next((s for s in range(first, last + 1) if not self._has(s)), None)
        if missing is not None:
            runs = [s for s in sorted(self.steps) if self._has(s) and (s == 1 or self._checkpoint(s - 1).exists())]
            begin = f"it can begin at step {', '.join(map(str, runs))}" if runs else "it can begin nowhere"
            raise ValueError(
                f"--replay {self.run_dir}: the groups of step {missing} are not in its journal (it ends with step {max(self.steps)}, "
                f"and {begin}); give --steps A:B, and record with --journal-keep 0 to keep everything"
            )
        self.checkpoint_before(first)

    def _has(self, step: int) -> bool:
        return step in self.steps and all(group in self.entries for group in self.steps[step])

    def _checkpoint(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"step_{step:06d}"

    def checkpoint_before(self, step: int) -> Path | None:
        """What a replay that begins with this step starts from; None = the initial model. ValueError when it is not there."""
        if step == 1:
            return None
        if not self._checkpoint(step - 1).exists():
            found = [path.name for path in checkpoint.newest(self.run_dir / "checkpoints", 1 << 30)]
            raise ValueError(f"--steps {step}:... needs the checkpoint of step {step - 1}; {self.run_dir} has {', '.join(found) or 'none'}")
        return self._checkpoint(step - 1)

    def shape(self, first: int, last: int, num_nodes: int) -> dict[str, int]:
        """Slots, window and end of the numbering of a node's ring, so that every step finds its groups claimed."""
        num_slots, ends = 1, 1
        for node in range(num_nodes):
            consumed = {g // num_nodes for s, groups in self.steps.items() if s < first for g in groups if g % num_nodes == node}
            for step in range(first, last + 1):
                indices = [g // num_nodes for g in self.steps[step] if g % num_nodes == node]
                highest = max(indices)
                num_slots = max(num_slots, highest + 1 - sum(i <= highest for i in consumed))
                ends = max(ends, highest + 1)
                consumed.update(indices)
        return {"num_slots": num_slots, "window": num_slots, "num_groups": ends}

    def staleness(self, first: int, last: int) -> int:
        """The largest of these steps, in versions."""
        return max(step - 1 - self.entries[group].oldest for step in range(first, last + 1) for group in self.steps[step])


class Rerun:
    """Stands where a colocated rank has its rollout half, and puts what was recorded. `version()` is the trainer's."""

    def __init__(self, recording: Recording, ring: Ring, index: int, store: RouteStore, version: Callable[[], int]):
        self.recording, self.ring, self.index, self.store, self.version = recording, ring, index, store, version
        self.open: dict[int, Claim] = {}

    def refresh(self, min_version: int | None = None) -> None:
        self.ring.set_live(self.index, self.version())

    def tick(self) -> bool:
        """Claim what there is, and put the groups of the step that comes. False when there was nothing to do."""
        while (claim := self.ring.claim(self.index)) is not None:
            self.open[claim.group] = claim
        ready = self.open.keys() & set(self.recording.steps.get(self.version() + 1, ()))
        for number in sorted(ready):
            try:
                group, routes = load(self.recording.entries[number])
            except Damaged as error:
                raise ValueError(f"--replay {self.recording.run_dir}: {error}") from error
            for trajectory, payload in zip(group, routes, strict=True):
                if len(payload):
                    self.store.keep(trajectory, torch.from_numpy(payload))
            self.ring.put(self.open.pop(number), group)
        return bool(ready)

    def evaluate(self, shard: int, num_shards: int) -> dict[str, Metric]:
        return {}

    def close(self) -> None:
        pass
