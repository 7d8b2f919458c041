"""For tests of sessions: one with the fake model, and what tests do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tito_models import FakeBackend, sampling, tokenizer_of

from miles_core.tito.errors import SessionError
from miles_core.tito.render import Renderer
from miles_core.tito.session import Reply, Session
from miles_core.tito.tree import Node

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
