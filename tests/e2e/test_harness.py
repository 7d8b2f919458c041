"""Runs whose episodes are played over HTTP: by harness processes, by clients of the OpenAI API, by the OpenAI Agents SDK.

    python -m pytest tests/e2e/test_harness.py
"""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
from harness import ROOT, TASK, Job, consumed_groups, sentence, steps, succeed

from miles_core.tasks.guess import TOOL

SMALL = ("--prompts-per-step", 4, "--samples-per-prompt", 4, "--eval-prompts", 0, "--run-dir", "run")
SMALL = (*SMALL, "--max-turns", 2, "--max-new-tokens", 100)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free."""
    for first in range(18000, 30000, count):
        listeners = [socket.socket() for _ in range(count)]
        try:
            for port, listener in enumerate(listeners, first):
                listener.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for listener in listeners:
                listener.close()
    raise AssertionError("no free ports")


def harness(cwd: Path, port: int, agent: str, *flags: object) -> Job:
    url = f"http://127.0.0.1:{port}"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Job(cwd, "--url", url, "--agent", agent, *flags, script="-m miles_core.tito.harness", PYTHONPATH=path)


def post(url: str, body: dict | None = None) -> tuple[int, dict]:
    """Status and answer."""
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


AGENT = """
import asyncio, os
from pathlib import Path

async def run(session, prompt, metadata):
    messages = list(prompt)
    assert session.turns_left == 2 and session.tokens_left > 0
    first = await session.chat(messages)
    if first.finish == "stop":
        await session.chat([*messages, first.message, {"role": "user", "content": messages[0]["content"]}])
    port = session.base_url.split(":")[2].split("/")[0]
    with open("played", "a") as file:
        file.write(port + "\\n")
    return {"reward": 2.0 ** metadata[0]}

async def hang(session, prompt, metadata):
    await session.chat(prompt)
    Path(f"hangs-{session.id}").touch()
    await asyncio.sleep(600)

async def judged(session, prompt, metadata):
    await run(session, prompt, metadata)
    await session.chat(prompt)                      # one turn too many: the episode is over, and the task judges the last answer
"""


def test_a_harness_plays_the_episodes_of_two_ranks(tmp_path: Path) -> None:
    """It knows the address of one of them. The rewards that it posts say which groups each step was trained on."""
    (tmp_path / "mine.py").write_text(AGENT)
    port = free_ports(2)
    flags = ("--task", TASK, "--agent", "http", "--serve-port", port, "--rollout-ranks-per-node", 2, *SMALL)
    run = Job(tmp_path, *flags, "--steps", 2, ranks=3)
    ended = harness(tmp_path, port, "mine.py:run").end()
    assert run.end().code == 0 and ended.code == 0, str(ended)
    assert "32 episodes were played here" in ended.out and ended.err == ""
    lines = steps(tmp_path / "run")
    assert sorted(group for step in lines for group in consumed_groups(step, 4)) == list(range(8))
    for step in lines:
        assert step["rollout/verdict/ok"] == 1.0 and step.get("train/logp_diff_max", 0.0) == 0.0, step
    assert lines[0]["train/logp_diff_tokens"] == lines[0]["train/tokens"] > 0
    assert set((tmp_path / "played").read_text().split()) == {str(port), str(port + 1)}


def test_a_harness_that_is_killed_loses_its_episodes_and_no_more(tmp_path: Path) -> None:
    """And they are played again: three of a group of four are too many to leave out."""
    (tmp_path / "mine.py").write_text(AGENT)
    port = free_ports(1)
    flags = ("--task", TASK, "--agent", "http", "--serve-port", port, "--episode-timeout", 8, *SMALL)
    run = Job(tmp_path, *flags, "--steps", 2, ranks=2)
    run.wait_until(lambda: "serves its sessions" in run.out, "the address")
    first = harness(tmp_path, port, "mine.py:hang", "--concurrency", 3)
    first.wait_until(lambda: len(list(tmp_path.glob("hangs-*"))) == 3, "three turns")
    os.kill(first.process.pid, signal.SIGKILL)
    second = harness(tmp_path, port, "mine.py:judged").end()
    ended = run.end()
    assert ended.code == 0 and second.code == 0, f"{ended} {second}"
    lines = steps(tmp_path / "run")
    assert ended.err.count("timeout: the episode took longer than 8 s") == lines[-1]["ring/resampled"] == 3
    assert sum(16 * step["rollout/verdict/ok"] for step in lines) == 32 and "32 episodes were played here" in second.out


def test_clients_of_the_openai_api_are_harnesses(tmp_path: Path) -> None:
    """Without our command: tools, streaming, the limit of turns, and what is answered when nothing waits."""
    port = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    flags = ("--task", "guess", "--agent", "http", "--serve-port", port, *SMALL, "--prompts-per-step", 1, "--samples-per-prompt", 3)
    run = Job(tmp_path, *flags, "--steps", 1)
    run.wait_until(lambda: "serves its sessions" in run.out, "the address")
    open_ones = []
    for _ in range(3):
        status, made = post(f"{url}/sessions")
        assert status == 201 and made["turns_left"] == 2 and made["prompt"][0]["role"] == "user" and isinstance(made["metadata"], int)
        open_ones.append(made)
    assert [made["sample"] for made in open_ones] == [0, 1, 2]
    status, refused = post(f"{url}/sessions")
    assert (status, refused["error"]["code"]) == (503, "no_episode")
    for number, made in enumerate(open_ones):
        client = openai.OpenAI(base_url=made["base_url"], api_key="none", max_retries=0)
        request = {"model": "policy", "tools": [TOOL]}
        messages = list(made["prompt"])
        said = client.chat.completions.create(messages=messages, **request).choices[0]
        chunks = client.chat.completions.create(messages=messages, stream=True, **request)
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] in ("stop", "length", "tool_calls")
        before = urllib.request.urlopen(f"{url}/sessions/{made['id']}").read()
        with pytest.raises(openai.ConflictError) as error:
            client.chat.completions.create(messages=[*messages, said.message.model_dump(exclude_none=True), *messages], **request)
        assert error.value.code == "no_turns_left" and urllib.request.urlopen(f"{url}/sessions/{made['id']}").read() == before
        assert post(f"{url}/sessions/{made['id']}/finish", {"reward": number / 2})[0] == 200
    assert run.end().code == 0
    (step,) = steps(tmp_path / "run")
    assert step["rollout/reward_mean"] == 0.5 and step["train/logp_diff_max"] == 0.0


PUSH = """
import openai

async def run(session, prompt, metadata):
    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    messages = list(prompt)
    first = (await client.chat.completions.create(model="policy", messages=messages)).choices[0]
    if first.finish_reason == "stop":
        messages += [first.message.model_dump(exclude_none=True), *prompt]
    await session.chat(messages)
    try:
        await client.chat.completions.create(model="policy", messages=messages)
    except openai.ConflictError as error:
        return {"reward": float(error.code == "no_turns_left" and session.turns_left == 0)}
"""


def test_an_agent_gives_its_base_url_to_a_client(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PUSH)
    flags = ("--agent", "mine.py:run", *SMALL, "--steps", 1)
    succeed(tmp_path, *flags, "--serve-port", free_ports(1), MILES_SERVE_TOKEN="a-secret-of-ours")
    (step,) = steps(tmp_path / "run")
    assert step["rollout/reward_mean"] == 1.0 and step["train/logp_diff_max"] == 0.0 and step["rollout/verdict/ok"] == 1.0


def test_the_agents_sdk_plays_in_a_run(tmp_path: Path) -> None:
    """The embedded policy has never seen a tool: its tokens are what is looked at. tests/core/test_agents_sdk.py plays whole games."""
    port = free_ports(1)
    flags = ("--task", "guess", "--serve-port", port, *SMALL, "--steps", 1)
    sdk = f"{ROOT}/launch/recipes/openai_agents_guess.py:play"
    run = Job(tmp_path, *flags, "--agent", "http")
    ended = harness(tmp_path, port, sdk).end()
    assert run.end().code == 0 and ended.code == 0 and "16 episodes were played here" in ended.out, str(ended)
    (step,) = steps(tmp_path / "run")
    assert step["rollout/verdict/ok"] == 1.0 and step["train/logp_diff_max"] == 0.0
    assert step["train/logp_diff_tokens"] == step["train/tokens"] > 0


def test_what_is_said_when_nobody_comes_and_when_nothing_is_there(tmp_path: Path) -> None:
    port = free_ports(1)
    flags = (*SMALL, "--agent", "http", "--serve-port", port)
    said = sentence(Job(tmp_path, *flags, "--timeout", 3, "--steps", 1).end())
    start = f"python -m miles_core.tito.harness --url http://127.0.0.1:{port} --agent module:function"
    assert f"16 episodes wait, and no harness has asked for one for 3 s. Start one: {start}" in said
    assert "cannot be reached for 1 s" in sentence(harness(tmp_path, port, "miles_core.tasks.guess:play", "--wait", 1).end())
