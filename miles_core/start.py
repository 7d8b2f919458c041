"""Where a run begins: a new directory, or the newest whole checkpoint of an old one, in a new incarnation (DESIGN 4.4).

Every start of a run is an *incarnation*, counted from 1. A crash at version T + 3 that goes on from the checkpoint of version T erases
versions T + 1 to T + 3: the new timeline has versions of the same numbers, and what was sampled from the old ones must not be taken for
theirs. So what carries a version carries the incarnation too, and `Start.still_valid` says whether both lie on the timeline that goes on.

incarnations.jsonl has one line a start, {"incarnation", "version", "parent", "trainers"}: it went on from `version`, which incarnation
`parent` saved, with so many training ranks.
Checkpoints of erased versions are set aside, never deleted, never gone on from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from miles_core import checkpoint, rundir


@dataclass(frozen=True)
class Start:
    """`lineage`: for each incarnation that this one descends from, itself included, the last of its versions that still counts."""

    run_dir: Path
    incarnation: int = 1
    lineage: tuple[tuple[int, int | None], ...] = ((1, None),)
    checkpoint: Path | None = None
    version: int = 0
    consumed: tuple[int, ...] = ()  # group numbers that the weights have been trained on

    def __str__(self) -> str:
        return f"run directory: {self.run_dir}" + (f", resumed at step {self.version}" if self.checkpoint else "")

    def still_valid(self, incarnation: int, version: int) -> bool:
        """Whether weights of this version, as that incarnation made them, are among the ancestors of the weights to come."""
        ends = dict(self.lineage)
        return incarnation in ends and (ends[incarnation] is None or version <= ends[incarnation])


def open_run(
    run_dir: str, resume: str, steps: int, prompts_per_step: int, num_trainers: int, config_json: str, restarted: bool = False
) -> Start:
    """Create the run directory, or find where to go on in one that exists (one rank).

    `resume`: "auto" = the newest whole checkpoint, "none" = from the beginning, or a checkpoint. `restarted`: this is not the first start
    by torchrun. ValueError when it cannot be done.
    """
    path, again = rundir.choose(run_dir, restarted)
    if again:
        resume = "auto"  # what was asked for has been done by the first start of this launch
    rundir.lock(path)
    found = _find(path, resume)
    meta = checkpoint.read_meta(found) if found is not None else {"version": 0, "base": 0, "beyond": []}
    if found is not None:
        _check(path, found, meta, steps, prompts_per_step, again)
    # In this order: whenever a kill comes, the next start finds what this one would have, or does what was asked for anew.
    version, parent = meta["version"], None if found is None and resume == "auto" else 0
    if found is not None and found.resolve().parent == (path / "checkpoints").resolve():
        parent = meta.get("incarnation", 0)
    for erased in checkpoint.later_than(path / "checkpoints", version):
        print(f"{checkpoint.set_aside(erased, 'erased')}: set aside, the run goes on from step {version}", flush=True)
    incarnation, lineage = _begin(path, version, parent, num_trainers)
    rundir.open_run(path, config_json)
    return Start(path, incarnation, lineage, found, version, checkpoint.consumed(meta))


def _find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to go on from. A damaged one is set aside, loudly, and the one before it is tried."""
    directory = run_dir / "checkpoints"
    if resume == "none":
        return None
    if resume != "auto":
        path = Path(resume)
        if not (path / "manifest.json").exists():
            raise ValueError(f"--resume {resume} is no checkpoint: give auto, none, or a directory checkpoints/step_... of a run")
        checkpoint.read_meta(path)
        return path.resolve() if path.is_symlink() else path
    any_damaged = False
    while (path := checkpoint.latest(directory)) is not None:
        try:
            checkpoint.read_meta(path)
            return path
        except checkpoint.Damaged as error:
            any_damaged = True
            print(f"WARNING: {error}. Set aside as {checkpoint.set_aside(path, 'damaged')}; trying the one before", flush=True)
    if any_damaged:
        print("WARNING: no whole checkpoint is left, the run begins again at step 0", flush=True)
    return None


def _check(run_dir: Path, path: Path, meta: dict, steps: int, prompts_per_step: int, again: bool) -> None:
    """Refuse a checkpoint that these flags cannot go on from."""
    done = meta["version"]
    if done > steps or (done == steps and not again):  # a restart may find everything done but the last evaluation
        raise ValueError(f"--run-dir {run_dir} has done its {done} steps: raise --steps above that, or give another directory")
    if meta["prompts_per_step"] != prompts_per_step:
        was = meta["prompts_per_step"]
        raise ValueError(f"--prompts-per-step {prompts_per_step} cannot resume a run of {was}: a step is another one then")


def _begin(run_dir: Path, version: int, parent: int | None, num_trainers: int) -> tuple[int, tuple[tuple[int, int | None], ...]]:
    """Write down a new incarnation that goes on from `version` of `parent`; returns it and its lineage.

    `parent` 0: of none. None: of whichever was the last, which began with the same weights if it began at version 0.
    """
    file, lines = run_dir / "incarnations.jsonl", incarnations(run_dir)
    last = max((line["incarnation"] for line in lines), default=0)
    incarnation = last + 1
    lines.append({"incarnation": incarnation, "version": version, "parent": last if parent is None else parent, "trainers": num_trainers})
    rundir.write_durably(file, "".join(json.dumps(line) + "\n" for line in lines))
    return incarnation, lineage(lines, incarnation)


def incarnations(run_dir: Path) -> list[dict]:
    """The lines of incarnations.jsonl; none for a new run."""
    file = run_dir / "incarnations.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def lineage(lines: list[dict], incarnation: int) -> tuple[tuple[int, int | None], ...]:
    """(incarnation, its last version that counts; None = all) from the given one back to the first."""
    by_number, found = {line["incarnation"]: line for line in lines}, [(incarnation, None)]
    while (line := by_number[incarnation])["parent"] in by_number:
        incarnation = line["parent"]
        found.append((incarnation, line["version"]))
    return tuple(found)
