"""Terminal tasks: an instruction, a prepared directory, and tests of the state that the agent leaves. In the layout of Harbor.

    NAME/task.toml                  limits and deadlines, in seconds and MB; every key may be left out
    NAME/instruction.md             what the agent is told
    NAME/environment/               copied into the home directory; setup.sh runs there first, and is not seen by the agent
    NAME/tests/test.sh              runs in the home directory after the agent: exit code 0 is reward 1, any other is 0. If it writes a
                                    number to /logs/verifier/reward.txt, that is the reward, unless `[verifier] reward = "exit_code"`
    NAME/solution/solve.sh          for checking the task: reward 1
    NAME/solution/wrong.sh          a mistake that an agent may well make: reward 0

    python -m miles_core.tasks.terminal DIR                # what tasks there are
    python -m miles_core.tasks.terminal DIR --check        # of each: the solution scores 1, doing nothing 0, the mistake 0

    with terminal.start(task) as sandbox:
        sandbox.run("ls")                                  # the agent
        reward, verdict, detail = terminal.judge(task, sandbox)

With `[verifier] guard = false` the tests may run programs of the agent that import modules beside them (`Sandbox.grade`).

Two departures from Harbor: no Dockerfile is built (with `--sandbox docker`, name an image), and home is /work. The tasks of this project
are in `terminal_tasks/` and need bash, python3, git and what every Debian has.
"""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.tasks.sandbox import Limits, Sandbox, SandboxError
from miles_core.tasks.sandbox_command import BACKENDS

TASKS = Path(__file__).parent / "terminal_tasks"
_FILES = ("task.toml", "instruction.md", "tests/test.sh")
_PREPARE = b'rm -f "$0"\n'  # bash has it open: the agent does not find how its task was made
# Section -> key -> (type, default).
_KEYS: dict[str, dict[str, tuple[type, object]]] = {
    "agent": {"timeout_sec": (float, 600.0)},
    "verifier": {"timeout_sec": (float, 60.0), "reward": (str, "any"), "guard": (bool, True)},
    "environment": {
        "build_timeout_sec": (float, 60.0),
        "docker_image": (str, ""),
        "cpus": (int, 1),
        "memory_mb": (int, 1024),
        "storage_mb": (int, 512),
        "allow_internet": (bool, False),
    },
}
_FREE = ("version", "schema_version", "source", "metadata")  # read by people


@dataclass(frozen=True)
class TerminalTask:
    """A task, read from its directory. `settings` has every key of _KEYS as `section.key`."""

    name: str
    directory: Path
    instruction: str
    settings: dict[str, Any]

    @property
    def agent_timeout_s(self) -> float:
        """How long the agent may take, from the first command to the last."""
        return float(self.settings["agent.timeout_sec"])

    @property
    def limits(self) -> Limits:
        deadlines = [float(self.settings[key]) for key in self.settings if key.endswith("timeout_sec")]
        return Limits(
            cpus=self.settings["environment.cpus"],
            memory_mb=self.settings["environment.memory_mb"],
            disk_mb=self.settings["environment.storage_mb"],
            episode_s=sum(deadlines) + 60.0,  # each part has its own deadline; this one is for what is forgotten
        )


def load(directory: str | Path) -> TerminalTask:
    """Read one task. Raises ValueError with one sentence about what is missing or wrong."""
    root = Path(directory)
    where = f"terminal task {root}"
    missing = [name for name in _FILES if not (root / name).is_file()]
    if missing:
        raise ValueError(f"{where}: there is no {missing[0]}")
    instruction = (root / "instruction.md").read_text(encoding="utf-8").strip()
    if not instruction:
        raise ValueError(f"{where}: instruction.md is empty")
    try:
        content = tomllib.loads((root / "task.toml").read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: task.toml is no TOML: {error}") from error
    task = TerminalTask(root.resolve().name, root, instruction, _settings(content, f"{where}: task.toml"))
    if task.settings["verifier.reward"] not in ("any", "exit_code"):
        raise ValueError(f'{where}: task.toml: [verifier] reward is "any" or "exit_code", not {task.settings["verifier.reward"]!r}')
    try:
        _ = task.limits
    except ValueError as error:
        raise ValueError(f"{where}: task.toml: {error}") from error
    return task


def _settings(content: dict, where: str) -> dict[str, Any]:
    flat = [section for section in _KEYS if not isinstance(content.get(section, {}), dict)]
    if flat:
        raise ValueError(f"{where}: [{flat[0]}] is no table")
    unknown = [key for key in content if key not in _KEYS and key not in _FREE]
    unknown += [f"{section}.{key}" for section in _KEYS for key in content.get(section, {}) if key not in _KEYS[section]]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]} (known: {', '.join(f'{s}.{k}' for s in _KEYS for k in _KEYS[s])})")
    settings = {}
    for section, keys in _KEYS.items():
        for key, (kind, default) in keys.items():
            value = content.get(section, {}).get(key, default)
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind or (kind is float and not value > 0):
                raise ValueError(f"{where}: {section}.{key} = {value!r} is no {'positive number' if kind is float else kind.__name__}")
            settings[f"{section}.{key}"] = value
    return settings


def load_all(directory: str | Path) -> list[TerminalTask]:
    """The tasks below a directory, by name; or the one that it is. Raises ValueError where there is none, or one is wrong."""
    root = Path(directory)
    if (root / "task.toml").exists():
        return [load(root)]
    found = sorted(path.parent for path in root.glob("*/task.toml"))
    if not found:
        raise ValueError(f"there is no terminal task in {root}: a task is a directory with a task.toml")
    return [load(path) for path in found]


def start(task: TerminalTask, backend: str = "bubblewrap", image: str = "") -> Sandbox:
    """A sandbox in which the task is prepared. Raises ValueError for a task that this backend cannot run, SandboxError when it fails."""
    image = image or str(task.settings["environment.docker_image"])
    if (task.directory / "environment/Dockerfile").exists() and (backend == "bubblewrap" or not image):
        raise ValueError(
            f"terminal task {task.directory}: environment/Dockerfile is not built here; put what it copies into environment/ and what it "
            "runs into environment/setup.sh, or build an image, name it as [environment] docker_image, and use --sandbox docker"
        )
    network = bool(task.settings["environment.allow_internet"])
    sandbox = Sandbox(backend, task.limits, network, "" if backend == "bubblewrap" else image)
    try:
        _prepare(task, sandbox)
    except BaseException:
        sandbox.close()
        raise
    return sandbox


def _prepare(task: TerminalTask, sandbox: Sandbox) -> None:
    environment = task.directory / "environment"
    sandbox.put_tree(environment, leave_out=("setup.sh", "Dockerfile"))
    if (environment / "setup.sh").exists():
        sandbox.put({"setup.sh": _PREPARE + (environment / "setup.sh").read_bytes()}, "/tmp")
        result = sandbox.run_script("/tmp/setup.sh", float(task.settings["environment.build_timeout_sec"]))
        if result.exit_code != 0:
            raise SandboxError(
                f"terminal task {task.name}: environment/setup.sh failed with {result.exit_code}: {last_line(result.output)}"
            )


def judge(task: TerminalTask, sandbox: Sandbox) -> tuple[float, str, str]:
    """Grade what the agent left -> (reward, verdict, detail), the verdict as in DESIGN 4.9. The reward means nothing unless it is `ok`.

    `timeout`: the tests, or the episode, took too long. `no_verdict`: reward.txt holds no finite number, or the tests broke a limit.
    """
    try:
        grade = sandbox.grade(task.directory / "tests", float(task.settings["verifier.timeout_sec"]), task.settings["verifier.guard"])
    except SandboxError as error:
        return 0.0, error.verdict, str(error)
    result = grade.result
    if result.timed_out:
        return 0.0, "timeout", f"the tests took more than {task.settings['verifier.timeout_sec']:g} s"
    if result.limit:
        return 0.0, "no_verdict", f"the tests used {result.limit}"
    if grade.reward_text is None or task.settings["verifier.reward"] == "exit_code":
        return float(result.exit_code == 0), "ok", last_line(result.output)
    try:
        reward = float(grade.reward_text)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        return 0.0, "no_verdict", f"reward.txt holds {grade.reward_text!r}, not a finite number"
    return reward, "ok", last_line(result.output)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def attempt(task: TerminalTask, script: str, backend: str = "bubblewrap", image: str = "") -> tuple[float, str, str]:
    """Run `solution/<script>` in place of the agent, or nothing for "" -> what `judge` says."""
    try:
        with start(task, backend, image) as sandbox:
            if script:
                sandbox.put_tree(task.directory / "solution", "/solution")
                result = sandbox.run(f"bash /solution/{script}", task.agent_timeout_s)
                if result.exit_code != 0:
                    return 0.0, "no_verdict", f"solution/{script} failed with {result.exit_code}: {last_line(result.output)}"
            return judge(task, sandbox)
    except SandboxError as error:
        return 0.0, error.verdict, str(error)


def check(task: TerminalTask, backend: str = "bubblewrap", image: str = "") -> list[str]:
    """What is wrong with a task, a sentence each: the solution must score 1, nothing 0, and the mistake 0."""
    problems = []
    for script, wanted in (("solve.sh", 1.0), ("", 0.0), ("wrong.sh", 0.0)):
        if script and not (task.directory / "solution" / script).is_file():
            problems.append(f"{task.name}: there is no solution/{script}")
            continue
        reward, verdict, detail = attempt(task, script, backend, image)
        if (reward, verdict) != (wanted, "ok"):
            problems.append(f"{task.name}: {script or 'doing nothing'} must score {wanted:g} and scored {reward:g}, {verdict} ({detail})")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m miles_core.tasks.terminal", description="List or check terminal tasks.")
    parser.add_argument("directory", nargs="?", default=TASKS, help="a task, or a directory of tasks (default: those of this project)")
    parser.add_argument("--check", action="store_true", help="run the solution, nothing and the mistake of each, and say what is wrong")
    parser.add_argument("--sandbox", default="bubblewrap", choices=BACKENDS, help="what the tasks run in (default: %(default)s)")
    parser.add_argument("--image", default="", help="for docker and apptainer, where the task names none")
    parser.add_argument("--jobs", type=int, default=2, help="tasks at a time (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        tasks = load_all(arguments.directory)
        if not arguments.check:
            print("\n".join(f"{task.name}: {task.instruction.splitlines()[0]}" for task in tasks))
            return 0
        with ThreadPoolExecutor(arguments.jobs) as pool:
            found = list(pool.map(lambda task: check(task, arguments.sandbox, arguments.image), tasks))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for task, problems in zip(tasks, found, strict=True):
        print("\n".join(problems) or f"{task.name}: ok")
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
