"""The tree of a session, and the session on top of it: where requests attach, what is refused, and what a turn costs.

python -m pytest tests/core/test_tito_tree.py
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles_core.tito.corpus import TOOLS
from miles_core.tito.errors import SessionError
from miles_core.tito.render import Renderer
from miles_core.tito.session import Reply, Session
from miles_core.tito.tree import MAX_PATHS, Limits, Node
from tests.core.tito_models import FakeBackend, sampling, tokenizer_of

RENDERER = Renderer(tokenizer_of("chatml"), "chatml")
END = RENDERER.encoder.control["<|im_end|>"]


def ids_of(text: str) -> list[int]:
    return RENDERER.tokenizer.encode(text, add_special_tokens=False)


def open_session(say: Callable[[Any], tuple[list[int], str]] | None = None, **options: Any) -> Session:
    backend = FakeBackend(say or (lambda request: ([*ids_of(f"answer {request.attempt} {len(request.tokens)}"), END], "stop")))
    return Session("s", RENDERER, backend, **{"group": 3, "sample": 1, "max_context": 1 << 20, **options})


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def chat(session: Session, messages: list[dict], **options: Any) -> Reply:
    return asyncio.run(session.chat(messages, **{"params": sampling(), **options}))


def state(session: Session) -> tuple:
    tree = session.tree
    return len(tree.nodes), tree.num_tokens, [(n.continued, len(n.children)) for n in tree.nodes], set(tree._used), session.in_flight


def all_ids(node: Node) -> list[int]:
    return [int(i) for turn in node.branch() for part in (turn.prompt, turn.sampled) for i in part]


def refused(session: Session, status: int, messages: Any, match: str | None = None, **options: Any) -> None:
    before = state(session)
    with pytest.raises(SessionError, match=match) as error:
        chat(session, messages, **options)
    assert error.value.status == status and state(session) == before


def test_a_conversation_goes_on_from_its_own_tokens() -> None:
    session = open_session()
    messages, prompts = [user("a")], []
    for turn in range(5):
        reply = chat(session, messages)
        prompts.append(session.backend.turns[-1].request.tokens.tolist())
        messages += [reply.message, user(f"b{turn}")]
        assert reply.node.depth == turn + 1 and reply.usage["prompt_tokens"] == len(prompts[-1])
        assert session.budget_left == session.max_context - reply.usage["total_tokens"]
    for i in range(1, 5):
        before = prompts[i - 1] + session.backend.turns[i - 1].tokens
        assert prompts[i][: len(before)] == before
    assert {t.request.attempt for t in session.backend.turns} == {0} and len(session.tree.leaves) == 1


def test_retry_rewind_edit_and_other_tools_are_branches() -> None:
    session = open_session()
    first = chat(session, [user("a")])
    second = chat(session, [user("a"), first.message, user("b")])
    retry = chat(session, [user("a"), first.message, user("b")])
    rewind = chat(session, [user("a"), first.message, user("c")])
    edit = chat(session, [user("a"), {"role": "assistant", "content": "never said"}, user("b")])
    tools = chat(session, [user("a"), first.message, user("b")], tools=TOOLS)
    kwargs = chat(session, [user("a")], template_kwargs={"x": 1})
    assert [r.node.parent.number for r in (second, retry, rewind)] == [first.node.number] * 3
    assert [r.node.parent for r in (edit, tools, kwargs)] == [session.tree.root] * 3
    attempts = [r.node.attempt for r in (first, second, retry, rewind, edit, tools, kwargs)]
    assert attempts == [0, 0, 1, 2, 3, 4, 5]
    assert retry.node.asked == second.node.asked != rewind.node.asked


SPELLINGS = [
    {"content": [{"type": "text", "text": "sa"}, {"type": "text", "text": "id"}]},
    {"content": "said", "refusal": None, "audio": None, "tool_calls": None, "function_call": None},
    {"content": "said", "tool_calls": [], "reasoning_content": "", "name": None},
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_of_a_message_are_the_same_message(spelling: dict) -> None:
    session = open_session(lambda _: ([*ids_of("said"), END], "stop"))
    first = chat(session, [user("a")])
    for text in ("b", "c"):  # the second time it is known
        assert chat(session, [user("a"), {"role": "assistant", **spelling}, user(text)]).node.parent is first.node


@pytest.mark.parametrize("change", [{"content": "said "}, {"reasoning_content": "hm"}, {"role": "user"}, {"name": "bob"}])
def test_another_message_is_another_message(change: dict) -> None:
    session = open_session(lambda _: ([*ids_of("said"), END], "stop"))
    first = chat(session, [user("a")])
    assert chat(session, [user("a"), {**first.message, **change}, user("b")]).node.parent is session.tree.root


def called(arguments: str) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("matcher, same", [("strict", False), ("loose-tool-call", True), (lambda message: message["role"], True)])
def test_matchers(matcher: Any, same: bool) -> None:
    session = open_session(matcher=matcher)
    first = chat(session, [user("a"), called('{"x": 1, "y": [2]}'), user("b")])
    second = chat(session, [user("a"), called('{"y":[2],"x":1}'), user("b"), first.message, user("c")])
    assert (second.node.parent is first.node) == same
    with pytest.raises(ValueError, match="matcher 'lose' is unknown"):
        open_session(matcher="lose")


def test_a_client_that_edits_its_own_list_in_place_does_not_edit_the_session() -> None:
    session, messages = open_session(), [user("a")]
    first = chat(session, messages)
    messages += [first.message, user("b")]
    chat(session, messages)
    messages[1]["content"] = "forged"
    assert chat(session, messages).node.parent is session.tree.root
    assert session.tree.nodes[1].messages[-1]["content"] != "forged"


def test_a_turn_cut_by_length_cannot_be_extended_but_its_parent_can() -> None:
    session = open_session(lambda r: (ids_of("going on and on"), "length") if len(r.tokens) % 2 else ([*ids_of("ok"), END], "stop"))
    messages, text = [user("a")], "a"
    while (reply := chat(session, messages)).finish != "length":
        text += "a"
        messages = [user(text)]
    refused(session, 409, [*messages, reply.message, user("b")], "cut by length")
    session.backend.say = lambda _: ([*ids_of("going on and on"), END], "stop")
    again = chat(session, messages)  # says the same, but ends: this one is found from now on
    assert chat(session, [*messages, again.message, user("b")]).node.parent is again.node


BAD = [
    (400, "hello", "messages must be a list"),
    (400, [], "at least one"),
    (400, ["hello"], r"messages\[0\] must be an object"),
    (400, [{"role": "robot", "content": "x"}], "role 'robot' is not supported"),
    (400, [{"role": ["user"], "content": "x"}], "role"),
    (400, [{"role": "user", "content": 3}], "content must be a string"),
    (400, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "only text is supported"),
    (400, [{"role": "user", "content": "x", "token_ids": [1]}], "a session makes the tokens itself"),
    (400, [{"role": "user", "content": "\ud800"}], "no valid Unicode"),
    (400, [user("a"), {"role": "assistant", "content": "b"}], "nothing to answer"),
    (400, [user("a"), called("{}"), {"role": "tool", "content": "x", "tool_call_id": "2"}], "tool_call_id '2'"),
    (400, [user("a"), {"role": "assistant", "tool_calls": [{"id": "1"}]}, user("b")], "the object `function`"),
    (413, [user("x" * 5000)], "characters"),
]


@pytest.mark.parametrize("status, messages, match", BAD)
def test_bad_messages_leave_the_session_as_it_was(status: int, messages: Any, match: str) -> None:
    session = open_session(limits=Limits(characters=4000))
    refused(session, status, messages, match)
    first = chat(session, [user("a")])
    if isinstance(messages, list):
        refused(session, status, [user("a"), first.message, *messages])


def test_other_bad_input_leaves_the_session_as_it_was() -> None:
    session = open_session(max_context=60)
    refused(session, 400, [user("a")], "tool_choice", tool_choice="maybe")
    refused(session, 400, [user("a")], "tools must be a list", tools={"a": 1})
    refused(session, 400, [user("a")], r"tools\[0\] must be", tools=[{"function": {}}])
    refused(session, 400, [user("a")], "must be JSON", template_kwargs={"x": {1, 2}})
    refused(session, 400, [user("word " * 100)], "the context is 60")
    assert session.overflowed is session.tree.root
    session.finish(1.0)
    refused(session, 409, [user("a")], "finished")


def test_what_an_answer_may_have_is_cut_to_what_fits() -> None:
    session = open_session(max_context=60)
    chat(session, [user("a")], params=sampling(1000))
    request = session.backend.turns[0].request
    assert request.params.max_new_tokens == 60 - len(request.tokens)


def test_limits_count_turns_in_flight() -> None:
    session = open_session(limits=Limits(nodes=3))

    async def four() -> list:
        return await asyncio.gather(*(session.chat([user("a")], params=sampling()) for _ in range(4)), return_exceptions=True)

    outcomes = asyncio.run(four())
    assert [isinstance(x, Reply) for x in outcomes] == [True] * 3 + [False] and outcomes[3].status == 413
    assert sorted(node.attempt for node in session.tree.nodes[1:]) == [0, 1, 2]
    refused(open_session(limits=Limits(tokens=10)), 413, [user("a")], "more than its 10 tokens")


def test_requests_that_overlap_become_branches() -> None:
    session = open_session()
    first = chat(session, [user("a")])

    async def two() -> list[Reply]:
        later = [user("a"), first.message, user("b")]
        return await asyncio.gather(*(session.chat(later, params=sampling()) for _ in range(2)))

    one, other = asyncio.run(two())
    assert one.node.parent is other.node.parent is first.node and {one.node.attempt, other.node.attempt} == {0, 1}
    for reply in (one, other):
        assert chat(session, [user("a"), first.message, user("b"), reply.message, user("c")]).node.parent is reply.node


@pytest.mark.parametrize("how", ["task", "finish"])
def test_a_cancelled_turn_is_cancelled_in_the_engine_and_leaves_no_trace(how: str) -> None:
    session = open_session()
    first = chat(session, [user("a")])
    before, later = state(session), [user("a"), first.message, user("b")]

    async def cancel() -> BaseException:
        session.backend.gate = asyncio.Event()
        task = asyncio.create_task(session.chat(later, params=sampling()))
        await asyncio.sleep(0.01)
        assert session.in_flight == 1
        if how == "task":
            task.cancel()
        else:
            session.finish(0.5)
            session.backend.gate.set()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        return outcome

    outcome = asyncio.run(cancel())
    assert isinstance(outcome, asyncio.CancelledError if how == "task" else SessionError)
    assert session.backend.turns[-1].cancelled and state(session) == before
    if how == "task":  # asked again, it is the same sample
        session.backend.gate = None
        chat(session, later)
        assert session.backend.turns[-1].request.attempt == session.backend.turns[-2].request.attempt


def test_a_listener_that_fails_takes_its_turn_with_it() -> None:
    session = open_session()
    before = state(session)

    def fail(_: Any) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        chat(session, [user("a")], on_piece=fail)
    assert session.backend.turns[-1].cancelled and state(session) == before


def test_pieces_and_opening_are_passed_on() -> None:
    seen: list = []

    async def see(thing: Any) -> None:
        seen.append(thing)

    session = open_session()
    reply = chat(session, [user("a")], on_piece=see, on_opening=seen.append)
    assert [t for piece in seen[1:] for t in piece.tokens] == reply.node.sampled.tolist() and seen[1:] == reply.pieces
    assert (seen[0].text, seen[0].family, seen[0].calls, seen[0].thinking) == ("", "chatml", False, False)
    forced = chat(session, [user("a")], tools=TOOLS, tool_choice="required", on_opening=seen.append)
    assert seen[-1].calls and seen[-1].text == "<tool_call>\n" and seen[-1].prefix != seen[0].prefix
    assert all_ids(forced.node.branch()[0])[: len(forced.node.prompt)][-2:] == ids_of("<tool_call>\n")


def test_content_ends_before_the_stop_string_and_the_tokens_do_not() -> None:
    session = open_session(lambda _: (ids_of("12 STOP"), "stop"))
    first = chat(session, [user("a")], params=sampling(stop_strings=("STOP",)))
    assert first.message["content"] == "12 " and first.node.sampled.tolist() == ids_of("12 STOP")
    chat(session, [user("a"), first.message, user("b")])
    at = len(first.node.prompt) + len(first.node.sampled)
    assert session.backend.turns[-1].request.tokens[at] == END


def test_what_asyncio_prints_of_a_result_does_not_grow_with_the_session() -> None:
    session, messages, sizes = open_session(), [user("a")], []
    for _ in range(20):
        reply = chat(session, messages)
        sizes.append(len(repr(reply)))
        messages += [reply.message, user("b")]
    assert sizes[-1] < sizes[0] + 20


def test_rewards_and_verdicts_are_checked() -> None:
    for reward, verdict in ((None, "ok"), (float("nan"), "ok"), ("1", "ok"), (True, "ok"), (1.0, "fine")):
        session = open_session()
        with pytest.raises(SessionError) as error:
            session.finish(reward, verdict)
        assert error.value.status == 400 and not session.finished
    session.finish(None, "timeout")
    assert session.finished and (session.reward, session.verdict) == (None, "timeout")


class Cost:
    """Operations of one turn, without the model: calls of Python and C functions, characters tokenised, characters digested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.encoded = 0
        encode = RENDERER.encoder.encode
        monkeypatch.setattr(RENDERER.encoder, "encode", lambda text, mark: self._count(text) or encode(text, mark))

    def _count(self, text: str) -> None:
        self.encoded += len(text)

    def of(self, session: Session, messages: list[dict]) -> tuple[Reply, int, int]:
        self.calls = self.encoded = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            self.calls += event in ("call", "c_call")

        prepared = None
        sys.setprofile(count)
        try:
            prepared = session.tree.prepare(messages)
        finally:
            sys.setprofile(None)
        half, encoded = self.calls, self.encoded
        reply = chat(session, messages)
        assert session.backend.turns[-1].request.tokens.tolist() == prepared.tokens.tolist()
        return reply, half, encoded


@pytest.mark.parametrize("over_http", [False, True])
def test_turn_100_costs_what_turn_5_costs(over_http: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    session, messages, cost, calls, encoded = open_session(), [user("question 000")], Cost(monkeypatch), [], []
    session.backend.say = lambda _: ([*ids_of("the same answer"), END], "stop")
    for turn in range(1, 101):
        sent = json.loads(json.dumps(messages)) if over_http else messages
        if over_http:  # as clients echo it
            sent = [{**m, "refusal": None} if m["role"] == "assistant" else m for m in sent]
        reply, called, characters = cost.of(session, sent)
        calls.append(called)
        encoded.append(characters)
        messages += [reply.message, user(f"question {turn:03}")]
    assert calls[99] <= 1.5 * calls[4], (calls[4], calls[99])
    assert encoded[99] <= 1.5 * encoded[4]
    kept = sum(node.prompt.nbytes + node.sampled.nbytes for node in session.tree.nodes)
    assert kept == 4 * session.tree.num_tokens == 4 * session.tree.nodes[-1].num_tokens
    assert len(session.tree._paths) == 1 and session.tree._paths[0]._ids.nbytes <= 3 * kept


def test_paths_that_were_let_go_are_found_again() -> None:
    """More branches in use than are kept whole: every request still attaches where it belongs, with the right ids."""
    session = open_session()
    talks = [[user(f"start {i}")] for i in range(3 * MAX_PATHS)]
    nodes = {}
    for turn in range(4):
        for i, talk in enumerate(talks):
            reply = chat(session, talk)
            assert turn == 0 or reply.node.parent is nodes[i]
            assert session.backend.turns[-1].request.tokens.tolist() == all_ids(reply.node)[: -len(reply.node.sampled)]
            nodes[i] = reply.node
            talk += [reply.message, user(f"{turn}")]
    assert len(session.tree._paths) == MAX_PATHS


@pytest.mark.parametrize("seed", range(6))
def test_random_clients(seed: int) -> None:
    """Retries, rewinds, edits, respellings, several heads: every request attaches to the deepest node that a search of all nodes finds."""
    rng, session = random.Random(seed), open_session()
    session.backend.say = lambda r: (
        [*ids_of(rng.choice(["yes", "no", f"{len(r.tokens)}"])), END],
        "stop" if rng.random() < 0.9 else "length",
    )
    histories: list[list[dict]] = [[]]
    for _ in range(120):
        history = copy.deepcopy(rng.choice(histories[-6:]))
        history = history[: rng.randrange(len(history) + 1)] if rng.random() < 0.3 else history
        if history and rng.random() < 0.15:
            history[rng.randrange(len(history))]["content"] = "edited"
        if history and rng.random() < 0.3:
            history[rng.randrange(len(history))]["refusal"] = None
        history.append(user(rng.choice("abc")))
        tools = rng.choice([None, None, None, TOOLS])
        plain = [{"role": m["role"], "content": m["content"]} for m in history]
        fits = [n for n in session.tree.nodes[1:] if n.head.tools == tools and _said(n) == plain[: n.num_messages]]
        deepest = max((n.num_messages for n in fits), default=0)
        try:
            reply = chat(session, history, tools=tools)
        except SessionError as error:
            assert error.status == 409 and all(not n.extendable for n in fits if n.num_messages == deepest)
            continue
        assert reply.node.parent.num_messages == deepest
        assert deepest == 0 or reply.node.parent in fits
        assert session.backend.turns[-1].request.tokens.tolist() == all_ids(reply.node)[: -len(reply.node.sampled)]
        histories.append([*history, reply.message])
    tree = session.tree
    assert tree.num_tokens == sum(len(n.prompt) + len(n.sampled) for n in tree.nodes) and not np.any([n.continued for n in tree.leaves])
    for node in tree.leaves:  # turns with one attempt lie on one branch
        branch = node.branch()
        assert all(b in branch or b.attempt != node.attempt for b in tree.nodes[1:] if b.depth >= node.depth and b is not node)


def _said(node: Node) -> list[dict]:
    return [{"role": m["role"], "content": m["content"]} for turn in node.branch() for m in turn.messages]
