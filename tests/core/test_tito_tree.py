"""The tree of a session, and the session on top of it: where requests attach, what is refused, and what a turn costs.

python -m pytest tests/core/test_tito_tree.py
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import sys
from typing import Any

import numpy as np
import pytest
from tito_models import sampling
from tito_sessions import END, RENDERER, all_ids, chat, ids_of, open_session, refused, user

from miles_core.tito.backend import TurnResult
from miles_core.tito.corpus import TOOLS
from miles_core.tito.errors import SessionError
from miles_core.tito.messages import characters
from miles_core.tito.session import Reply
from miles_core.tito.tree import CHARACTERS_A_TOKEN, MAX_PATHS, Limits, Node, SessionTree


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


@pytest.mark.parametrize("edited", [0, 1])
def test_a_client_that_edits_its_own_list_in_place_does_not_edit_the_session(edited: int) -> None:
    session, messages = open_session(), [user("a")]
    first = chat(session, messages)
    messages += [{**first.message, "refusal": None}, user("b")]  # a new spelling, which the session remembers
    chat(session, messages)
    messages[edited]["content"] = "forged"
    assert chat(session, messages).node.parent is session.tree.root
    assert session.tree.nodes[1].messages[edited]["content"] != "forged"


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
    (400, [user("x" * 2401)], "characters, and there is room for"),
    (400, [user("x" * 400)], "tokens and the context is 300"),
]


@pytest.mark.parametrize("status, messages, match", BAD)
def test_bad_messages_leave_the_session_as_it_was(status: int, messages: Any, match: str) -> None:
    session = open_session(max_context=300)
    refused(session, status, messages, match)
    first = chat(session, [user("a")])
    if isinstance(messages, list):
        refused(session, status, [user("a"), first.message, *messages])


def test_messages_that_cannot_fit_are_refused_before_they_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many characters as the room has tokens, times a factor; wherever in the messages they stand, tools included."""
    session = open_session(max_context=300)
    first, limit = chat(session, [user("a")]), CHARACTERS_A_TOKEN * 300
    room = 300 - first.node.num_tokens
    tool = {"type": "function", "function": {"name": "f", "description": "x" * limit}}
    thought = {"role": "assistant", "content": "", "reasoning_content": "x" * limit}
    encode, encoded = RENDERER.encoder.encode, []
    monkeypatch.setattr(RENDERER.encoder, "encode", lambda text, mark: encoded.append(len(text)) or encode(text, mark))
    refused(session, 400, [user("a" * limit)], "room for 300 tokens")
    refused(session, 400, [user("b")], "room for 300 tokens", tools=[tool])
    refused(session, 400, [user("a"), first.message, user("b"), thought, user("c")], f"room for {room} tokens")
    assert session.overflowed is first.node and encoded == []
    longest = CHARACTERS_A_TOKEN * room - characters([user("")])
    refused(session, 400, [user("a"), first.message, user(" " * longest)], "the context is 300")
    assert len(encoded) == 1


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


class Cost:
    """Operations of one turn: calls of Python and of C functions, and characters tokenised. What C does inside a call is not seen: the one
    comparison of what the client sent with what is known, and the one copy of the ids."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.encoded = 0
        encode = RENDERER.encoder.encode
        monkeypatch.setattr(RENDERER.encoder, "encode", lambda text, mark: self._tokenise(text) or encode(text, mark))

    def _tokenise(self, text: str) -> None:
        self.encoded += len(text)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")

    def of(self, tree: SessionTree, messages: list[dict], result: TurnResult, said: dict) -> tuple[int, int]:
        self.calls = self.encoded = 0
        sys.setprofile(self._count)
        try:
            prepared = tree.prepare(messages)
            with tree.attempt(prepared.node) as attempt:
                tree.commit(prepared, result, said, attempt)
        finally:
            sys.setprofile(None)
        return self.calls, self.encoded


@pytest.mark.parametrize("over_http", [False, True])
def test_turn_100_costs_what_turn_5_costs(over_http: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, messages, cost, costs = SessionTree(RENDERER, Limits(), 1 << 20), [user("question 000")], Cost(monkeypatch), []
    ids = np.array([*ids_of("the same answer"), END], np.int32)
    result = TurnResult(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop", 0)
    said = {"role": "assistant", "content": "the same answer"}
    for turn in range(1, 101):
        sent = messages
        if over_http:  # other objects every time, and answers as clients echo them
            sent = [{**m, "refusal": None} if m["role"] == "assistant" else m for m in json.loads(json.dumps(messages))]
        costs.append(cost.of(tree, sent, result, said))
        messages += [said, user(f"question {turn:03}")]
    (calls, encoded), (calls_100, encoded_100) = costs[4], costs[99]
    assert calls > 50 and calls_100 <= 1.5 * calls, (calls, calls_100)
    assert encoded > 0 and encoded_100 <= 1.5 * encoded
    kept = sum(node.prompt.nbytes + node.sampled.nbytes for node in tree.nodes)
    assert kept == 4 * tree.num_tokens == 4 * tree.nodes[-1].num_tokens and len(tree.nodes) == 101
    assert len(tree._paths) == 1 and tree._paths[0]._ids.nbytes <= 3 * kept


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
