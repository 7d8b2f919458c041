"""The endpoint, asked by the openai client as it is published. Run: python -m pytest tests/core/test_tito_server.py

Bad input, limits and vanishing clients are in test_tito_server_abuse.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import httpx2
import numpy as np
import openai
import pytest
from tito_kit import CALL, DEFAULTS, END, TOOLS, Endpoint, logp_of, running

from miles_core.tito.loop import Loop
from miles_core.tito.server import make_app

USER = {"role": "user", "content": "1+2="}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with running() as made:
        yield made


def ask(client: openai.OpenAI, messages: list, **options: object) -> object:
    return client.chat.completions.create(model="policy", messages=messages, **options)


def test_an_episode_with_tools_keeps_the_tokens_of_every_turn(endpoint: Endpoint) -> None:
    session = endpoint.open(group=7, sample=2)
    client, backend = endpoint.client(session), endpoint.backend
    messages = [USER]
    backend.script = lambda request: f"I add.\n{CALL}"
    first = ask(client, messages, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content == "I add."
    (call,) = first.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
    messages += [first.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    backend.script = lambda request: "3"
    second = ask(client, messages, tools=TOOLS).choices[0]
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == ("stop", "3", None)

    one, two = backend.requests
    said = endpoint.tokenizer.encode(f"I add.\n{CALL}{END}", add_special_tokens=False)
    assert np.array_equal(two.tokens[: len(one.tokens) + len(said)], [*one.tokens, *said]), "stored ids are a prefix of the next prompt"
    assert (one.group, one.sample) == (7, 2)
    tree = endpoint.tree(session)
    assert [(node["parent"], node["finish"]) for node in tree["nodes"]] == [(0, "stop"), (1, "stop")]
    assert endpoint.http.post(f"/sessions/{session['id']}/finish", json={"reward": 0.5}).json()["reward"] == 0.5
    (ended,) = endpoint.ended
    assert (ended.reward, ended.verdict) == (0.5, "ok")
    with pytest.raises(openai.ConflictError, match="finished"):
        ask(client, messages, tools=TOOLS)
    assert endpoint.http.delete(f"/sessions/{session['id']}").status_code == 204 and len(endpoint.ended) == 1
    with pytest.raises(openai.NotFoundError):
        ask(client, messages)


TEXTS = (
    "Hello",
    "",
    "Grüße, 世界 🎈!",
    "<think>\nhm\n</think>\n\nyes",
    f"So: {CALL}\n{CALL}",
    "<tool_call>{broken}</tool_call> \n",
    "a STOP b",
    "a STO",
)


@pytest.mark.parametrize("width", [1, 2, 100])
def test_what_is_streamed_adds_up_to_what_is_answered(endpoint: Endpoint, width: int) -> None:
    endpoint.backend.width = width
    for text in TEXTS:
        endpoint.backend.script = lambda request, text=text: text
        options = {"tools": TOOLS, "stop": ["STOP", "never"], "logprobs": True, "top_logprobs": 2}
        plain = ask(endpoint.client(endpoint.open()), [USER], **options)
        session = endpoint.open()
        chunks = list(ask(endpoint.client(session), [USER], stream=True, stream_options={"include_usage": True}, **options))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        message = plain.choices[0].message
        assert "".join(d.content or "" for d in deltas) == (message.content or "")
        assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == (getattr(message, "reasoning_content", None) or "")
        calls = [c for d in deltas for c in d.tool_calls or []]
        assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [
            (c.id, c.function.name, c.function.arguments) for c in message.tool_calls or []
        ]
        assert [d.role for d in deltas if d.role] == ["assistant"]
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [plain.choices[0].finish_reason]
        streamed = [entry for c in chunks if c.choices and c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
        assert streamed == plain.choices[0].logprobs.content
        assert chunks[-1].usage == plain.usage and plain.usage.prompt_tokens_details.cached_tokens == plain.usage.prompt_tokens // 2
        (node,) = endpoint.tree(session)["nodes"]
        assert node["sampled_tokens"] == plain.usage.completion_tokens == len(streamed)


def test_tokens_are_streamed_as_they_are_sampled(endpoint: Endpoint) -> None:
    """The first words arrive while the engine still waits for the client to have read them."""
    endpoint.backend.pause_s = 0.02
    endpoint.backend.script = lambda request: "word " * 20
    seen = []
    for chunk in ask(endpoint.client(endpoint.open()), [USER], stream=True):
        seen.append((chunk.choices[0].delta.content, endpoint.backend.load))
    assert sum(load for _, load in seen[:10]) == 10, "the turn was not over when its first tokens arrived"


def test_log_probs_are_those_of_the_sampled_tokens(endpoint: Endpoint) -> None:
    endpoint.backend.script = lambda request: "aé"
    (choice,) = ask(endpoint.client(endpoint.open()), [USER], logprobs=True, top_logprobs=2).choices
    ids = endpoint.tokenizer.encode("aé" + END, add_special_tokens=False)
    entries = choice.logprobs.content
    assert [e.logprob for e in entries] == [logp_of(token) for token in ids]
    assert [(e.token, e.bytes) for e in entries[:1]] == [("a", [97])] and entries[1].bytes is None, "half a character has no text"
    assert all(len(e.top_logprobs) == 2 and e.top_logprobs[1].logprob == -9999 for e in entries)
    (choice,) = ask(endpoint.client(endpoint.open()), [USER]).choices
    assert choice.logprobs is None


def test_parameters_reach_the_engine(endpoint: Endpoint) -> None:
    client = endpoint.client(endpoint.open())
    ask(client, [USER], temperature=0.5, top_p=0.9, max_tokens=9, stop="x", seed=5, top_logprobs=1, logprobs=True, extra_body={"top_k": 3})
    ask(client, [USER], n=1, max_tokens=9, max_completion_tokens=4, stop=["x", "y"], temperature=None)
    ask(client, [USER])
    one, two, three = (request.params for request in endpoint.backend.requests)
    assert (one.temperature, one.top_p, one.top_k, one.max_new_tokens, one.stop_strings) == (0.5, 0.9, 3, 9, ("x",))
    assert (endpoint.backend.requests[0].seed, endpoint.backend.requests[0].top_logprobs) == (5, 1)
    assert (two.max_new_tokens, two.stop_strings, two.temperature) == (4, ("x", "y"), 1.0)
    assert three == DEFAULTS and endpoint.backend.requests[2].seed is None
    assert len({request.attempt for request in endpoint.backend.requests}) == 3, "a retry is another sample"


def test_a_trainer_keeps_its_distribution() -> None:
    with running(pinned=True) as endpoint:
        session = endpoint.open()
        body = {"messages": [USER], "temperature": 0.1, "top_p": 0.5, "top_k": 2, "seed": 1, "max_tokens": 3}
        response = endpoint.http.post(f"{session['base_url']}/chat/completions", json=body)
        assert response.headers["x-ignored-fields"] == "temperature, top_p, top_k, seed"
        (request,) = endpoint.backend.requests
        assert (request.params.temperature, request.params.top_p, request.params.top_k, request.seed) == (1.0, 1.0, 0, None)
        assert request.params.max_new_tokens == 3


def test_tool_choice_and_template_kwargs(endpoint: Endpoint) -> None:
    backend = endpoint.backend
    backend.script = lambda request: CALL
    none = ask(endpoint.client(endpoint.open()), [USER], tools=TOOLS, tool_choice="none").choices[0]
    assert (none.message.content, none.message.tool_calls, none.finish_reason) == (CALL, None, "stop")
    backend.script = lambda request: CALL.removeprefix("<tool_call>\n")
    for stream in (False, True):
        session = endpoint.open()
        if stream:
            deltas = [c.choices[0].delta for c in ask(endpoint.client(session), [USER], tools=TOOLS, tool_choice="required", stream=True)]
            calls = [call for delta in deltas for call in delta.tool_calls or []]
        else:
            calls = ask(endpoint.client(session), [USER], tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["add"]
    backend.script = lambda request: "deep\n</think>\n\nyes"
    options = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    plain = ask(endpoint.client(endpoint.open()), [USER], **options).choices[0].message
    assert (plain.reasoning_content, plain.content) == ("deep", "yes")
    deltas = [c.choices[0].delta for c in ask(endpoint.client(endpoint.open()), [USER], stream=True, **options)]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "deep"
    assert "".join(d.content or "" for d in deltas) == "yes"


def test_a_turn_cut_by_length_ends_its_branch(endpoint: Endpoint) -> None:
    client = endpoint.client(endpoint.open())
    cut = ask(client, [USER], max_tokens=2).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", "He")
    with pytest.raises(openai.ConflictError, match="cut by length"):
        ask(client, [USER, {"role": "assistant", "content": "He"}, USER])
    assert ask(client, [USER]).choices[0].message.content == "Hello", "a branch from before it is fine"


def test_64_sessions_at_once_do_not_mix(endpoint: Endpoint) -> None:
    """Each of 64 sessions counts up for 4 turns through its own client call; answers repeat the number that the session was given."""
    backend = endpoint.backend
    backend.pause_s = 0.001
    backend.script = lambda request: "I am " + re.findall(r"number (\d+)", backend.decode(request.tokens))[-1]

    async def episode(http: httpx2.AsyncClient, number: int) -> str:
        session = (await http.post("/sessions", json={})).json()
        client = openai.AsyncOpenAI(base_url=session["base_url"], api_key="none", http_client=http, timeout=60)
        messages = [{"role": "user", "content": f"number {number}"}]
        for turn in range(4):
            if (number + turn) % 2:
                chunks = [c async for c in await ask(client, messages, stream=True)]
                text = "".join(c.choices[0].delta.content or "" for c in chunks)
            else:
                text = (await ask(client, messages)).choices[0].message.content
            assert text == f"I am {number}"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
        return session["id"]

    async def all_episodes() -> list[str]:
        async with openai.DefaultAsyncHttpxClient(base_url=endpoint.server.url, timeout=60) as http:
            return await asyncio.gather(*(episode(http, number) for number in range(64)))

    ids = asyncio.run(all_episodes())
    assert len(set(ids)) == 64
    for session_id in ids:
        tree = endpoint.tree({"id": session_id})
        assert [node["parent"] for node in tree["nodes"]] == [0, 1, 2, 3]
    counts = endpoint.http.get("/metrics").text
    assert 'miles_turns_total{finish="stop"} 256' in counts and "miles_sessions 64" in counts and "miles_turns_in_flight 0" in counts


def test_requests_that_overlap_become_branches(endpoint: Endpoint) -> None:
    endpoint.backend.pause_s = 0.01
    session = endpoint.open()

    async def both() -> list:
        client = openai.AsyncOpenAI(base_url=session["base_url"], api_key="none")
        async with client:
            return await asyncio.gather(*(ask(client, [USER]) for _ in range(4)))

    asyncio.run(both())
    assert [node["parent"] for node in endpoint.tree(session)["nodes"]] == [0, 0, 0, 0]
    assert len({request.attempt for request in endpoint.backend.requests}) == 4


def test_models_health_and_metrics(endpoint: Endpoint) -> None:
    session = endpoint.open()
    assert [model.id for model in endpoint.client(session).models.list()] == ["policy"]
    assert endpoint.http.get("/health").json() == {"status": "ok", "model": "policy", "sessions": 1, "turns_in_flight": 0}
    ask(endpoint.client(session), [USER])
    text = endpoint.http.get("/metrics").text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) >= 6
    assert all(re.fullmatch(r'miles_\w+(\{\w+="\w+"\})? \d+', line) for line in text.splitlines() if not line.startswith("#"))


def test_the_server_stops_in_the_middle_of_a_turn_and_its_port_is_free_again(endpoint: Endpoint) -> None:
    endpoint.backend.pause_s = 30
    session = endpoint.open()

    async def ask_and_stop() -> None:
        async with openai.AsyncOpenAI(base_url=session["base_url"], api_key="none", max_retries=0) as client:
            asked = asyncio.create_task(ask(client, [USER]))
            while not endpoint.backend.load:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(endpoint.stop)
            with pytest.raises(openai.APIError):
                await asked

    asyncio.run(ask_and_stop())
    assert endpoint.backend.num_cancelled == 1 and [s.verdict for s in endpoint.ended] == ["no_verdict"]
    app = make_app(endpoint.sessions, DEFAULTS, model="policy")
    again = endpoint.serve(app, port=endpoint.server.port)
    assert again.port == endpoint.server.port
    assert endpoint.http.post("/sessions", json={}).status_code == 503, "these sessions were closed"
    with pytest.raises(ValueError, match=f"--serve-port {again.port} on 127.0.0.1 cannot be used"):
        endpoint.serve(app, port=again.port)
    endpoint.run(again.stop())


def test_an_interrupt_in_the_middle_of_a_poll_leaves_a_loop_that_runs() -> None:
    """Ctrl-C comes anywhere; the server is stopped on the same loop after it."""
    loop = Loop()

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def stop() -> str:
        await asyncio.sleep(0.01)
        return "stopped"

    loop.events.call_soon(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.poll()
    assert loop.run(stop()) == "stopped"
    loop.close()
