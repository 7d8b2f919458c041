"""Terminal tasks: every one of ours is solved by its solution and by nothing else, verdicts, and what is wrong with a task is said.

    python -m pytest tests/core/test_terminal.py

Needs Debian's packages bubblewrap, util-linux and git.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from miles_core.tasks import terminal
from miles_core.tasks.terminal import TASKS, attempt, check, judge, load, load_all, start

ROOT = Path(__file__).resolve().parents[2]
OURS = load_all(TASKS)
MODULES = {"environment__main.py": "import other\nprint(other.x)", "environment__other.py": "x = 7"}


def make(root: Path, toml: str = "", **files: str) -> Path:
    """A task that wants a file `done`, with these files in place of its own. A name is spelled with __ for a slash and _sh for .sh."""
    task = {
        "tests__test_sh": "test -e done",
        "instruction_md": "Make a file done.",
        "solution__solve_sh": "touch done",
        "solution__wrong_sh": "touch Done",
        **files,
    }
    for name, text in {**task, "task_toml": toml}.items():
        path = root / name.replace("__", "/").replace("_sh", ".sh").replace("_md", ".md").replace("_toml", ".toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("task", OURS, ids=lambda task: task.name)
def test_solution_nothing_mistake(task: terminal.TerminalTask) -> None:
    assert check(task) == []


def test_there_are_tasks_of_many_kinds() -> None:
    kinds = [tomllib.loads((task.directory / "task.toml").read_text())["metadata"]["category"] for task in OURS]
    assert len(OURS) >= 25 and len(set(kinds)) >= 8
    assert all(kinds.count(kind) >= 2 for kind in kinds)
    assert len({task.instruction for task in OURS}) == len(OURS)


@pytest.mark.parametrize(
    ("files", "verdict"),
    [
        ({}, (1.0, "ok", "")),
        ({"tests__test_sh": "echo said; exit 1"}, (0.0, "ok", "said")),
        ({"tests__test_sh": "echo 0.25 > /logs/verifier/reward.txt; exit 1"}, (0.25, "ok", "")),
        ({"tests__test_sh": "echo 0.25 > /logs/verifier/reward.txt; exit 1", "toml": "[verifier]\nreward = 'exit_code'"}, (0.0, "ok", "")),
        (
            {"tests__test_sh": "echo good > /logs/verifier/reward.txt"},
            (0.0, "no_verdict", "reward.txt holds 'good\\n', not a finite number"),
        ),
        ({"tests__test_sh": "echo nan > /logs/verifier/reward.txt"}, (0.0, "no_verdict", "reward.txt holds 'nan\\n', not a finite number")),
        ({"tests__test_sh": "python3 main.py", **MODULES}, (0.0, "ok", "ModuleNotFoundError: No module named 'other'")),
        ({"tests__test_sh": "python3 main.py", **MODULES, "toml": "[verifier]\nguard = false"}, (1.0, "ok", "7")),
        ({"tests__test_sh": "sleep 60", "toml": "[verifier]\ntimeout_sec = 0.5"}, (0.0, "timeout", "the tests took more than 0.5 s")),
        (
            {"tests__test_sh": "cd /tests; seq 1 110000 | xargs touch; sleep 9"},
            (0.0, "no_verdict", "the tests used more than 100000 files in /tests"),
        ),
        (
            {"environment__setup_sh": "echo why; exit 3"},
            (0.0, "infra_error", "terminal task {name}: environment/setup.sh failed with 3: why"),
        ),
        ({"solution__solve_sh": "exit 5"}, (0.0, "no_verdict", "solution/solve.sh failed with 5: ")),
    ],
)
def test_verdicts(tmp_path: Path, files: dict[str, str], verdict: tuple[float, str, str]) -> None:
    task = load(make(tmp_path / "one", **files))
    assert attempt(task, "solve.sh") == (*verdict[:2], verdict[2].format(name="one"))


def test_the_episode_that_ends_before_grading(tmp_path: Path) -> None:
    task = load(make(tmp_path))
    with start(task) as sandbox:
        sandbox.close()
        reward, verdict, detail = judge(task, sandbox)
    assert (reward, verdict) == (0.0, "infra_error") and "is closed" in detail


def test_what_the_agent_sees(tmp_path: Path) -> None:
    make(tmp_path, environment__setup_sh="echo made > made; pwd > where", environment__data__x="x\n", environment__tool="#!/bin/sh\n")
    (tmp_path / "environment/tool").chmod(0o755)
    with start(load(tmp_path)) as sandbox:
        assert sandbox.run("find . -type f | sort; cat where; ls -A /tests /tmp /solution /logs; ./tool").output.split() == [
            *("./data/x", "./made", "./tool", "./where", "/work", "/logs:", "/solution:", "/tests:", "/tmp:")
        ]


def test_settings_reach_the_sandbox(tmp_path: Path) -> None:
    toml = "[agent]\ntimeout_sec = 7\n[environment]\nmemory_mb = 99\nstorage_mb = 3\nallow_internet = true"
    task = load(make(tmp_path, toml))
    assert (task.agent_timeout_s, task.limits.memory_mb, task.limits.disk_mb) == (7.0, 99, 3)
    with start(task) as sandbox:
        assert sandbox.run("df -m --output=size . | tail -1; ulimit -d").output.split() == ["3", str(99 << 10)]
        assert sandbox.run("cut -d : -f 1 -s /proc/net/dev").output.split() == [
            line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line
        ]


def test_check_finds_what_is_wrong(tmp_path: Path) -> None:
    assert check(load(make(tmp_path / "good"))) == []
    problems = check(load(make(tmp_path / "always", tests__test_sh="true")))
    assert [problem.partition(" (")[0] for problem in problems] == [
        "always: doing nothing must score 0 and scored 1, ok",
        "always: wrong.sh must score 0 and scored 1, ok",
    ]
    (tmp_path / "good/solution/wrong.sh").unlink()
    assert check(load(tmp_path / "good")) == ["good: there is no solution/wrong.sh"]
    (problem,) = check(load(make(tmp_path / "never", solution__solve_sh="touch Done", solution__wrong_sh="true")))
    assert problem.startswith("never: solve.sh must score 1 and scored 0, ok")


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[", "task.toml is no TOML"),
        ("[verifier]\ntimeout = 3", "unknown key verifier.timeout .known: agent.timeout_sec"),
        ("colour = 3", "unknown key colour"),
        ("agent = 3", r"\[agent\] is no table"),
        ("[agent]\ntimeout_sec = '3'", "agent.timeout_sec = '3' is no positive number"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec = 0.0 is no positive number"),
        ("[environment]\ncpus = 1.5", "environment.cpus = 1.5 is no int"),
        ("[environment]\ncpus = true", "environment.cpus = True is no int"),
        ("[environment]\nmemory_mb = -5", "memory_mb -5"),
        ("[verifier]\nreward = 'json'", 'reward is "any" or "exit_code"'),
    ],
)
def test_bad_task_files(tmp_path: Path, toml: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        load(make(tmp_path, toml))
    assert str(tmp_path) in str(caught.value)


def test_incomplete_tasks(tmp_path: Path) -> None:
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        (make(tmp_path) / name).unlink()
        with pytest.raises(ValueError, match=f"there is no {name}"):
            load(tmp_path)
    with pytest.raises(ValueError, match="instruction.md is empty"):
        load(make(tmp_path, instruction_md=" \n"))
    with pytest.raises(ValueError, match="environment/Dockerfile is not built here"):
        start(load(make(tmp_path, environment__Dockerfile="FROM debian:12")))
    with pytest.raises(ValueError, match="a task is a directory with a task.toml"):
        load_all(tmp_path / "tests")


def test_command_line(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        ended = subprocess.run([sys.executable, "-m", "miles_core.tasks.terminal", *arguments], cwd=ROOT, capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr

    make(tmp_path / "good")
    make(tmp_path / "bad", solution__solve_sh="true")
    assert run(str(tmp_path)) == (0, "bad: Make a file done.\ngood: Make a file done.\n")
    assert run(str(tmp_path), "--check") == (1, "bad: solve.sh must score 1 and scored 0, ok ()\ngood: ok\n")
    assert run(str(tmp_path / "good"), "--check") == (0, "good: ok\n")
    assert run(str(tmp_path / "none")) == (
        2,
        f"error: there is no terminal task in {tmp_path / 'none'}: a task is a directory with a task.toml\n",
    )


def test_tasks_are_part_of_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    files = {path.relative_to(TASKS) for path in TASKS.rglob("*") if path.is_file()}
    copied = tmp_path / "miles_core/tasks/terminal_tasks"
    assert {path.relative_to(copied) for path in copied.rglob("*") if path.is_file()} == files
