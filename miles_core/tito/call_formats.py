"""How model families write tool calls: one row of FORMATS each.

A parser gets the raw text from the first tag to the last and returns the calls in it, [] if it is not exactly of the form, or None if the
last tag stands inside a string of an unfinished JSON text. Nothing is repaired: doubled keys, unknown keys, NaN and trailing commas make no
call. Sources of the forms: the chat templates and model cards of Qwen2.5, Qwen3, Qwen3-Coder, Llama 3.1 to 3.3, DeepSeek-V3 and V3.1,
GLM-4.5 to 4.7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

Tools = list[dict[str, Any]] | None  # of a request, in OpenAI form


@dataclass(frozen=True)
class Call:
    """`arguments`: the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Format:
    """`begin`, `end`: the tags; without an end a call lasts to the end of the turn. `bare`: content that begins so is tried, too."""

    begin: str
    end: str
    parse: Callable[[str, Tools], list[Call] | None]
    bare: str = ""


_NAME = re.compile(r"[\w.:/-]+")  # what the OpenAI API allows, and the dots, colons and slashes of MCP servers
_SPACE = re.compile(r"[ \t\n\r]*")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _no_double_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(keys := dict(pairs)) < len(pairs):
        raise ValueError("a key comes twice")
    return keys


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_no_double_keys)


def _skip(text: str, at: int, wanted: str) -> int:
    """Position behind white space and one of the characters `wanted`."""
    at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches anything
    if text[at : at + 1] not in tuple(wanted):
        raise ValueError(f"expected one of {wanted!r} at {at}")
    return at + 1


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The JSON object at `at`: key -> (value, its spelling), and the position behind it. ValueError, RecursionError if there is none."""
    members: dict[str, tuple[Any, str]] = {}
    behind = _skip(text, at, "{")
    closing = text[behind - 1]
    while closing != "}":
        start = _SPACE.match(text, behind).end()  # type: ignore[union-attr]
        key, behind = _DECODER.raw_decode(text, start)
        if not isinstance(key, str) or key in members:
            raise ValueError(f"no new key at {start}")
        start = _SPACE.match(text, _skip(text, behind, ":")).end()  # type: ignore[union-attr]
        value, behind = _DECODER.raw_decode(text, start)
        members[key] = value, text[start:behind]
        behind = _skip(text, behind, ",}")
        closing = text[behind - 1]
    return members, behind


def _json_call(text: str, at: int, arguments_keys: tuple[str, ...]) -> tuple[Call, int] | None:
    """The call {"name": ..., "arguments": {...}} at `at`, and the position behind it; None if it is another object."""
    members, behind = _members(text, at)
    if members.pop("type", ("function", ""))[0] != "function":
        return None
    name, _ = members.pop("name", (None, ""))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(members) != 1:
        return None
    ((key, (value, spelling)),) = members.items()
    return (Call(name, spelling), behind) if key in arguments_keys and isinstance(value, dict) else None


def _hermes(raw: str, tools: Tools) -> list[Call] | None:
    """<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>"""
    body = raw.removeprefix("<tool_call>").removesuffix("</tool_call>")
    try:
        found = _json_call(body, 0, ("arguments",))
    except json.JSONDecodeError as error:
        return None if error.msg.startswith("Unterminated string") else []
    except (ValueError, RecursionError):
        return []
    return [found[0]] if found and not body[found[1] :].strip() else []


def _llama(raw: str, tools: Tools) -> list[Call] | None:
    """{"name": "f", "parameters": {"a": 1}}, several with semicolons in between; with or without <|python_tag|> before them."""
    body = raw.removeprefix("<|python_tag|>").rstrip()
    calls, at = [], 0
    try:
        while True:
            found = _json_call(body, at, ("parameters", "arguments"))
            if found is None:
                return []
            calls.append(found[0])
            if found[1] == len(body):
                return calls
            at = _skip(body, found[1], ";")
    except (ValueError, RecursionError):
        return []


_V3_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^\n<]+)\n```json\n((?:(?!<｜tool▁).)*)\n```<｜tool▁call▁end｜>", re.S
)
_V31_CALL = re.compile(r"\s*<｜tool▁call▁begin｜>([^\n<]+)<｜tool▁sep｜>((?:(?!<｜tool▁).)*)<｜tool▁call▁end｜>", re.S)


def _deepseek(raw: str, tools: Tools) -> list[Call] | None:
    """One block of calls, each a function's name and its arguments as JSON: in a fence (V3, R1) or bare (V3.1)."""
    body = raw.removeprefix("<｜tool▁calls▁begin｜>").removesuffix("<｜tool▁calls▁end｜>").rstrip()
    calls, at = [], 0
    while at < len(body):
        found = _V3_CALL.match(body, at) or _V31_CALL.match(body, at)
        if not found or not _NAME.fullmatch(found[1]) or not _is_object(found[2]):
            return []
        calls.append(Call(found[1], found[2].strip()))
        at = found.end()
    return calls


def _is_object(text: str) -> bool:
    try:
        value, behind = _DECODER.raw_decode(text, _SPACE.match(text).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not text[behind:].strip()


_CODER_CALL = re.compile(r"<tool_call>\s*<function=([^>\s]+)>\s*(.*)</function>\s*</tool_call>", re.S)
_CODER_VALUE = re.compile(r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=|</parameter>).)*?)\n?</parameter>\s*", re.S)
_GLM_CALL = re.compile(r"<tool_call>\s*([^<\s]+)\s*(.*)</tool_call>", re.S)
_GLM_VALUE = re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>((?:(?!<arg_).)*?)</arg_value>\s*", re.S)


def _xml(call: re.Pattern[str], value: re.Pattern[str]) -> Callable[[str, Tools], list[Call] | None]:
    """The parser of a name followed by pairs of key and value."""

    def parse(raw: str, tools: Tools) -> list[Call] | None:
        found = call.fullmatch(raw)
        if not found or not _NAME.fullmatch(found[1]):
            return []
        name, body, at = found[1], found[2], 0
        arguments: dict[str, Any] = {}
        while at < len(body):
            pair = value.match(body, at)
            if not pair or pair[1] in arguments:
                return []
            arguments[pair[1]] = _typed(pair[2], _types(tools, name, pair[1]))
            at = pair.end()
        return [Call(name, json.dumps(arguments, ensure_ascii=False))]

    return parse


def _types(tools: Tools, name: str, parameter: str) -> list[Any]:
    """The JSON types that the tool's schema gives to a parameter, if it does."""
    for tool in tools or []:
        function = tool["function"]
        if function["name"] == name:
            schema: Any = function.get("parameters")
            for key in ("properties", parameter, "type"):
                schema = schema.get(key) if isinstance(schema, dict) else None
            return schema if isinstance(schema, list) else [schema]
    return []


def _typed(text: str, types: list[Any]) -> Any:
    """XML has no types: a string if the schema says so, else what it is as JSON, else a string."""
    if "string" in types:
        return text
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


_HERMES = Format("<tool_call>", "</tool_call>", _hermes)
# By family of rendering (render.py); a family of its own only where calls are written in another way.
FORMATS = {
    "default": _HERMES,
    "chatml": _HERMES,
    "qwen3": _HERMES,
    "qwen3-coder": Format("<tool_call>", "</tool_call>", _xml(_CODER_CALL, _CODER_VALUE)),
    "llama3": Format("<|python_tag|>", "", _llama, bare="{"),
    "deepseek-v3": Format("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek),
    "glm-4.5": Format("<tool_call>", "</tool_call>", _xml(_GLM_CALL, _GLM_VALUE)),
}
