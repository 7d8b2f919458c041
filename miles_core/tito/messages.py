"""Chat messages: what is let in, and when two of them are the same message.

`normalise` turns a client's message into plain dictionaries that templates can render, or refuses it. A matcher turns a message into a key:
two messages are the same if their keys are equal. Keys are chained (`chain`), so that one digest stands for a whole history.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import xxhash

from miles_core.tito.errors import SessionError

Message = dict[str, Any]
Matcher = Callable[[Message], Any]
ROLES = ("system", "user", "assistant", "tool")
_TOKEN_FIELDS = ("tokens", "token_ids", "prompt_token_ids")


def normalise(message: Any, where: str) -> Message:
    """A copy with role, content (a string), and where there are any reasoning_content, tool_calls, tool_call_id, name; no other fields.

    Content given as a list of text parts becomes one string; role "developer" becomes "system"; `reasoning` becomes `reasoning_content`.
    Raises SessionError 400 about `where` for everything else.
    """
    if not isinstance(message, dict):
        raise SessionError(400, f"{where} must be an object, got {type(message).__name__}")
    role = "system" if message.get("role") == "developer" else message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise SessionError(400, f"{where}.role {role!r} is not supported: use one of {', '.join(ROLES)}")
    if given := [name for name in _TOKEN_FIELDS if name in message]:
        raise SessionError(400, f"{where}.{given[0]}: a session makes the tokens itself; send text")
    plain: Message = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    for name, source in (
        ("reasoning_content", message.get("reasoning_content") or message.get("reasoning")),
        ("name", message.get("name")),
    ):
        if source and (role == "assistant" or name == "name"):
            plain[name] = _string(source, f"{where}.{name}")
    if role == "assistant" and message.get("tool_calls"):
        plain["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    if role == "tool" and message.get("tool_call_id"):
        plain["tool_call_id"] = _string(message["tool_call_id"], f"{where}.tool_call_id")
    return plain


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise SessionError(400, f"{where} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SessionError(400, f"{where} is no valid Unicode: {error.reason}") from error
    return value


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        return _string(content, where)
    pieces = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise SessionError(400, f"{where}[{i}] is of type {kind!r}: only text is supported")
        pieces.append(_string(part.get("text"), f"{where}[{i}].text"))
    return "".join(pieces)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise SessionError(400, f"{where} must be a list, got {type(calls).__name__}")
    plain = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise SessionError(400, f"{where}[{i}] must be an object with the object `function`")
        arguments = function.get("arguments", "")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        made = {"name": _string(function.get("name"), f"{where}[{i}].function.name")}
        made["arguments"] = _string(arguments, f"{where}[{i}].function.arguments")
        plain.append({"id": _string(call.get("id") or "", f"{where}[{i}].id"), "type": "function", "function": made})
    return plain


def characters(value: Any) -> int:
    """Of all strings in a JSON value, names of fields included."""
    if isinstance(value, str):
        return len(value)
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(characters, items))


def check_tool_results(messages: list[Message], last: Message | None) -> None:
    """Tool messages that name a call must name one of the assistant message before them; `last` is the one before `messages`.

    Raises SessionError 400.
    """
    known: set[str] = set()
    for message in (*([last] if last else ()), *messages):
        if message["role"] == "assistant":
            known = {call["id"] for call in message.get("tool_calls", ())}
        elif message["role"] == "tool" and message.get("tool_call_id", "") not in ("", *known):
            raise SessionError(400, f"tool_call_id {message['tool_call_id']!r} is not the id of a call of the assistant's last message")


def check_tools(tools: Any) -> None:
    """Tools are a list of {"type": "function", "function": {"name": ...}}. Raises SessionError 400."""
    if tools is None:
        return
    if not isinstance(tools, list):
        raise SessionError(400, f"tools must be a list, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise SessionError(400, f'tools[{i}] must be of the form {{"type": "function", "function": {{"name": ...}}}}')


# ---- matchers


def strict(message: Message) -> Any:
    """All of a normalised message: role, content, reasoning, tool calls with their ids. None, "" and [] are equal."""
    return message


def loose_tool_call(message: Message) -> Any:
    """Like strict, but arguments of calls are compared as JSON values."""
    if "tool_calls" not in message:
        return message
    calls = [{**c, "function": {**c["function"], "arguments": _value(c["function"]["arguments"])}} for c in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _value(arguments: str) -> Any:
    try:
        return {"json": json.loads(arguments)}
    except ValueError:
        return arguments


MATCHERS: dict[str, Matcher] = {"strict": strict, "loose-tool-call": loose_tool_call}


def matcher_of(matcher: str | Matcher) -> Matcher:
    """The matcher of this name, or the function itself: from a normalised message to a JSON-able key. ValueError for an unknown name."""
    if callable(matcher):
        return matcher
    if matcher not in MATCHERS:
        raise ValueError(f"matcher {matcher!r} is unknown: use one of {', '.join(MATCHERS)}, or a function")
    return MATCHERS[matcher]


def chain(before: bytes, key: Any) -> bytes:
    """Digest (16 bytes) of a history whose digest was `before` and that goes on with a message of this key."""
    return xxhash.xxh3_128(before + json.dumps(key, sort_keys=True).encode()).digest()
