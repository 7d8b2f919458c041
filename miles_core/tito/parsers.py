"""What an assistant's text says: reasoning, content and tool calls, at once or as it arrives.

    parse_assistant(text, "qwen3") -> {"content": ..., "reasoning_content": ..., "tool_calls": [...]}     # the form of the OpenAI chat API

    parser = StreamParser("qwen3")
    for piece in pieces:
        for delta in parser.push(piece): send(delta.fields())
    for delta in parser.close(): send(delta.fields())

Both are one machine, so that what was streamed adds up to what is kept, wherever the text was cut. The rules:

- Nothing is lost and nothing is repaired: the `raw` of all deltas, one after the other, is the text. A call that is not exactly of its form
  is content, tags included. So a call is announced when its last tag is there, and not before.
- The arguments of a JSON call are the characters that the model wrote, not a new spelling of their value.
- Reasoning is what stands between <think> and </think> at the start of the text, or from the start if the prompt ended in <think>.
- White space next to a tag belongs to the tag, unless content goes on after it.

Text means: decoded with special tokens, without the token that ends the turn. The forms of calls are in call_formats.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from miles_core.tito.call_formats import FORMATS, Call, Format, Tools

THINK, END_THINK = "<think>", "</think>"
_CHUNK = 4096  # characters at a time: a text of thousands of calls then takes time linear in its length


@dataclass(frozen=True)
class Delta:
    """A piece of the answer: `text` of kind "content" or "reasoning", or a whole `call`. `raw`: the characters that it stands for."""

    kind: str  # content | reasoning | call | tag
    raw: str
    text: str = ""
    call: Call | None = None
    index: int = 0  # of the call
    call_id: str = ""

    def fields(self) -> dict[str, Any]:
        """What a streamed chunk of the OpenAI chat API says in `delta`; empty for tags."""
        if self.kind == "call":
            assert self.call is not None, self
            function = {"name": self.call.name, "arguments": self.call.arguments}
            return {"tool_calls": [{"index": self.index, "id": self.call_id, "type": "function", "function": function}]}
        return {{"content": "content", "reasoning": "reasoning_content"}[self.kind]: self.text} if self.text else {}


class _Channel:
    """Text of one kind. Holds back white space until it is known whether it stands next to a tag."""

    def __init__(self, kind: str, after_tag: bool) -> None:
        self.kind = kind
        self.begun = False  # something other than white space was said
        self._after_tag = after_tag  # ... and nothing since the last tag
        self._held = ""  # white space at the end of what came
        self._owed = ""  # white space that went with tags, but is due if the text goes on

    def say(self, text: str) -> list[Delta]:
        said = text.rstrip()
        if not said:
            self._held += text
            return []
        raw = self._held + said
        spoken = raw if self.begun or not self._after_tag else raw.lstrip()
        delta = Delta(self.kind, raw, self._owed + spoken)
        self.begun, self._after_tag, self._held, self._owed = True, False, text[len(said) :], ""
        return [delta]

    def tag(self, delta: Delta) -> list[Delta]:
        """The white space before a tag goes with it."""
        delta = replace(delta, raw=self._held + delta.raw)
        if self.begun:
            self._owed += self._held
        self._after_tag, self._held = True, ""
        return [delta]

    def end(self) -> list[Delta]:
        """What was held back is text, if no tag stands before it."""
        raw, self._held = self._held, ""
        return [Delta("tag", raw) if self._after_tag else Delta(self.kind, raw, raw)] if raw else []


class StreamParser:
    """`family` names the form of calls: see call_formats.FORMATS. ValueError for another name.

    tools: the request's tools in OpenAI form; where a form does not spell types (XML), the schema says which values are strings.
    calls: False takes calls for content (no tools were offered, or tool_choice is "none"). thinking: the prompt ended in <think>.
    prefix: what the ids of the calls begin with; an id must not come back in a session.
    """

    def __init__(self, family: str, *, tools: Tools = None, calls: bool = True, thinking: bool = False, prefix: str = "call_") -> None:
        if family not in FORMATS:
            raise ValueError(f"tool-call family {family!r} is unknown; supported: {', '.join(FORMATS)}")
        self._format = FORMATS[family] if calls else None
        self._tools, self._prefix = tools, prefix
        self._buffer = ""
        self._num_calls = 0
        self._searched = 0  # the buffer has no end of the open call before this position, ...
        self._inside = 0  # ... but one that stands inside a string, before this one
        self._state = self._reasoning if thinking else self._start
        self._channel = _Channel("reasoning" if thinking else "content", after_tag=thinking)
        self._closing = False

    def push(self, text: str) -> list[Delta]:
        """Deltas that are certain once `text` has followed what was pushed before."""
        assert not self._closing, "pushed to a closed parser"
        self._buffer += text
        return self._run()

    def close(self) -> list[Delta]:
        """The rest, when the text has ended."""
        self._closing = True
        return self._run() + self._channel.end()

    def _run(self) -> list[Delta]:
        deltas: list[Delta] = []
        while (more := self._state()) is not None:
            deltas += more
        return deltas

    # The states: each returns the deltas of one step, or None when it needs more text.

    def _start(self) -> list[Delta] | None:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            deltas = self._channel.say(self._take(len(self._buffer) - len(text))) + self._channel.tag(Delta("tag", self._take(len(THINK))))
            self._channel, self._state = _Channel("reasoning", after_tag=True), self._reasoning
            return deltas
        if THINK.startswith(text) and not self._closing:
            return None
        self._state = self._content
        return []

    def _reasoning(self) -> list[Delta] | None:
        at = self._buffer.find(END_THINK)
        if at < 0:
            return self._say_up_to(len(self._buffer) - self._partial(END_THINK))
        deltas = self._channel.say(self._take(at)) + self._channel.tag(Delta("tag", self._take(len(END_THINK))))
        self._channel, self._state = _Channel("content", after_tag=True), self._content
        return deltas

    def _content(self) -> list[Delta] | None:
        form = self._format
        if form is None:
            return self._say_up_to(len(self._buffer))
        if form.bare and not self._channel.begun and self._buffer.lstrip().startswith(form.bare):
            at = self._buffer.index(form.bare)
        elif (at := self._buffer.find(form.begin)) < 0:
            return self._say_up_to(len(self._buffer) - self._partial(form.begin))
        deltas = self._channel.say(self._take(at))
        self._state, self._searched, self._inside = self._call, 0, 0
        return deltas

    def _call(self) -> list[Delta] | None:
        form = self._format
        assert form is not None
        end = self._end_of_call(form)
        if end < 0 and not self._closing:
            return None
        found: list[Call] | None = []
        if end >= 0:
            still_inside = self._inside and '"' not in self._buffer[self._inside : end]
            found = None if still_inside else form.parse(self._buffer[:end], self._tools)
        if found is None:  # this end tag stands inside a string: wait for the next
            self._searched = self._inside = end
            return []
        if not found and end >= 0 and (last := self._buffer.rfind(form.begin, 1, end)) > 0:
            self._searched = self._inside = 0
            return self._channel.say(self._take(last))  # the first tag was only mentioned; look at the last one
        self._state = self._content
        raw = self._take(end if end >= 0 else len(self._buffer))
        return self._calls(raw, found) if found else self._channel.say(raw)

    # Helpers.

    def _end_of_call(self, form: Format) -> int:
        """Position behind the call that the buffer begins with, or -1. Does not look at the same characters twice."""
        if not form.end:
            return len(self._buffer) if self._closing else -1  # such a call lasts to the end of the turn
        at = self._buffer.find(form.end, max(self._searched - len(form.end) + 1, 0))
        if at < 0:
            self._searched = len(self._buffer)
            return -1
        return at + len(form.end)

    def _calls(self, raw: str, found: list[Call]) -> list[Delta]:
        """Several calls in one pair of tags: the raw text goes with the first."""
        deltas = []
        for call in found:
            call_id = f"{self._prefix}{self._num_calls}"
            deltas += self._channel.tag(Delta("call", raw, call=call, index=self._num_calls, call_id=call_id))
            self._num_calls, raw = self._num_calls + 1, ""
        return deltas

    def _take(self, n: int) -> str:
        taken, self._buffer = self._buffer[:n], self._buffer[n:]
        return taken

    def _say_up_to(self, n: int) -> list[Delta] | None:
        return self._channel.say(self._take(n)) if n else None

    def _partial(self, tag: str) -> int:
        """Length of the longest end of the buffer that may be the beginning of `tag`."""
        if self._closing:
            return 0
        return next((n for n in range(min(len(tag) - 1, len(self._buffer)), 0, -1) if tag.startswith(self._buffer[-n:])), 0)


def parse_assistant(
    text: str, family: str, *, tools: Tools = None, calls: bool = True, thinking: bool = False, prefix: str = "call_"
) -> dict[str, Any]:
    """{"content": str | None, "reasoning_content": str | None, "tool_calls": [...]} of a whole turn. Arguments as for StreamParser."""
    parser = StreamParser(family, tools=tools, calls=calls, thinking=thinking, prefix=prefix)
    deltas = [delta for i in range(0, len(text), _CHUNK) for delta in parser.push(text[i : i + _CHUNK])]
    return fold(deltas + parser.close())


def fold(deltas: list[Delta]) -> dict[str, Any]:
    """The message that the deltas add up to. Content is None beside calls when there is none; reasoning is None when there is none."""
    said = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("content", "reasoning")}
    tool_calls = [
        {"id": d.call_id, "type": "function", "function": {"name": d.call.name, "arguments": d.call.arguments}} for d in deltas if d.call
    ]
    return {
        "content": said["content"] or (None if tool_calls else ""),
        "reasoning_content": said["reasoning"] or None,
        "tool_calls": tool_calls,
    }
