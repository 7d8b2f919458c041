"""How model families write the messages after a turn: fixed renderings of what their chat templates write, turn by turn.

A family renders only messages that were appended. It never writes an earlier turn again, so it can keep what a template would change there
(thinking of earlier turns, above all). `verify.py` compares each with the template of the model at hand.

The formats are those of the models' own chat templates and model cards: SmolLM2, Qwen2.5, Qwen3, Qwen3-Coder, Llama 3.x, DeepSeek-V3,
DeepSeek-V3.1, GLM-4.5, GLM-4.6.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from miles_core.tito.errors import SessionError
from miles_core.tito.messages import Message

Probe = Callable[[list[Message]], str]  # what the template at hand writes; "" if it refuses

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOL_TURN: list[Message] = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "RESULT", "tool_call_id": "call00000", "name": "f"},
]
_ANSWERED: list[Message] = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "SAID"},
    {"role": "user", "content": "q"},
]


@dataclass(frozen=True)
class Family:
    """How one kind of chat format goes on after an answer.

    `ends`: tokens that end an answer, the one that templates write first. `marks`: tokens that build the conversation; others, such as
    <think>, belong to a message's text. `markup`: control tokens that an assistant's text may hold. `call`: what an answer that is a tool
    call begins with, or None. `header_ends`: an answer ends with the header of the next message.
    """

    name: str
    ends: tuple[str, ...]
    marks: tuple[str, ...]
    markup: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    call: str | None = None
    header_ends: bool = False

    def adapt(self, probe: Probe) -> Family:
        """The family as the template at hand spells it, where spellings differ between models."""
        return self

    def later(self, last: str, messages: list[Message], generation: str, nothink: bool) -> str:
        """The text between an answer that ended in the token `last` and the next answer. `generation`: the template's generation prompt.

        With `header_ends` any token may be the last; otherwise whatever ended the answer is given as ends[0]. `nothink`: thinking is off.
        Raises SessionError 400 for a message that the family cannot append.
        """
        raise NotImplementedError


def arguments_of(call: dict[str, Any]) -> Any:
    """The arguments of a call as a dictionary, or as text where they are not a JSON object."""
    text = call["function"]["arguments"]
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _named(call: dict[str, Any]) -> tuple[str, str]:
    return call["function"]["name"], _json(arguments_of(call))


def _runs(messages: list[Message]) -> list[tuple[bool, list[Message]]]:
    """Stretches of tool messages (True), and of others."""
    return [(is_tool, list(run)) for is_tool, run in groupby(messages, lambda message: message["role"] == "tool")]


@dataclass(frozen=True)
class ChatML(Family):
    """<|im_start|>role, text, <|im_end|>. `tool_user`: results of tools are one user turn of <tool_response>s, not turns of role tool."""

    tool_user: bool = True

    def adapt(self, probe: Probe) -> Family:
        plain = f"{IM_START}tool\n" in probe(_TOOL_TURN)
        return replace(self, tool_user=not plain)

    def later(self, last: str, messages: list[Message], generation: str, nothink: bool) -> str:
        text = "\n" if last == IM_END else IM_END + "\n"
        for is_tool, run in _runs(messages):
            if is_tool and self.tool_user:
                results = "".join(f"\n<tool_response>\n{message['content']}\n</tool_response>" for message in run)
                text += f"{IM_START}user{results}{IM_END}\n"
            else:
                text += "".join(f"{IM_START}{message['role']}\n{self._body(message)}{IM_END}\n" for message in run)
        return text + generation

    def _body(self, message: Message) -> str:
        thought, said = message.get("reasoning_content", "").strip("\n"), message["content"]
        named = map(_named, message.get("tool_calls", ()))
        calls = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in named)
        body = said + ("\n" if said and calls else "") + calls
        return f"<think>\n{thought}\n</think>\n\n{body.lstrip(chr(10))}" if thought else body


@dataclass(frozen=True)
class Llama3(Family):
    """<|start_header_id|>role<|end_header_id|>, text, <|eot_id|>. `quoted`: the template writes the text of a tool as a JSON string."""

    quoted: bool = True

    def adapt(self, probe: Probe) -> Family:
        return replace(self, quoted='"RESULT"' in probe(_TOOL_TURN))

    def later(self, last: str, messages: list[Message], generation: str, nothink: bool) -> str:
        turns = [f"<|start_header_id|>{self._role(message)}<|end_header_id|>\n\n{self._body(message)}<|eot_id|>" for message in messages]
        return ("" if last == self.ends[0] else self.ends[0]) + "".join(turns) + generation

    def _role(self, message: Message) -> str:
        return "ipython" if message["role"] == "tool" else message["role"]

    def _body(self, message: Message) -> str:
        if message["role"] == "tool":
            return json.dumps(message["content"], ensure_ascii=False) if self.quoted else message["content"]
        calls = message.get("tool_calls", ())
        if len(calls) > 1:
            raise SessionError(400, "this model's chat format has one tool call a turn")
        if not calls:
            return message["content"].strip()
        name, arguments = _named(calls[0])
        return f'{{"name": "{name}", "parameters": {arguments}}}'


@dataclass(frozen=True)
class DeepSeekV3(Family):
    """<｜User｜>text<｜Assistant｜>text<｜end▁of▁sentence｜>. An answer follows the results of tools without a header.

    `old`: as in V3, results stand between marks of their own, and a call is a function with fenced arguments. In V3.1 neither is so.
    `unthought`: what an assistant message without reasoning begins with.
    """

    old: bool = True
    unthought: str = ""

    def adapt(self, probe: Probe) -> Family:
        unthought = probe(_ANSWERED).partition("<｜Assistant｜>")[2].partition("SAID")[0]
        old = "<｜tool▁outputs▁begin｜>" in probe(_TOOL_TURN)
        call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + ("function<｜tool▁sep｜>" if old else "")
        return replace(self, old=old, unthought=unthought, call=call)

    def later(self, last: str, messages: list[Message], generation: str, nothink: bool) -> str:
        end, header = self.ends[0], "<｜Assistant｜>"
        text = "" if last == end else end
        after_tool = False
        for is_tool, run in _runs(messages):
            if is_tool:
                results = ("\n" if self.old else "").join(f"<｜tool▁output▁begin｜>{m['content']}<｜tool▁output▁end｜>" for m in run)
                text += f"<｜tool▁outputs▁begin｜>{results}<｜tool▁outputs▁end｜>" if self.old else results
                after_tool = True
                continue
            for message in run:
                if message["role"] == "system":
                    raise SessionError(400, "this model's chat format has system messages at the start only")
                if message["role"] == "user":
                    text += "<｜User｜>" + message["content"]
                else:
                    text += ("" if after_tool else header + self.unthought) + self._body(message) + end
                after_tool = False
        # Some templates write the header with the user's message, and then it is not in the generation prompt.
        return text + ("" if after_tool else generation if header in generation else header + generation)

    def _body(self, message: Message) -> str:
        form = "function<｜tool▁sep｜>{}\n```json\n{}\n```" if self.old else "{}<｜tool▁sep｜>{}"
        calls = [form.format(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        spelt = ("\n" if self.old else "").join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
        return message["content"] + (f"<｜tool▁calls▁begin｜>{spelt}<｜tool▁calls▁end｜>" if calls else "")


@dataclass(frozen=True)
class GLM45(Family):
    """<|user|>, <|assistant|>, <|observation|>: an answer ends with the header of the message that follows it.

    `newline`: what stands between the parts of a message; `unthought`: what an assistant message without reasoning begins with.
    """

    newline: str = "\n"
    unthought: str = "<think></think>"

    def adapt(self, probe: Probe) -> Family:
        text = probe(_ANSWERED)
        newline = "\n" if "<|user|>\n" in text else ""
        unthought = text.partition("<|assistant|>")[2].partition("SAID")[0].strip("\n")
        return replace(self, newline=newline, unthought=unthought, call=newline + "<tool_call>")

    def later(self, last: str, messages: list[Message], generation: str, nothink: bool) -> str:
        text, n = "", self.newline
        for is_tool, run in _runs(messages):
            if is_tool:
                text += "<|observation|>" + "".join(f"{n}<tool_response>{n}{message['content']}{n}</tool_response>" for message in run)
            for message in () if is_tool else run:
                slow = message["role"] == "user" and nothink and not message["content"].endswith("/nothink")
                body = (
                    self._body(message) if message["role"] == "assistant" else n + message["content"] + ("/nothink" if slow and n else "")
                )
                text += f"<|{message['role']}|>" + body
        # The answer may have ended with the header that is due now.
        return (text.removeprefix(last) if last in ("<|user|>", "<|observation|>", "<|system|>") else text) + generation

    def _body(self, message: Message) -> str:
        n, thought, said = self.newline, message.get("reasoning_content", "").strip(), message["content"].strip()
        text = n + (f"<think>{thought}</think>" if thought else self.unthought) + (n + said if said else "")
        for call in message.get("tool_calls", ()):
            given = arguments_of(call)
            pairs = given.items() if isinstance(given, dict) else [("arguments", given)]
            inner = "".join(f"{n}<arg_key>{key}</arg_key>{n}<arg_value>{_json(value)}</arg_value>" for key, value in pairs)
            text += f"{n}<tool_call>{call['function']['name']}{inner}{n}</tool_call>"
        return text


_DEEPSEEK_CALLS = tuple(
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end")
) + ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
_GLM_CALLS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_IM_MARKS = (IM_START, IM_END, "<|endoftext|>")
_LLAMA_MARKS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_GLM_MARKS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_DEEPSEEK_MARKS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *_DEEPSEEK_CALLS[5:])

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        ChatML("chatml", (IM_END, "<|endoftext|>"), _IM_MARKS, call="<tool_call>\n"),
        ChatML("qwen3", (IM_END, "<|endoftext|>"), _IM_MARKS, call="<tool_call>\n"),
        Llama3("llama3", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), _LLAMA_MARKS, ("<|python_tag|>",), '{"name": "'),
        DeepSeekV3(
            "deepseek-v3",
            ("<｜end▁of▁sentence｜>",),
            _DEEPSEEK_MARKS,
            ("<think>", "</think>", *_DEEPSEEK_CALLS[:5]),
        ),
        GLM45("glm-4.5", ("<|user|>", "<|observation|>", "<|endoftext|>"), _GLM_MARKS, _GLM_CALLS, header_ends=True),
    )
}
DEFAULT = "default"


def fingerprint(template: str) -> str:
    """The family whose marks a chat template writes; "default" if they are nobody's. Whether it is that family, `verify` proves."""
    for name, marks in (
        ("deepseek-v3", ("<｜User｜>", "<｜Assistant｜>")),
        ("glm-4.5", ("[gMASK]", "<|observation|>")),
        ("llama3", ("<|start_header_id|>", "<|eot_id|>")),
        ("qwen3", (IM_START, "<think>")),
        ("chatml", (IM_START,)),
    ):
        if all(mark in template for mark in marks):
            return name
    return DEFAULT
