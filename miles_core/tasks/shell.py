"""shell: terminal tasks (terminal.py) as episodes of an agent with a bash tool. `--data` names another directory of tasks.

Every fifth task, by name, is held out. The prompt is the instruction; the reward comes from the tests, in the sandbox of the episode.
"""

from __future__ import annotations

import random

from miles_core.tasks.base import Task

HELD_OUT_ONE_IN = 5


def task(seed: int, data: str, eval_data: str) -> Task:
    from miles_core.tasks import terminal  # here: `python -m miles_core.tasks.terminal` must not find itself imported already

    every = terminal.load_all(data or terminal.TASKS)
    held_out = terminal.load_all(eval_data) if eval_data else every[::HELD_OUT_ONE_IN]
    splits = {"eval": held_out, "train": every if eval_data else [t for t in every if t not in held_out] or every}

    def prompt(group: int, split: str = "train") -> tuple[list[dict], str, str]:
        tasks = splits[split]
        chosen = tasks[group % len(tasks)] if split == "eval" else random.Random(f"shell/{seed}/{group}").choice(tasks)
        return [{"role": "user", "content": chosen.instruction}], str(chosen.directory), chosen.instruction

    def reward(answer: str, text: str) -> float:
        raise AssertionError(f"the agent grades {answer}, not the text of its last answer")

    return Task("shell", prompt, reward, num_eval=len(held_out), agent="miles_core.tito.shell_agent:solve")
