"""The agent of the task `shell`: the model works in a sandbox with a bash tool until it calls it no more; then tests judge what it left.

    python train.py --task shell --model DIR --max-turns 20 --episode-timeout 600
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from miles_core.tasks import terminal
from miles_core.tasks.sandbox import Sandbox, SandboxError
from miles_core.tito.agents import EpisodeOver

if TYPE_CHECKING:
    from miles_core.tito.episodes import AgentSession

COMMAND_S = 30.0
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a shell that keeps its directory and variables. Returns the output and the exit code.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


# For models whose chat template leaves tools out of the prompt: the form is that of Hermes and Qwen.
HOW = """You work in a shell of your own. To run a command, answer with a call of this form and nothing else:
<tool_call>
{"name": "bash", "arguments": {"command": "ls -l"}}
</tool_call>
You are then shown its output. When the task is done, answer without a call."""


async def solve(session: AgentSession, prompt: list[dict], directory: str) -> dict:
    """The sandbox blocks, so it is used in threads. A sandbox that fails is an `infra_error`, one that runs out of time a `timeout`."""
    task = terminal.load(directory)
    sandbox = None
    try:
        sandbox = await started(task)
        await work(session, prompt, sandbox)
        reward, verdict, detail = await asyncio.to_thread(terminal.judge, task, sandbox)
    except SandboxError as error:
        reward, verdict, detail = 0.0, error.verdict, str(error)
    finally:
        if sandbox is not None:
            await asyncio.to_thread(sandbox.close)
    return {"reward": reward, "verdict": verdict, "detail": detail}


async def started(task: terminal.TerminalTask) -> Sandbox:
    """A sandbox; closed again when the episode is over before it is there."""
    starting = asyncio.ensure_future(asyncio.to_thread(terminal.start, task))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(lambda future: future.exception() or future.result().close())
        raise


async def work(session: AgentSession, prompt: list[dict], sandbox: Sandbox) -> None:
    """Turns until the model calls no tool, or the episode has no more of them."""
    messages = list(prompt) if session.shows_tools else [{"role": "system", "content": HOW}, *prompt]
    try:
        while calls := (reply := await session.chat(messages, tools=[TOOL])).message.get("tool_calls"):
            messages.append(reply.message)
            for call in calls:
                output = await asyncio.to_thread(run_call, sandbox, call)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    except EpisodeOver:
        return


def run_call(sandbox: Sandbox, call: dict) -> str:
    """What the tool answers; a call that makes no sense is told so, and is the model's own fault."""
    function = call["function"]
    try:
        command = json.loads(function["arguments"])["command"]
    except (ValueError, KeyError, TypeError):
        return 'the arguments must be {"command": "..."}'
    if function["name"] != "bash" or not isinstance(command, str):
        return "there is one tool, bash, and its command is a string"
    result = sandbox.run(command, COMMAND_S)
    return f"{result.output}[exit code {result.exit_code}]"
