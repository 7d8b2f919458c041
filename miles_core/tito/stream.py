"""A turn as a client sees it while it is made: token by token, in the chunks of the OpenAI chat API.

What is streamed is a beginning of what the session will keep: text is sent when no later token can change it. The rest (calls, and text
that was held back) comes from the committed message, so that a client never sees a call that the session does not have.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.tito.parsers import StreamParser

if TYPE_CHECKING:
    from miles_core.tito.backend import Piece
    from miles_core.tito.session import Reply

_LEAST_LOGPROB = -9999.0  # how the API writes minus infinity, which JSON has not
_TEXTS = ("content", "reasoning_content")


class TurnText:
    """The text of a turn whose tokens arrive one by one. `opening`: text that its prompt begins for it. `stops`: it ends before one."""

    def __init__(self, decode: Callable[[np.ndarray], str], parser: StreamParser, stops: Sequence[str], opening: str = "") -> None:
        self._decode, self._parser, self._stops = decode, parser, stops
        self._tokens: list[int] = []  # since the last that ended a character, and before them those decoded last
        self._known = ""  # text of the first of them
        self._num_known = 0
        self._held = ""  # may be the beginning of a stop string
        self._stopped = False
        self._sent = dict.fromkeys(_TEXTS, "")
        self._openings = [opening] if opening else []

    def push(self, tokens: Sequence[int]) -> dict[str, str]:
        """What the answer is certain to go on with: text by field of the message."""
        said: dict[str, str] = {}
        for text in (*self._openings, self._unstopped(self._text_of(tokens))):
            for delta in self._parser.push(text):
                if delta.kind != "call":
                    for field, part in delta.fields().items():
                        said[field] = said.get(field, "") + part
                        self._sent[field] += part
        self._openings = []
        return said

    def rest(self, message: dict[str, Any]) -> dict[str, Any]:
        """What is left to send of the message that the session kept."""
        left: dict[str, Any] = {}
        for field, sent in self._sent.items():
            kept = message.get(field) or ""
            assert kept.startswith(sent), f"streamed {field} {sent!r}, kept {kept!r}"
            if len(kept) > len(sent):
                left[field] = kept[len(sent) :]
        if message.get("tool_calls"):
            left["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        return left

    def _text_of(self, tokens: Sequence[int]) -> str:
        """New text. A character may take several tokens: until it is whole, decoding ends in U+FFFD."""
        self._tokens += tokens
        text = self._decode(np.array(self._tokens, np.int64))
        if text.endswith("\ufffd"):
            return ""
        new = text[len(self._known) :]
        self._tokens = self._tokens[self._num_known :]
        self._num_known, self._known = len(self._tokens), self._decode(np.array(self._tokens, np.int64))
        return new

    def _unstopped(self, text: str) -> str:
        """Text that is not part of a stop string, and cannot become one."""
        if self._stopped:
            return ""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._stopped = True
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def logprobs(piece: Piece, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """`choices[].logprobs` of the tokens of a piece."""

    def entry(token: int, logp: float) -> dict[str, Any]:
        text = decode([token])
        whole = "\ufffd" not in text  # else the token is a part of a character
        return {"token": text, "logprob": max(logp, _LEAST_LOGPROB), "bytes": list(text.encode()) if whole else None}

    tops = piece.top or [[]] * len(piece.tokens)
    return {
        "content": [
            {**entry(token, logp), "top_logprobs": [entry(*other) for other in top]}
            for token, logp, top in zip(piece.tokens, piece.logp, tops, strict=True)
        ],
        "refusal": None,
    }


def usage(reply: Reply) -> dict[str, Any]:
    """`usage` of the API: what the session counted, with the cached tokens where the API has them."""
    counts = {name: n for name, n in reply.usage.items() if name != "cached_tokens"}
    return counts | {"prompt_tokens_details": {"cached_tokens": reply.usage["cached_tokens"]}}


class Answer:
    """The frame around an answer: its id, time and model. `more`: fields of ours (how much is left of the session)."""

    def __init__(self, answer_id: str, model: str) -> None:
        self._frame = {"id": answer_id, "created": int(time.time()), "model": model}

    def whole(self, reply: Reply, logprobs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        """A chat.completion."""
        choice = {"index": 0, "message": {"refusal": None, **reply.message}, "logprobs": logprobs, "finish_reason": reply.finish}
        frame = {**self._frame, "object": "chat.completion"}
        return {**frame, "choices": [choice], "usage": usage(reply), **more}

    def chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
        """A chat.completion.chunk as a server-sent event."""
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._frame, "object": "chat.completion.chunk", "choices": [choice], **more})

    def usage_chunk(self, reply: Reply) -> bytes:
        """The last chunk, when stream_options asks for it."""
        return event({**self._frame, "object": "chat.completion.chunk", "choices": [], "usage": usage(reply)})


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
