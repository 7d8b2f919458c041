"""What a resumed run takes from the journal, and what it makes again and why; incarnations; what is pruned; what a replay needs.

    python -m pytest tests/core/test_earlier.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from samples import trajectory

from miles_core import journal, start
from miles_core.assets import TINY
from miles_core.config import Config
from miles_core.earlier import Earlier
from miles_core.journal import Journal
from miles_core.journal_file import load
from miles_core.metrics import Logger
from miles_core.model import hf
from miles_core.records import Records, read_steps
from miles_core.rerun import Recording
from miles_core.start import Start, lineage
from rollout import recipe_of

RECIPE = {"task": "sort"}


def write(directory: Path, incarnation: int, groups: dict[int, int], *, rank: int = 0, recipe: dict = RECIPE, reward: float = 0.0) -> Path:
    """One file of an incarnation; `groups`: {number: version}."""
    writer = Journal(directory, incarnation, rank, recipe)
    for number, version in groups.items():
        versions = np.array([[version, 5]], np.int32)
        writer.append([trajectory(3, 5, group=number, version=versions, reward=reward)], [np.arange(4, dtype=np.uint8)[:0]])
    writer.close()
    return journal.files(directory)[-1]


def earlier(
    directory: Path, valid: Callable[[int, int], bool] = lambda *_: True, *, last: int = 0, staleness: int = 9, me: int = 9
) -> Earlier:  # fmt: skip
    return Earlier(directory, me, RECIPE, valid, lambda _: last, staleness)


def test_a_group_is_given_once(tmp_path: Path) -> None:
    write(tmp_path, 1, {4: 0, 5: 0})
    found = earlier(tmp_path)
    assert found.find(4).group[0].group == 4 and found.find(4) is None and found.find(99) is None
    assert found.num_made_again == 0, "nothing stood there in vain"


def test_the_newest_of_two_records_is_given_and_none_of_this_incarnation(tmp_path: Path) -> None:
    for incarnation in (1, 2, 3):
        write(tmp_path, incarnation, {4: 0}, reward=incarnation)
    assert earlier(tmp_path).find(4).group[0].reward == 3
    assert earlier(tmp_path, me=3).find(4).group[0].reward == 2, "what another rank of this incarnation writes is not ours"
    assert earlier(tmp_path, lambda incarnation, _: incarnation == 1).find(4).group[0].reward == 1


@pytest.mark.parametrize("flag", ["task", "agent"])
def test_a_script_that_was_edited_is_another_recipe(tmp_path: Path, flag: str) -> None:
    script, model = tmp_path / "mine.py", hf.build(hf.load_config(TINY), "meta")
    script.write_text("reward = 1.0")
    config = Config(**{flag: f"{script}:run" if flag == "agent" else str(script)})
    before = recipe_of(config, model)
    assert recipe_of(config, model) == before == json.loads(json.dumps(before))
    script.write_text("reward = 2.0")
    assert recipe_of(config, model) != before
    assert recipe_of(Config(agent="a.module:run"), model)["scripts"] == []


@pytest.mark.parametrize("reason", ["erased", "too old", "recipe", "damaged"])
def test_what_may_not_be_used_is_made_again_and_counted(tmp_path: Path, reason: str, capsys: pytest.CaptureFixture) -> None:
    path = write(tmp_path, 1, {4: 3}, recipe={"task": "other"} if reason == "recipe" else RECIPE)
    if reason == "damaged":
        path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
    found = earlier(tmp_path, lambda _, version: reason != "erased" or version < 3, last=5, staleness=1 if reason == "too old" else 2)
    assert found.find(4) is None and found.num_made_again == 1
    assert ("group 4 at byte" in capsys.readouterr().err) == (reason == "damaged"), "damage is said"


def test_the_staleness_bound_counts_when_a_group_is_trained_on_at_the_latest(tmp_path: Path) -> None:
    write(tmp_path, 1, {4: 3})
    assert earlier(tmp_path, last=5, staleness=2).find(4) is not None and earlier(tmp_path, last=6, staleness=2).find(4) is None


# ---- incarnations


def test_lineage_of_crashes() -> None:
    """1 crashed at 7 after a checkpoint at 4; 2 went on from there and crashed at 9, after one at 8; 3 goes on from 8."""
    lines = [{"incarnation": i, "version": version, "parent": i - 1, "trainers": 1} for i, version in ((1, 0), (2, 4), (3, 8))]
    made = Start(Path(), 3, lineage(lines, 3))
    valid = {(i, v) for i in range(5) for v in range(12) if made.still_valid(i, v)}
    assert valid == {(1, v) for v in range(5)} | {(2, v) for v in range(9)} | {(3, v) for v in range(12)}
    # 2 never saved anything, so 3 goes on from 1's checkpoint again: nothing of 2 counts
    lines[2] = {"incarnation": 3, "version": 4, "parent": 1, "trainers": 1}
    made = Start(Path(), 3, lineage(lines, 3))
    assert made.still_valid(1, 4) and not made.still_valid(1, 5) and not made.still_valid(2, 4)


def test_starts_are_counted_and_the_initial_weights_are_everybodys(tmp_path: Path) -> None:
    def opened(resume: str = "auto") -> Start:
        return start.open_run(str(tmp_path / "run"), resume, 10, 4, 1, json.dumps({"steps": 10}))

    first, second, third, fourth = opened(), opened(), opened("none"), opened()
    assert [s.incarnation for s in (first, second, third, fourth)] == [1, 2, 3, 4]
    assert second.still_valid(1, 0) and not second.still_valid(1, 1), "what was sampled before any step can be used"
    assert not third.still_valid(2, 0), "--resume none begins anew"
    assert fourth.still_valid(3, 0) and not fourth.still_valid(2, 0)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """Two writers would ruin each other's files. A run that has died has left."""
    code = "import pathlib, sys, time; from miles_core import rundir\n"
    code += "rundir.lock(pathlib.Path(sys.argv[1])); print(1, flush=True); time.sleep(99)"
    root = Path(__file__).resolve().parents[2]
    first = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=root, stdout=subprocess.PIPE)
    first.stdout.readline()
    with pytest.raises(ValueError, match=f"--run-dir {tmp_path} is in use by process {first.pid} on .*: wait until that has ended"):
        start.open_run(str(tmp_path), "auto", 10, 4, 1, "{}")
    assert not (tmp_path / "config.json").exists()
    first.kill()
    first.communicate()
    assert start.open_run(str(tmp_path), "auto", 10, 4, 1, "{}").incarnation == 1


def test_no_two_writers_of_one_file(tmp_path: Path) -> None:
    write(tmp_path, 1, {4: 0})
    with pytest.raises(FileExistsError):
        write(tmp_path, 1, {5: 0})


# ---- steps, pruning


def test_steps_that_are_erased_leave_the_record(tmp_path: Path) -> None:
    records = Records(tmp_path, 1)
    for step in range(1, 6):
        records.log(step, {2 * step, 2 * step - 1})
    records.close()
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 6, "gro')
    assert read_steps(tmp_path) == {step: [2 * step - 1, 2 * step] for step in range(1, 6)}
    Records(tmp_path, 2, resume_step=3).log(4, [99])
    assert read_steps(tmp_path) == {1: [1, 2], 2: [3, 4], 3: [5, 6], 4: [99]}


def test_a_kill_while_the_records_are_opened_loses_none(tmp_path: Path) -> None:
    """They are replaced, never cut: whoever has the old file open still reads all of it."""
    records, logger = Records(tmp_path, 1), Logger(tmp_path)
    for step in range(1, 4):
        records.log(step, {step})
        logger.log(step, {"x": 1.0})
    records.close()
    logger.close()
    with (tmp_path / "steps.jsonl").open() as steps, (tmp_path / "metrics.jsonl").open() as metrics:
        Records(tmp_path, 2, resume_step=1).close()
        Logger(tmp_path, resume_step=1).close()
        assert [len(file.readlines()) for file in (steps, metrics)] == [3, 3]
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("steps.jsonl", "metrics.jsonl")] == [1, 1]


def test_only_files_that_nobody_needs_are_removed(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    old = [write(directory, 1, {0: 0, 1: 0}), write(directory, 1, {2: 0, 9: 0}, rank=1)]
    writer = Journal(directory, 2, 0, RECIPE)
    for numbers in ((3, 4), (5,)):
        for number in numbers:
            writer.append([trajectory(3, 5, group=number)], [np.zeros(0, np.uint8)])
        writer.rotate()
    closed, newest = journal.files(directory)[2:]
    records = Records(tmp_path, 2)
    assert records.prune(range(3)) == 1 and not old[0].exists() and old[1].exists(), "group 9 is wanted yet"
    assert records.prune(range(10)) == 2 and not old[1].exists() and not closed.exists()
    assert newest.exists() and records.prune(range(10)) == 0, "its writer may add to it"
    writer.close()


# ---- what a replay reads


def recorded(tmp_path: Path, steps: dict[int, list[int]], *files: tuple[int, dict[int, int]], lines: list[dict] | None = None) -> Path:
    for incarnation, groups in files:
        write(tmp_path / "journal", incarnation, groups, reward=incarnation)
    text = [json.dumps({"step": step, "groups": groups}) for step, groups in steps.items()]
    (tmp_path / "steps.jsonl").write_text("".join(f"{line}\n" for line in text))
    lines = lines or [{"incarnation": 1, "version": 0, "parent": 0, "trainers": 1}]
    (tmp_path / "incarnations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_recording_takes_what_was_trained_on(tmp_path: Path) -> None:
    """Group 2 was made at version 3 by incarnation 1, erased, and made again by 2; group 1 was restored."""
    lines = [{"incarnation": 1, "version": 0, "parent": 0, "trainers": 1}, {"incarnation": 2, "version": 1, "parent": 1, "trainers": 1}]
    found = Recording(recorded(tmp_path, {1: [0], 2: [1], 3: [2]}, (1, {0: 0, 1: 1, 2: 3}), (2, {2: 1}), lines=lines))
    assert {g: load(e)[0][0].reward for g, e in found.entries.items()} == {0: 1, 1: 1, 2: 2}
    found.check(1, 3)
    assert found.staleness(1, 3) == 1


def test_a_recording_says_what_is_missing(tmp_path: Path) -> None:
    found = Recording(recorded(tmp_path, {1: [0], 2: [1], 3: [2]}, (1, {1: 1, 2: 2})))
    with pytest.raises(ValueError, match=r"the groups of step 1 are not in its journal \(it ends with step 3, and it can begin"):
        found.check(1, 3)
    with pytest.raises(ValueError, match="the groups of step 4 are not in its journal"):
        found.check(2, 4)
    with pytest.raises(ValueError, match="--steps 2:... needs the checkpoint of step 1; .* has none"):
        found.check(2, 3)
    (tmp_path / "checkpoints/step_000001").mkdir(parents=True)
    found.check(2, 3)
    with pytest.raises(ValueError, match="it can begin at step 2"):
        found.check(1, 3)
    with pytest.raises(ValueError, match="has recorded no steps"):
        Recording(tmp_path / "nowhere")


def test_the_ring_of_a_replay_finds_every_step_claimed(tmp_path: Path) -> None:
    found = Recording(recorded(tmp_path, {1: [0, 5], 2: [1, 2], 3: [3, 7]}, (1, dict.fromkeys(range(8), 0))))
    assert found.shape(1, 3, 1) == {"num_slots": 6, "window": 6, "num_groups": 8}  # 0 to 5 are claimed for step 1
    assert found.shape(2, 2, 1) == {"num_slots": 2, "window": 2, "num_groups": 3}
