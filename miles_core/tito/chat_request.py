"""The body of a chat completion: what is let in, and what it asks of a session.

Fields of the OpenAI chat API that change the answer and that we have are checked; all others are ignored and named to the client. Messages
and tools are checked where they are used (messages.py).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from miles_core.engine.sequence import SamplingParams
from miles_core.tito.errors import SessionError

MAX_STOPS, MAX_TOP_LOGPROBS, MAX_SEED = 16, 20, 2**63 - 1
_TOKENS = ("tokens", "token_ids", "prompt_token_ids", "input_ids", "prompt")
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class ChatRequest:
    """`ignored`: names of fields that had no effect. The others: see Session.chat and the OpenAI chat API."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: str
    params: SamplingParams
    template_kwargs: dict[str, Any] | None
    seed: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    ignored: list[str]


def _is(kind: type | tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)


def _within(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: _is(int)(value) and low <= value <= high


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and len(value) <= MAX_STOPS and all(isinstance(stop, str) for stop in value))


_COUNT = (_within(1, 2**31 - 1), "a whole number >= 1")
# name -> (check, what it says it must be). Ranges that SamplingParams checks are not repeated here.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is(str), "a string"),
    "messages": (lambda value: isinstance(value, list) and len(value) > 0, "a list of messages, not empty"),
    "tools": (_is(list), "a list"),
    "tool_choice": (_is(str), 'one of "auto", "none", "required"; a named function is not supported'),
    "stop": (_is_stop, f"a string, or a list of at most {MAX_STOPS} strings"),
    "seed": (_within(0, MAX_SEED), f"a whole number from 0 to {MAX_SEED}"),
    "temperature": (_is((int, float)), "a number"),
    "top_p": (_is((int, float)), "a number"),
    "top_k": (_within(0, 2**31 - 1), "a whole number >= 0"),
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "logprobs": (_is(bool), "a boolean"),
    "top_logprobs": (_within(0, MAX_TOP_LOGPROBS), f"a whole number from 0 to {MAX_TOP_LOGPROBS}"),
    "n": (lambda value: _is(int)(value) and value == 1, "1: for more answers, send the request again"),
    "stream": (_is(bool), "a boolean"),
    "stream_options": (lambda value: isinstance(value, dict) and isinstance(value.get("include_usage", False), bool), "an object"),
    "chat_template_kwargs": (_is(dict), "an object"),
}
_SAMPLING = ("temperature", "top_p", "top_k", "seed")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; {} if it is empty. SessionError 400 for anything else, also for strings that are no Unicode."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant) if body.strip() else {}
        if _HALF_OF_A_PAIR.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # decoding errors are ValueErrors
        raise SessionError(400, f"the body is no JSON in UTF-8: {error}", "invalid_json") from error
    if not isinstance(value, dict):
        raise SessionError(400, f"the body must be a JSON object, got {type(value).__name__}", "invalid_json")
    return value


def read_chat(body: bytes, defaults: SamplingParams, *, pinned: bool) -> ChatRequest:
    """The request in `body`. What it does not say is as in `defaults`; `pinned` keeps the distribution of `defaults` whatever it says (a
    trainer scores samples under one temperature), and its longest answer. SessionError 400 names the field.
    """
    given = {name: value for name, value in read_json(body).items() if value is not None}
    if tokens := [name for name in _TOKENS if name in given]:
        raise SessionError(400, f"{tokens[0]}: a session makes the tokens itself; send messages")
    for name, (good, text) in _FIELDS.items():
        if name in given and not good(given[name]):
            raise SessionError(400, f"{name} must be {text}")
    if "messages" not in given:
        raise SessionError(400, "messages must be a list of messages, not empty")
    logprobs = given.get("logprobs", False)
    if given.get("top_logprobs") and not logprobs:
        raise SessionError(400, "top_logprobs needs logprobs: true")
    used = [name for name in _FIELDS if not (pinned and name in _SAMPLING)]
    return ChatRequest(
        messages=given["messages"],
        tools=given.get("tools") or None,
        tool_choice=given.get("tool_choice", "auto"),
        params=_params({name: given[name] for name in used if name in given}, defaults, pinned),
        template_kwargs=given.get("chat_template_kwargs"),
        seed=None if pinned else given.get("seed"),
        stream=given.get("stream", False),
        include_usage=given.get("stream_options", {}).get("include_usage", False),
        logprobs=logprobs,
        top_logprobs=given.get("top_logprobs", 0),
        ignored=[name for name in given if name not in used],
    )


def _params(given: dict[str, Any], defaults: SamplingParams, pinned: bool) -> SamplingParams:
    changes = {name: given[name] for name in ("temperature", "top_p", "top_k") if name in given}
    if limits := [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]:
        changes["max_new_tokens"] = min(limits + [defaults.max_new_tokens] * pinned)
    if "stop" in given:
        stop = given["stop"]
        changes["stop_strings"] = (*defaults.stop_strings, *((stop,) if isinstance(stop, str) else stop))
    try:
        return dataclasses.replace(defaults, **changes)
    except ValueError as error:
        raise SessionError(400, str(error)) from error
