"""The bash agent in real sandboxes, with answers given in place of the model's: the sandbox, the tests and the verdicts are the real ones.

    python -m pytest tests/core/test_shell_agent.py
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_core import tasks
from miles_core.tasks import terminal
from miles_core.tito.episodes import EpisodeOver
from miles_core.tito.parsers import parse_assistant
from miles_core.tito.shell_agent import HOW, solve


class Script:
    """Says these commands one after the other, then nothing; what the tool answered is in `heard`."""

    def __init__(self, commands: list[str], turns: int = 99, shows_tools: bool = True):
        self.commands, self.turns, self.shows_tools, self.heard, self.roles = commands, turns, shows_tools, [], []

    async def chat(self, messages: list[dict], *, tools: list[dict]) -> SimpleNamespace:
        assert tools[0]["function"]["name"] == "bash"
        self.heard = [message["content"] for message in messages if message["role"] == "tool"]
        self.roles = [message["role"] for message in messages]
        if len(self.heard) == self.turns:
            raise EpisodeOver("no turn is left")
        message: dict = {"role": "assistant", "content": "done"}
        if len(self.heard) < len(self.commands):
            call = {"name": "bash", "arguments": self.commands[len(self.heard)]}
            calls = [{"id": f"c{len(self.heard)}", "type": "function", "function": call}]
            message = {"role": "assistant", "content": "", "tool_calls": calls}
        return SimpleNamespace(message=message)


def say(command: str) -> str:
    return json.dumps({"command": command})


def played(name: str, script: Script) -> dict:
    return asyncio.run(solve(script, [{"role": "user", "content": "..."}], str(terminal.TASKS / name)))


@pytest.mark.parametrize("name", ["make-room", "unique-emails", "fix-permissions"])
def test_the_solution_by_hand_is_right_and_nothing_is_wrong(name: str) -> None:
    solution = (terminal.TASKS / name / "solution/solve.sh").read_text()
    script = Script([say("cat > s.sh <<'EOF_OF_SCRIPT'\n" + solution + "\nEOF_OF_SCRIPT"), say("bash s.sh; rm -f s.sh")])
    assert played(name, script) | {"detail": ""} == {"reward": 1.0, "verdict": "ok", "detail": ""}
    assert script.heard[1].endswith("[exit code 0]")
    assert played(name, Script([]))["reward"] == 0.0


def test_the_shell_remembers_and_bad_calls_are_told(tmp_path: Path) -> None:
    script = Script([say("cd /tmp; export A=7"), say("echo $PWD $A; false"), "{", json.dumps({"cmd": 1}), json.dumps({"command": 3})])
    assert played("make-room", script)["verdict"] == "ok"
    assert script.heard[1] == "/tmp 7\n[exit code 1]"
    assert script.heard[2] == script.heard[3] == 'the arguments must be {"command": "..."}'
    assert script.heard[4] == "there is one tool, bash, and its command is a string"


def test_an_episode_that_ends_early_is_judged_all_the_same() -> None:
    solution = (terminal.TASKS / "unique-emails/solution/solve.sh").read_text()
    assert played("unique-emails", Script([say(solution)] * 5, turns=1))["reward"] == 1.0


def test_a_sandbox_that_comes_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The episode ends while the sandbox starts."""
    made, start = [], terminal.start

    def slow(task: terminal.TerminalTask) -> object:
        time.sleep(0.3)
        made.append(start(task))
        return made[0]

    async def cut_short() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await solve(Script([]), [], str(terminal.TASKS / "make-room"))
        while not made or made[0]._process.poll() is None:
            await asyncio.sleep(0.02)

    monkeypatch.setattr(terminal, "start", slow)
    asyncio.run(asyncio.wait_for(cut_short(), 10))


def test_prompts_are_instructions_and_every_fifth_task_is_held_out() -> None:
    task, again = tasks.load("shell", 3), tasks.load("shell", 3)
    assert task.num_eval == 7 and task.agent == "miles_core.tito.shell_agent:solve"
    held_out = {task.prompt(group, "eval")[1] for group in range(task.num_eval)}
    trained = {task.prompt(group)[1] for group in range(400)}
    assert len(held_out) == 7 and len(trained) == 25 and not held_out & trained
    for group in range(9):
        messages, directory, text = task.prompt(group)
        assert (messages, directory, text) == again.prompt(group)
        instruction = (Path(directory) / "instruction.md").read_text().strip()
        assert [message["role"] for message in messages] == ["user"] and messages[0]["content"].strip() == text.strip() == instruction
    with pytest.raises(ValueError, match="terminal task"):
        tasks.load("shell", 0, "/nowhere")


def test_a_model_whose_template_does_not_show_tools_is_told() -> None:
    script = Script([say("echo hello")], shows_tools=False)
    assert played("make-room", script)["verdict"] == "ok"
    assert script.roles == ["system", "user", "assistant", "tool"] and script.heard == ["hello\n[exit code 0]"]
    call = parse_assistant(HOW[HOW.index("<tool_call>") : HOW.index("You are then")], "chatml")["tool_calls"][0]
    assert call["function"] == {"name": "bash", "arguments": '{"command": "ls -l"}'}
