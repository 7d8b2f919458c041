"""Sessions as whole runs: a task of several turns is trained on, and a checkpoint is served to the real client of the OpenAI API.

    python -m pytest tests/e2e/test_sessions.py
"""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path

import openai
import pytest
from harness import Job, sentence, steps, succeed

from miles_core.assets import TINY

SMALL = ("--prompts-per-step", 4, "--samples-per-prompt", 4)
GUESS = ("--task", "guess", "--max-turns", 6, "--max-new-tokens", 4, "--max-context", 256, *SMALL)


def http(url: str, body: dict | None = None) -> dict:
    """GET, or POST of a body."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=10) as answer:
        return json.load(answer)


@pytest.mark.parametrize(("ranks", "flags"), [(3, ("--rollout-ranks-per-node", 2)), (0, ("--max-staleness", 1, "--on-update", "keep"))])
def test_a_task_of_several_turns_is_trained_on(tmp_path: Path, ranks: int, flags: tuple) -> None:
    """The embedded policy has never seen the game: its tokens are what is looked at, not its luck."""
    ended = succeed(tmp_path, *GUESS, "--steps", 4, "--eval-prompts", 4, "--run-dir", "run", *flags, ranks=ranks)
    assert ended.err == "" and "eval/guess/pass@1" in ended.out
    lines = steps(tmp_path / "run")
    assert len(lines) == 4 and lines[0]["train/logp_diff_tokens"] == lines[0]["train/tokens"] > 0
    for step in lines:
        assert step.get("train/logp_diff_max", 0.0) == 0.0 and step["rollout/verdict/ok"] == 1.0, step
        assert step["rollout/response_len_max"] <= 6 * 4


AGENT = """
async def run(session, prompt, metadata):
    messages = list(prompt)
    first = await session.chat(messages)
    second = await session.chat([*messages, first.message, {"role": "user", "content": messages[0]["content"]}])
    return {"reward": float(len(second.message["content"]) == len(metadata))}

async def bad(session, prompt, metadata):
    await session.chat(prompt)
    raise RuntimeError("a tool is gone")
"""


def test_an_agent_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(AGENT)
    small = (*SMALL, "--steps", 2, "--eval-prompts", 0, "--run-dir", "run")
    succeed(tmp_path, *small, "--agent", "mine.py:run", "--max-turns", 2, "--max-new-tokens", 200)
    for step in steps(tmp_path / "run"):
        assert step["train/logp_diff_max"] == 0.0 and step["rollout/verdict/ok"] == 1.0 and step["rollout/response_len_mean"] > 10
    ended = succeed(tmp_path, *small[:-1], "bad-run", "--agent", "mine.py:bad")
    assert "RuntimeError: a tool is gone" in ended.err
    assert all(step["rollout/verdict/infra_error"] == 1.0 and step["train/tokens"] == 0 for step in steps(tmp_path / "bad-run"))
    for name, said in (("mine.py:none", "none is no `async def none(session, prompt, metadata)`"), ("mine", "give module:function")):
        assert said in sentence(Job(tmp_path, "--dry-run", "--agent", name).end())


FORKS = """
async def compacts(session, prompt, metadata):
    messages = list(prompt)
    for _ in range(2):
        reply = await session.chat(messages)
        messages += [reply.message, {"role": "user", "content": prompt[0]["content"]}]
    last = await session.chat([{"role": "user", "content": prompt[0]["content"][::-1]}])
    return {"reward": float(len(last.message["content"]) + len(reply.message["content"]))}
"""
FORKING = ("--agent", "forks.py:compacts", "--max-turns", 3, "--max-new-tokens", 200, *SMALL, "--eval-prompts", 0)


def test_an_agent_that_compacts_its_context_trains_both_branches(tmp_path: Path) -> None:
    """On two rollout ranks, so that siblings' routes travel; and the same first step on one rank, with one branch an episode."""
    (tmp_path / "forks.py").write_text(FORKS)
    sampled = {}
    for branches, ranks, flags in ((4, 3, ("--steps", 3, "--rollout-ranks-per-node", 2)), (1, 0, ("--steps", 1))):
        ended = succeed(tmp_path, *FORKING, *flags, "--max-branches", branches, "--run-dir", f"run-{branches}", ranks=ranks)
        lines = steps(tmp_path / f"run-{branches}")
        assert ended.err == "" and lines[0]["train/logp_diff_max"] == 0.0
        for step in lines:
            assert step.get("train/logp_diff_max", 0.0) == step["rollout/drift/other_text"] == 0.0 and step["rollout/verdict/ok"] == 1.0
            assert step["train/tokens"] == step["rollout/tokens"] == pytest.approx(16 * step["rollout/response_len_mean"])
            assert step["rollout/branches_dropped"] == (16 if branches == 1 else 0)
        sampled[branches] = lines[0]["train/tokens"]
    assert sampled[1] < sampled[4], "the first step's episodes are the same, of which less is trained"


def test_a_fixed_length_is_that_of_an_episode(tmp_path: Path) -> None:
    """The same terms, divided by the tokens of the step, or by 16 episodes of at most 3 answers of 200 tokens."""
    (tmp_path / "forks.py").write_text(FORKS)
    loss = {}
    for aggregation in ("token_mean", "fixed_length"):
        succeed(tmp_path, *FORKING, "--steps", 1, "--run-dir", aggregation, "--aggregation", aggregation)
        (step,) = steps(tmp_path / aggregation)
        assert step["train/logp_diff_max"] == 0.0
        loss[aggregation] = step["train/pg_loss"]
    assert loss["token_mean"] * step["train/tokens"] == pytest.approx(loss["fixed_length"] * 16 * 3 * 200, rel=1e-4) != 0.0


def test_a_checkpoint_is_served(tmp_path: Path) -> None:
    """Two turns through the openai client; the session's own record has the same tokens and log-probs."""
    job = Job(tmp_path, "--model", TINY, "--serve", "--serve-port", 0, "--max-new-tokens", 200, script="rollout.py")
    job.wait_until(lambda: "serving" in job.out, "the address")
    url = re.search(r"at (http://\S+):", job.out)[1]
    made = http(f"{url}/sessions", {})
    client = openai.OpenAI(base_url=made["base_url"], api_key="none", max_retries=0)
    messages: list = [{"role": "user", "content": "539214="}]
    sampled = []
    for turn in range(2):
        answer = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2, seed=turn)
        choice = answer.choices[0]
        sampled += [token.logprob for token in choice.logprobs.content]
        assert answer.usage.completion_tokens == len(choice.logprobs.content) > 0
        messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "318807="}]
    streamed = client.chat.completions.create(model="tiny", messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    tree = http(f"{url}/sessions/{made['id']}")
    assert len(tree["nodes"]) == 3 and len(sampled) > 4
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[], max_tokens=1)
    assert http(f"{url}/health")["status"] == "ok"
    job.process.send_signal(signal.SIGINT)
    assert job.end().code == 130


def test_an_address_of_others_needs_a_token(tmp_path: Path) -> None:
    said = sentence(Job(tmp_path, "--model", TINY, "--serve", "--serve-host", "0.0.0.0", "--serve-port", 0, script="rollout.py").end())
    assert "--serve-host 0.0.0.0 can be reached from other machines: a bearer token is required" in said
