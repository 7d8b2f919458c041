"""Reasoning and tool calls in a turn's text. Run: python -m pytest tests/core/test_tito_parsers.py"""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from tito_models import tokenizer_of

from miles_core.tito.call_formats import FORMATS
from miles_core.tito.families import FAMILIES
from miles_core.tito.parsers import StreamParser, fold, parse_assistant

CALLS_V3, END_V3 = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_V3, SEP_V3, END_CALL_V3 = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

# (family, a text with the call f({"a": 1, "b": "x y"}))
GOOD = [
    ("qwen3", '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x y"}}\n</tool_call>'),
    ("chatml", '<tool_call>{"arguments": {"a": 1, "b": "x y"}, "name": "f"}</tool_call>'),
    (
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n</parameter>\n</function>\n</tool_call>",
    ),
    ("llama3", '{"name": "f", "parameters": {"a": 1, "b": "x y"}}'),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1, "b": "x y"}}'),
    ("deepseek-v3", f'{CALLS_V3}{CALL_V3}function{SEP_V3}f\n```json\n{{"a": 1, "b": "x y"}}\n```{END_CALL_V3}{END_V3}'),
    ("deepseek-v3", f'{CALLS_V3}{CALL_V3}f{SEP_V3}{{"a": 1, "b": "x y"}}{END_CALL_V3}{END_V3}'),
    (
        "glm-4.5",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>",
    ),
]

# (family, a text that looks like a call and is none)
BAD = [
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),  # a brace is missing
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
    ("qwen3", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    ("qwen3", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {}, "note": "lost?"}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {}} {}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "a function", "arguments": {}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("qwen3", '<tool_call>{"arguments": {}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f"}</tool_call>'),
    ("qwen3", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {}}'),  # cut by length
    ("qwen3", '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>'),  # a line break inside a string
    ("qwen3", '<tool_call>{"name": "f, "arguments": {}}</tool_call>'),
    ("qwen3", "<tool_call></tool_call>"),
    ("qwen3", "<tool_call>" + '{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "}}</tool_call>"),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</tool_call>"),
    ("qwen3-coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>"),
    ("qwen3-coder", "<tool_call><function=f>words<parameter=a>1</parameter></function></tool_call>"),
    ("llama3", '{"name": "f", "parameters": {"a": 1}} and so on'),
    ("llama3", '{"answer": 42}'),
    ("llama3", '{"name": "f", "parameters": {}};'),
    ("llama3", '<|python_tag|>print("hello")'),
    ("deepseek-v3", f"{CALLS_V3}{CALL_V3}f{SEP_V3}{{}}{END_CALL_V3}"),
    ("deepseek-v3", f"{CALLS_V3}{CALL_V3}f{SEP_V3}[1]{END_CALL_V3}{END_V3}"),
    ("deepseek-v3", f"{CALLS_V3}{CALL_V3}f{SEP_V3}{{}}{END_CALL_V3} words {END_V3}"),
    ("glm-4.5", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>"),
    ("glm-4.5", "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>"),
]


def functions(message: dict) -> list[tuple[str, object]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


@pytest.mark.parametrize(("family", "call"), GOOD)
def test_a_call_of_each_form_is_found_beside_reasoning_and_content(family: str, call: str) -> None:
    thought = "<think>\nfirst\n</think>\n\n"
    for before, content, reasoning in (("", None, None), (thought, None, "first"), (thought + "Well.\n", "Well.", "first")):
        if family == "llama3" and content and not call.startswith("<|"):
            continue  # bare JSON after words is an answer
        message = parse_assistant(before + call, family)
        assert functions(message) == [("f", {"a": 1, "b": "x y"})]
        assert (message["content"], message["reasoning_content"]) == (content, reasoning)


@pytest.mark.parametrize(("family", "text"), BAD, ids=range(len(BAD)))
def test_a_malformed_call_is_content_to_the_letter(family: str, text: str) -> None:
    for before in ("", "Words "):
        assert parse_assistant(before + text, family) == {"content": before + text, "reasoning_content": None, "tool_calls": []}


def test_every_family_of_rendering_has_a_form_and_reads_what_its_template_writes() -> None:
    assert set(FAMILIES) | {"default", "qwen3-coder"} == set(FORMATS)
    arguments = {"a": [1, {"b": None}], "text": 'quotes " and\nlines, ünïcode'}
    asked = {"role": "user", "content": "q"}
    for family in FAMILIES:
        spelt = json.dumps(arguments) if family == "deepseek-v3" else arguments  # its template joins them to text
        calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": spelt}}]
        tokenizer = tokenizer_of(family)
        prompt = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([asked, {"role": "assistant", "content": "", "tool_calls": calls}], tokenize=False)
        assert whole.startswith(prompt)
        message = parse_assistant(whole[len(prompt) :].split(tokenizer.eos_token)[0], family)
        assert functions(message) == [("f", arguments)] and message["content"] is None, family


def test_arguments_keep_the_spelling_of_the_model() -> None:
    spelling = '{"b":1e2,   "a" : "\\u00e9\\/", "c": [ ]}'
    for family, text in (
        ("qwen3", f'<tool_call>{{"name": "f", "arguments": {spelling}}}</tool_call>'),
        ("llama3", f'{{"name": "f", "parameters": {spelling}}}'),
        ("deepseek-v3", f"{CALLS_V3}{CALL_V3}function{SEP_V3}f\n```json\n{spelling}\n```{END_CALL_V3}{END_V3}"),
    ):
        (call,) = parse_assistant(text, family)["tool_calls"]
        assert call["function"]["arguments"] == spelling


def test_parallel_calls_get_ids_of_their_own() -> None:
    twice = {
        "qwen3": GOOD[0][1] + "\n" + GOOD[0][1],
        "llama3": GOOD[3][1] + "; " + GOOD[3][1],
        "deepseek-v3": GOOD[6][1].replace(END_CALL_V3, END_CALL_V3 + "\n" + GOOD[6][1][len(CALLS_V3) : -len(END_V3)], 1),
    }
    for family, text in twice.items():
        message = parse_assistant(text, family, prefix="call_7_")
        assert [call["id"] for call in message["tool_calls"]] == ["call_7_0", "call_7_1"]
        assert functions(message) == [("f", {"a": 1, "b": "x y"})] * 2 and message["content"] is None


def test_types_of_xml_values_come_from_the_schema() -> None:
    properties = {"a": {"type": "string"}, "b": {"type": ["string", "null"]}, "c": {"type": "integer"}, "d": True}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    pairs = {"a": "1", "b": "null", "c": "1", "d": "[1]", "e": "NaN"}
    glm = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in pairs.items())
    coder = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in pairs.items())
    for family, text in (
        ("glm-4.5", f"<tool_call>f\n{glm}</tool_call>"),
        ("qwen3-coder", f"<tool_call><function=f>{coder}</function></tool_call>"),
    ):
        assert functions(parse_assistant(text, family, tools=tools)) == [("f", {"a": "1", "b": "null", "c": 1, "d": [1], "e": "NaN"})]
        assert functions(parse_assistant(text, family))[0][1]["a"] == 1
        assert functions(parse_assistant(text, family, tools=[{"type": "function", "function": {"name": "f"}}]))[0][1]["a"] == 1


def test_tags_inside_strings_and_tags_that_are_only_mentioned() -> None:
    inside = '<tool_call>{"name": "f", "arguments": {"a": "<tool_call></tool_call>\\"</tool_call>"}}</tool_call>'
    assert functions(parse_assistant(inside, "qwen3")) == [("f", {"a": '<tool_call></tool_call>"</tool_call>'})]
    mentioned = "I use <tool_call> now: " + GOOD[0][1]
    message = parse_assistant(mentioned, "qwen3")
    assert len(message["tool_calls"]) == 1 and message["content"] == "I use <tool_call> now:"
    unfinished = '<tool_call>{"name": "f</tool_call>' + GOOD[0][1]
    message = parse_assistant(unfinished, "qwen3")
    assert len(message["tool_calls"]) == 1 and message["content"] == '<tool_call>{"name": "f</tool_call>'


def test_reasoning() -> None:
    for text, thinking, reasoning, content in (
        ("<think>\n\n</think>\n\nHi", False, None, "Hi"),
        ("<think>a\n\nb</think>\n\nHi\n", False, "a\n\nb", "Hi\n"),
        ("a\n</think>\n\nHi", True, "a", "Hi"),
        ("a, cut ", True, "a, cut ", ""),
        ("<think>a, cut", False, "a, cut", ""),
        ("Hi <think>a</think>", False, None, "Hi <think>a</think>"),
        ("<thin", False, None, "<thin"),
        ("  Hi ", False, None, "  Hi "),
        ("<think>" + GOOD[0][1] + "</think>Hi", False, GOOD[0][1], "Hi"),
        ("", False, None, ""),
    ):
        assert parse_assistant(text, "qwen3", thinking=thinking) == {
            "content": content,
            "reasoning_content": reasoning,
            "tool_calls": [],
        }, text


def test_content_goes_on_after_a_call() -> None:
    message = parse_assistant(f"one {GOOD[0][1]} two\n", "qwen3")
    assert message["content"] == "one  two\n" and len(message["tool_calls"]) == 1


def test_calls_are_content_when_no_tools_were_offered() -> None:
    for family, text in GOOD:
        assert parse_assistant(text, family, calls=False) == {"content": text, "reasoning_content": None, "tool_calls": []}


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match=r"'gpt' is unknown; supported: .*qwen3-coder"):
        StreamParser("gpt")


def random_text(family: str, dice: random.Random) -> str:
    """Fragments of everything that a parser looks for, whole calls, and calls with a character missing."""
    form = FORMATS[family]
    calls = [text for name, text in GOOD if FORMATS[name] is form]
    words = [
        " ",
        "\n",
        "\n\n",
        "a",
        "{",
        '"',
        "\\",
        "}",
        ";",
        "<",
        "<think>",
        "</think>",
        form.begin,
        form.end,
        form.begin[:5],
        form.end[:-2],
    ]
    parts = ["<think>"] if dice.random() < 0.2 else []
    for _ in range(dice.randint(1, 9)):
        part = dice.choice(words if dice.random() < 0.6 else calls)
        hole = dice.randrange(len(part) + 1)
        parts.append(part[:hole] + part[hole + 1 :] if dice.random() < 0.1 else part)
    return "".join(parts)


@pytest.mark.parametrize("family", FORMATS)
def test_however_the_text_is_cut_the_deltas_add_up_to_the_same_message(family: str) -> None:
    dice = random.Random(f"cuts of {family}")
    seen = {"content": 0, "reasoning": 0, "call": 0, "tag": 0}
    for _ in range(150):
        text, options = random_text(family, dice), {"thinking": dice.random() < 0.2, "calls": dice.random() < 0.9}
        whole = parse_assistant(text, family, **options)
        cuts = [[text[:i], text[i:]] for i in range(len(text) + 1)] + [list(text)]
        for pieces in cuts:
            parser = StreamParser(family, **options)
            deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.close()
            assert fold(deltas) == whole, (text, pieces)
            assert "".join(delta.raw for delta in deltas) == text, (text, pieces)
            assert all(delta.text.strip() == delta.raw.strip() for delta in deltas if delta.kind in ("content", "reasoning"))
            assert all(delta.raw.strip() in ("<think>", "</think>", "") for delta in deltas if delta.kind == "tag")
        for delta in deltas:
            seen[delta.kind] += 1
    assert min(seen.values()) > 10, f"the texts do not try everything: {seen}"


def test_what_is_certain_is_not_held_back() -> None:
    parser = StreamParser("qwen3")
    said = [fold(parser.push(piece))["content"] for piece in ("Hel", "lo ", "wor", "ld <", "tool", "s> ", "!")]
    assert said == ["Hel", "lo", " wor", "ld", "", " <tools>", " !"]


def test_degenerate_texts_are_parsed_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in a loop must not stop the others: no character is given to the parser of calls more than three times."""
    form, parsed = FORMATS["qwen3"], []

    def parse(raw: str, tools: object) -> object:
        parsed.append(len(raw))
        return form.parse(raw, tools)

    monkeypatch.setitem(FORMATS, "qwen3", dataclasses.replace(form, parse=parse))
    inside = '<tool_call>{"a": "'
    for start, unit in (
        ("", "<tool_call>"),
        ("", "</tool_call>"),
        (inside, "</tool_call>"),
        (inside, "<tool_call></tool_call>"),
        ("", GOOD[0][1]),
        ("", inside + "</tool_call>"),
        ("", "<tool_call>{}</tool_call>"),
    ):
        text = start + unit * 5000
        parse_assistant(text, "qwen3")
        assert sum(parsed) <= 3 * len(text), (start, unit)
        parsed.clear()
