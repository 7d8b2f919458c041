"""Tasks: where prompts come from and what an answer is worth. Pure CPU code.

    task = tasks.load("sort", seed=0)
    prompt = tasks.make_prompt(task, tokenizer, group=7, split="train")      # -> schema.Prompt

A task of your own is a file: `--task path/to/file.py`. It defines

    def task(seed, data):                            # data: the value of --data
        return Task("mine", prompt, reward, num_eval=100)       # from miles_core.tasks import Task

and may take `eval_data` (the value of --eval-data) as a third argument. `sort.py` is a complete example.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.tasks import arithmetic, gsm8k, guess, reasoning_gym, shell, sort
from miles_core.tasks.base import SPLITS, Task, one_user_turn, unknown

if TYPE_CHECKING:
    import numpy as np

    from miles_core.schema import Prompt

__all__ = ["SPLITS", "Task", "encode", "load", "make_prompt", "user_prompt"]
_TASKS = {"sort": sort.task, "arithmetic": arithmetic.task, "gsm8k": gsm8k.task, "guess": guess.task, "shell": shell.task}
_GYM = "reasoning-gym:"


def load(name: str, seed: int, data: str = "", eval_data: str = "") -> Task:
    """The task called `name`. Raises ValueError for an unknown name, a file that defines no task, and for missing or broken data."""
    data, eval_data = data or "", eval_data or ""
    if name in _TASKS:
        return _TASKS[name](seed, data, eval_data)
    if name.startswith(_GYM):
        return reasoning_gym.task(name.removeprefix(_GYM), seed, data, eval_data)
    if name.endswith(".py"):
        return _from_file(name, seed, data, eval_data)
    raise ValueError(unknown(name, [*_TASKS, _GYM + "NAME", "path/to/file.py"]))


def _from_file(name: str, seed: int, data: str, eval_data: str) -> Task:
    if not Path(name).is_file():
        raise ValueError(f"--task {name}: no such file")
    spec = importlib.util.spec_from_file_location("miles_user_task", name)
    assert spec is not None and spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--task {name} cannot be imported: {type(error).__name__}: {error}") from error
    make = getattr(module, "task", None)
    if not callable(make):
        raise ValueError(f"--task {name}: the file defines no function task(seed, data)")
    optional: dict[str, Any] = {}
    if "eval_data" in inspect.signature(make).parameters:
        optional["eval_data"] = eval_data
    elif eval_data:
        raise ValueError(f"--eval-data is not read by --task {name}: add the argument eval_data to its function task")
    task = make(seed, data, **optional)
    missing = [attribute for attribute in ("name", "prompt", "reward", "num_eval") if not hasattr(task, attribute)]
    if missing:
        raise ValueError(f"--task {name}: what task(seed, data) returned has no {', '.join(missing)}; return a miles_core.tasks.Task")
    return task


def make_prompt(task: Task, tokenizer: Any, group: int, split: str = "train") -> Prompt:
    """Prompt number `group` of a split, tokenised by `encode`."""
    from miles_core.schema import Prompt  # here: schema imports torch, and a reward process, which loads this module, does without

    assert split in SPLITS, split
    messages, answer, text = task.prompt(group, split)
    return Prompt(group, encode(messages, tokenizer, f"--task {task.name}, {split} prompt {group}"), text, answer, tuple(messages))


def user_prompt(text: str, tokenizer: Any) -> np.ndarray:
    """One user message as the model is to see it, int32 [P]."""
    return encode(one_user_turn(text), tokenizer, "the message")


def encode(messages: list[dict], tokenizer: Any, what: str) -> np.ndarray:
    """Chat messages -> int32 [P], through the tokenizer's chat template, with the header of the answer added.

    A tokenizer without a template gets the plain text of the messages, and that is said once on stderr. Raises ValueError (about `what`)
    when a message spells a control token such as <|im_end|>: tokenised, it would end the turn in the middle of the question.
    """
    import numpy as np  # here: it starts threads, and a reward process, which loads this module, forks

    for token in _control_tokens(tokenizer):
        if any(token in message["content"] for message in messages):
            raise ValueError(f"{what} contains the control token {token} of this model; remove it")
    if tokenizer.chat_template:
        # Without return_dict, transformers 4 returns ids and 5 a dictionary.
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        _announce_plain_text(tokenizer.name_or_path)
        ids = tokenizer.encode("\n".join(message["content"] for message in messages))
    return np.array(ids, np.int32)


@functools.lru_cache(maxsize=4)
def _control_tokens(tokenizer: Any) -> tuple[str, ...]:
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


@functools.cache
def _announce_plain_text(name: str) -> None:
    print(f"tokenizer {name!r} has no chat template: prompts are the plain text of their messages", file=sys.stderr, flush=True)
