"""Messages -> token ids. The first turn by the chat template, later turns by the family's rendering of what was appended (DESIGN 4.8).

    renderer = verify.renderer_for(tokenizer)                 # family from the template's fingerprint, proven
    rendered = renderer.first(messages, tools, template_kwargs)
    rendered = renderer.later(last_id, appended, tools, template_kwargs)     # to be joined to the ids that the session has

Text of a control token inside a message stays text. Every such place is split by a mark, a Unicode noncharacter that no message contains;
the rendered text is tokenised in pieces between marks, so that no piece contains the control token.

Legend: P tokens rendered, M sampled tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from miles_core.tito.errors import SessionError
from miles_core.tito.families import DEFAULT, FAMILIES, Family, arguments_of
from miles_core.tito.messages import Message
from miles_core.tito.tree import Rendered

if TYPE_CHECKING:
    from miles_core.model.hf import Tokenizer

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never characters of a text: Unicode keeps them for uses like this one
_RESERVED = {
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
}
_RESERVED |= {"padding", "truncation", "max_length", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "conversation"}
_ANSWER = "MILES0ANSWER"
_DUMMY_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class Encoder:
    """Text -> ids with a tokenizer whose control tokens a message cannot spell."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(i for i, token in added if token.special)
        # Tags such as <think> or <｜User｜> steer a model although their tokens are not always declared special; runs of spaces do not.
        self.control = {token.content: i for i, token in added if token.special or re.fullmatch(r"<\S+>|\[\S+\]", token.content)}
        self._patterns: dict[tuple[str, ...], re.Pattern[str]] = {}
        ab = [i for letter in "ab" for i in self._ids(letter)]
        self._splits = tokenizer.decode(ab) == "ab"  # a tokenizer that begins every text with a space changes text that is split

    def guard(self, value: Any, mark: str, allowed: tuple[str, ...] = ()) -> Any:
        """`value` (JSON), its control tokens but the `allowed` ones split by `mark`, in all strings."""
        if allowed not in self._patterns:
            spelt = "|".join(re.escape(token) for token in self.control if len(token) > 1 and token not in allowed)
            self._patterns[allowed] = re.compile(f"(?={spelt})(.)" if spelt else "(?!)", re.DOTALL)
        pattern = self._patterns[allowed]
        return _map_strings(value, lambda text: pattern.sub(rf"\1{mark}", text))

    def encode(self, text: str, mark: str) -> np.ndarray:
        """int32 [P]. Raises SessionError 400 for text that cannot be encoded as it is meant."""
        pieces = text.split(mark)
        if len(pieces) > 1 and not self._splits:
            raise SessionError(400, "a message spells a control token, and this tokenizer cannot encode it as text")
        try:
            ids = [i for piece in pieces for i in self._ids(piece)]
        except (UnicodeEncodeError, TypeError) as error:
            raise SessionError(400, f"text that is no valid Unicode: {error}") from error
        return np.array(ids, np.int32)

    def decode(self, ids: Any) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(item)


class Renderer:
    """A tokenizer with a chat template, and how its family goes on after a turn.

    `family`: a name of families.FAMILIES, or "default": the difference of two renderings of a made-up conversation. `ends`: further ids
    that end an answer. ValueError for a tokenizer without a template and for an unknown family. What it renders is right only where
    verify.py has proven it: use `verify.renderer_for`.
    """

    def __init__(self, tokenizer: Tokenizer, family: str = DEFAULT, ends: tuple[int, ...] = ()) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template, so it cannot render conversations; put one in tokenizer_config.json")
        if family != DEFAULT and family not in FAMILIES:
            raise ValueError(f"--family {family!r} is unknown: use one of {', '.join((*FAMILIES, DEFAULT))}")
        self.tokenizer, self.encoder, self.name = tokenizer, Encoder(tokenizer), family
        self._generation: dict[str, str] = {}
        self._text_arguments = False
        template = str(tokenizer.chat_template)
        self.shows_tools = "tools" in template  # otherwise the template leaves them out of the prompt
        self.parser = "qwen3-coder" if "<function=" in template and "<tool_call>" in template else family
        self._text_arguments = self._wants_text_arguments()
        self.family: Family = FAMILIES[family].adapt(self._probe) if family != DEFAULT else Family(DEFAULT, (), ())
        if self.family.ends and self.family.ends[0] not in self.encoder.control:
            raise ValueError(f"--family {family} ends answers with {self.family.ends[0]}, which this tokenizer does not have")
        named = (self.encoder.control[end] for end in self.family.ends if end in self.encoder.control)
        self.ends = frozenset((*named, *ends, *((tokenizer.eos_token_id,) if tokenizer.eos_token_id is not None else ())))
        # Tokens that build the conversation; see drift.py.
        marks = {self.encoder.control[mark] for mark in self.family.marks if mark in self.encoder.control}
        self.marks = frozenset(marks or self.encoder.special | self.ends)

    # ---- what a session asks

    def first(self, messages: list[Message], tools: Any, template_kwargs: dict[str, Any], force_call: bool = False) -> Rendered:
        """The prompt of a first turn. Raises SessionError 400 for what the template refuses."""
        mark, messages, tools = self._guarded(messages, tools)
        return self._rendered(self._template(messages, tools, template_kwargs, True), mark, template_kwargs, force_call)

    def later(self, last: int, messages: list[Message], tools: Any, template_kwargs: dict[str, Any], force_call: bool = False) -> Rendered:
        """What follows an answer whose last token is `last`. Raises SessionError 400 for what the family cannot append."""
        mark, messages, tools = self._guarded(messages, tools)
        if self.name == DEFAULT:
            text = self._difference(last, messages, tools, template_kwargs)
        else:
            generation = self._generation_prompt(template_kwargs)
            nothink = template_kwargs.get("enable_thinking") is False
            ended = last in self.ends and not self.family.header_ends
            text = self.family.later(self.family.ends[0] if ended else self.encoder.decode([last]), messages, generation, nothink)
        return self._rendered(text, mark, template_kwargs, force_call)

    def answer(self, tokens_M: np.ndarray) -> str:
        """The text of sampled tokens, without the token that ends the turn."""
        ids = tokens_M.tolist()
        return self.encoder.decode(ids[:-1] if ids and ids[-1] in self.ends else ids)

    def sampled(self, messages: list[Message], tools: Any, template_kwargs: dict[str, Any]) -> np.ndarray:
        """The tokens of the last message, the assistant's, as if a model had spelt it as the template does: int32 [M]. For proofs."""
        mark, messages, tools = self._guarded(messages, tools)
        before = self._template(messages[:-1], tools, template_kwargs, True)
        text = self._template(messages, tools, template_kwargs, False)
        text = text[len(before) :] if text.startswith(before) else messages[-1]["content"]
        ends = [end for i in self.ends if (end := self.encoder.decode([i])) in text]
        if ends:
            stop = max(text.rindex(end) + len(end) for end in ends)
            return self.encoder.encode(text[:stop], mark)
        return self.encoder.encode(text + (self.family.ends[0] if self.family.ends else self.tokenizer.eos_token or ""), mark)

    def generation_ids(self) -> np.ndarray:
        """What opens an answer, int32 [P]."""
        return self.encoder.encode(self._generation_prompt({}), _MARKS[0])

    def whole(self, messages: list[Message], tools: Any, template_kwargs: dict[str, Any], generate: bool) -> np.ndarray:
        """A whole conversation by the template, int32 [P]: what a client that keeps no tokens would send."""
        mark, messages, tools = self._guarded(messages, tools)
        return self.encoder.encode(self._template(messages, tools, template_kwargs, generate), mark)

    # ---- how

    def _guarded(self, messages: list[Message], tools: Any) -> tuple[str, list[Message], Any]:
        """(mark, messages, tools) with control tokens split by the mark."""
        found = set().union(*map(set, _strings([messages, tools or []]))) & set(_MARKS)
        mark = next((mark for mark in _MARKS if mark not in found), None)
        if mark is None:
            raise SessionError(400, "the messages contain all 32 noncharacters from U+FDD0 on")
        guard = self.encoder.guard
        safe = [guard(message, mark, self.family.markup if message["role"] == "assistant" else ()) for message in messages]
        return mark, safe, guard(tools, mark)

    def _rendered(self, text: str, mark: str, template_kwargs: dict[str, Any], force_call: bool) -> Rendered:
        opening = ""
        if force_call:
            if self.family.call is None:
                raise SessionError(400, f'tool_choice "required" is not supported for family {self.name}')
            opening = self.family.call
        thought = text.rpartition("<think>")
        thinking = bool(thought[1]) and not thought[2].strip() and not force_call
        return Rendered(self.encoder.encode(text + opening, mark), opening, thinking)

    def _template(self, messages: list[Message], tools: Any, template_kwargs: dict[str, Any], generate: bool) -> str:
        if reserved := _RESERVED & template_kwargs.keys():
            raise SessionError(400, f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}")
        plain = [self._for_template(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                plain, tools=tools or None, add_generation_prompt=generate, tokenize=False, **template_kwargs
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise SessionError(400, f"this model's chat template refuses the messages: {error}") from error

    def _for_template(self, message: Message) -> Message:
        """Templates want the arguments of calls as an object, but for those that join them to text."""
        if "tool_calls" not in message or self._text_arguments:
            return message
        calls = [{**c, "function": {**c["function"], "arguments": arguments_of(c)}} for c in message["tool_calls"]]
        return {**message, "tool_calls": calls}

    def _wants_text_arguments(self) -> bool:
        called = {"role": "assistant", "content": "", "tool_calls": [_DUMMY_CALL]}
        return self._probe([{"role": "user", "content": "q"}, called]) == ""

    def _probe(self, messages: list[Message]) -> str:
        try:
            return self._template(messages, None, {}, False)
        except SessionError:
            return ""

    def _generation_prompt(self, template_kwargs: dict[str, Any]) -> str:
        """What the template adds for an answer, after a user's message."""
        key = json.dumps(template_kwargs, sort_keys=True)
        if key not in self._generation:
            asked, bare = (self._template([{"role": "user", "content": "q"}], None, template_kwargs, ask) for ask in (True, False))
            if not asked.startswith(bare):
                raise SessionError(400, "this model's chat template has no generation prompt of its own")
            if len(self._generation) >= 64:  # a client that makes up kwargs
                self._generation.clear()
            self._generation[key] = asked[len(bare) :]
        return self._generation[key]

    def _difference(self, last: int, messages: list[Message], tools: Any, template_kwargs: dict[str, Any]) -> str:
        """What the template writes after the answer of a made-up turn, if the answer ended in the token `last`."""
        made_up: Message = {"role": "assistant", "content": _ANSWER}
        if messages[0]["role"] == "tool":
            made_up["tool_calls"] = [_DUMMY_CALL]
        turn: list[Message] = [{"role": "user", "content": "q"}, made_up]
        before = self._template(turn, tools, template_kwargs, False).rpartition(_ANSWER)[2]
        after = self._template([*turn, *messages], tools, template_kwargs, True).partition(_ANSWER)[2]
        end = self.tokenizer.eos_token or ""
        begin = before.rfind(end) if end else -1
        if begin < 0:
            begin, end = 0, ""
        if not after.startswith(before[:begin] + end):
            raise SessionError(400, "this model's chat template does not append these messages; name its family by --family")
        return after[begin + len(end) :] if last in self.ends else after[begin:]
