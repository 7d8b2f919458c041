"""A session above its tree: turns of the engine, cancelled or not, openings, stop strings, ends.

python -m pytest tests/core/test_tito_session.py
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tito_models import sampling
from tito_sessions import END, all_ids, chat, ids_of, open_session, refused, state, user

from miles_core.tito.corpus import TOOLS
from miles_core.tito.errors import SessionError


def test_what_an_answer_may_have_is_cut_to_what_fits() -> None:
    session = open_session(max_context=60)
    chat(session, [user("a")], params=sampling(1000))
    request = session.backend.turns[0].request
    assert request.params.max_new_tokens == 60 - len(request.tokens)


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


def test_other_bad_input_leaves_the_session_as_it_was() -> None:
    session = open_session(max_context=60)
    refused(session, 400, [user("a")], "tool_choice", tool_choice="maybe")
    refused(session, 400, [user("a")], "tools must be a list", tools={"a": 1})
    refused(session, 400, [user("a")], r"tools\[0\] must be", tools=[{"function": {}}])
    refused(session, 400, [user("a")], "must be JSON", template_kwargs={"x": {1, 2}})
    refused(session, 400, [user("word " * 80)], "the context is 60")
    assert session.overflowed is session.tree.root
    session.finish(1.0)
    refused(session, 409, [user("a")], "finished")
