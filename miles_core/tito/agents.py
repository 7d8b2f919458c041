"""What an agent is, wherever it runs: beside the engine (episodes.py) or in a process of its own (harness.py). No torch.

    async def run(session, prompt, metadata):                    # prompt: chat messages; metadata: what the task's reward needs
        reply = await session.chat(prompt)
        ...
        return {"reward": 1.0}                                   # or None: the task's reward judges the last answer. A "verdict" of
                                                                 # its own (DESIGN 4.9) and a "detail" for people may stand beside it

Every episode ends with a verdict: `ok`; `timeout` when it takes longer than it may; `infra_error` when the agent raises. An agent that asks
for more turns than there are, whose conversation outgrows the context, or that goes on from an answer cut by length, has ended: the task's
reward judges its last answer.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

HTTP = "http"  # --agent http: the agents are elsewhere, and ask for episodes over HTTP
OVER = ("context_length_exceeded", "turn_cut_by_length", "no_turns_left")  # refusals that are the end of an episode, and nobody's fault
Agent = Callable[[Any, list[dict], Any], Awaitable[dict | None]]


class EpisodeOver(Exception):
    """The agent asked for a turn that the episode does not have."""


async def play(agent: Agent, session: Any, prompt: list[dict], metadata: Any, timeout_s: float) -> tuple[float | None, str, str]:
    """(reward, verdict, detail) of one episode. The reward is None where the task's reward has to judge the last answer."""
    try:
        async with asyncio.timeout(timeout_s):
            returned = await agent(session, prompt, metadata) or {}
        if (reward := returned.get("reward")) is not None and not math.isfinite(reward := float(reward)):
            raise ValueError(f"the agent returned the reward {reward}")
        return reward, returned.get("verdict", "ok"), str(returned.get("detail", ""))
    except EpisodeOver as over:
        return None, "ok", str(over)
    except TimeoutError:
        return None, "timeout", f"the episode took longer than {timeout_s:g} s"
    except Exception:  # of the agent: any exception at all is its verdict, and the run goes on
        return None, "infra_error", traceback.format_exc()


def load_agent(name: str) -> Agent:
    """`module:function` or `path/to/file.py:function`. ValueError if there is none."""
    module_name, _, function = name.rpartition(":")
    if not module_name or not function:
        raise ValueError(f"--agent {name}: give module:function, or path/to/file.py:function")
    try:
        if module_name.endswith(".py"):
            path = Path(module_name).resolve()
            sys.path.insert(0, str(path.parent))
            module = importlib.import_module(path.stem)
        else:
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"--agent {name} cannot be imported: {error}") from error
    agent = getattr(module, function, None)
    if not asyncio.iscoroutinefunction(agent):
        raise ValueError(f"--agent {name}: {function} is no `async def {function}(session, prompt, metadata)`")
    return agent
