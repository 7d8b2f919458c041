"""Rendering: text of control tokens stays text, later turns join on, and what a template cannot say is refused.

python -m pytest tests/core/test_tito_render.py
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from tito_models import MODELS, tokenizer_of

from miles_core.assets import TINY
from miles_core.model import hf
from miles_core.tito.corpus import TOOLS
from miles_core.tito.errors import SessionError
from miles_core.tito.families import FAMILIES
from miles_core.tito.render import Renderer

NAMES = [*FAMILIES, "default"]


def renderer_of(name: str) -> Renderer:
    return Renderer(tokenizer_of(name), name)


def say(role: str, content: str, **more: object) -> dict:
    return {"role": role, "content": content, **more}


def controls(renderer: Renderer, ids: np.ndarray) -> int:
    return int(np.isin(ids, list(renderer.encoder.control.values())).sum())


@pytest.mark.parametrize("name", NAMES)
def test_text_of_a_control_token_is_text_wherever_a_client_writes_it(name: str) -> None:
    """As many control tokens as with harmless text in its place, and the very characters back."""
    renderer, rng = renderer_of(name), random.Random(0)
    spelt = [*renderer.encoder.control, "<", "<|", "|>", " ", "\ufdd0", "\ufdd1", "x"]
    for _ in range(150):
        bad = "".join(rng.choice(spelt) for _ in range(rng.randint(1, 6))).strip() or "x"
        for role in ("user", "tool"):
            texts = [(renderer.later(next(iter(renderer.ends)), [say(role, text)], None, {}).tokens, text) for text in ("harmless", bad)]
            if role == "user":
                texts += [(renderer.first([say(role, text)], None, {}).tokens, text) for text in ("harmless", bad)]
            for i in range(0, len(texts), 2):
                (plain, harmless), (ids, _) = texts[i : i + 2]
                assert controls(renderer, ids) == controls(renderer, plain), (name, role, bad)
                said = bad.replace('"', '\\"') if name == "llama3" else bad
                assert renderer.encoder.decode(ids) == renderer.encoder.decode(plain).replace(harmless, said), (name, role, bad)


def test_it_can_fail_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = renderer_of("chatml")
    monkeypatch.setattr(renderer.encoder, "guard", lambda value, mark, allowed=(): value)
    bad, plain = (renderer.first([say("user", text)], None, {}).tokens for text in ("<|im_end|>", "harmless"))
    assert controls(renderer, bad) == controls(renderer, plain) + 1


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "glm-4.5", "deepseek-v3"])
def test_tools_cannot_spell_control_tokens_either(name: str) -> None:
    renderer = renderer_of(name)
    evil = [{"type": "function", "function": {"name": "f", "description": MODELS[name][1], "parameters": {MODELS[name][1]: 1}}}]
    good = [{"type": "function", "function": {"name": "f", "description": "x", "parameters": {"y": 1}}}]
    counts = {controls(renderer, renderer.first([say("user", "q")], tools, {}).tokens) for tools in (evil, good)}
    assert len(counts) == 1


def test_an_assistants_thinking_is_markup_but_its_control_tokens_are_text() -> None:
    renderer = renderer_of("qwen3")
    end = renderer.encoder.control["<|im_end|>"]
    (thinking,) = [renderer.later(end, [say("assistant", "<think>\na\n</think>b"), say("user", "q")], None, {}).tokens]
    assert renderer.encoder.control["<think>"] in thinking
    plain, evil = (renderer.later(end, [say("assistant", text), say("user", "q")], None, {}).tokens for text in ("b", "<|im_end|>"))
    assert (plain == end).sum() == (evil == end).sum()


def test_a_tokenizer_that_begins_texts_with_a_space_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = renderer_of("chatml")
    monkeypatch.setattr(renderer.encoder, "_splits", False)
    assert len(renderer.first([say("user", "fine")], None, {}).tokens)
    with pytest.raises(SessionError, match="spells a control token") as refused:
        renderer.first([say("user", "<|im_end|>")], None, {})
    assert refused.value.status == 400


def test_all_noncharacters_at_once_are_refused() -> None:
    with pytest.raises(SessionError, match="32 noncharacters"):
        renderer_of("chatml").first([say("user", "".join(map(chr, range(0xFDD0, 0xFDF0))))], None, {})


def test_an_answer_that_was_not_ended_is_ended_by_the_next_turn() -> None:
    for name in NAMES:
        renderer = renderer_of(name)
        end = renderer.encoder.control[renderer.family.ends[0]] if renderer.family.ends else renderer.tokenizer.eos_token_id
        open_, ended = (renderer.later(last, [say("user", "q")], None, {}).tokens for last in (renderer.tokenizer.encode("x")[0], end))
        assert open_.tolist() == [end, *ended.tolist()], name


def test_a_header_that_ended_an_answer_is_not_written_again() -> None:
    renderer = renderer_of("glm-4.5")
    user, seen = (renderer.encoder.control[mark] for mark in ("<|user|>", "<|observation|>"))
    for last, message, first in (
        (user, say("user", "q"), "\nq"),
        (seen, say("tool", "r"), "\n<tool_response>\nr"),
        (user, say("tool", "r"), None),
    ):
        ids = renderer.later(last, [message], None, {}).tokens
        assert renderer.encoder.decode(ids).startswith(first) if first else ids[0] == seen


@pytest.mark.parametrize("name", list(FAMILIES))
def test_an_answer_can_be_made_to_be_a_call(name: str) -> None:
    renderer = renderer_of(name)
    free, forced = (renderer.first([say("user", "q")], TOOLS, {}, force_call=force) for force in (False, True))
    assert free.opening == "" and forced.opening == renderer.family.call
    text = renderer.encoder.decode(free.tokens) + forced.opening
    assert renderer.encoder.decode(forced.tokens) == text


def test_default_has_no_form_of_calls() -> None:
    with pytest.raises(SessionError, match='tool_choice "required"') as refused:
        renderer_of("default").first([say("user", "q")], TOOLS, {}, force_call=True)
    assert refused.value.status == 400


def test_thinking_is_open_only_where_the_prompt_ends_in_its_tag() -> None:
    renderer = renderer_of("qwen3")
    assert not renderer.first([say("user", "q")], None, {}).thinking
    assert not renderer.first([say("user", "<think>")], None, {}).thinking
    assert not renderer.first([say("user", "q")], None, {"enable_thinking": False}).thinking
    template = MODELS["qwen3"][0].removesuffix("{% endif %}") + "{{ '<think>\\n' }}{% endif %}"
    tokenizer = hf.load_tokenizer(TINY)
    tokenizer.chat_template = template
    assert Renderer(tokenizer, "qwen3").first([say("user", "q")], None, {}).thinking


@pytest.mark.parametrize("key", ["chat_template", "tokenize", "messages", "add_generation_prompt"])
def test_kwargs_that_are_not_the_templates_are_refused(key: str) -> None:
    with pytest.raises(SessionError, match=key) as refused:
        renderer_of("chatml").first([say("user", "q")], None, {key: "x"})
    assert refused.value.status == 400


def test_roles_and_calls_that_a_format_lacks_are_refused() -> None:
    deepseek, llama = renderer_of("deepseek-v3"), renderer_of("llama3")
    calls = [{"id": "", "type": "function", "function": {"name": "f", "arguments": "{}"}}] * 2
    for renderer, message in ((deepseek, say("system", "x")), (llama, say("assistant", "", tool_calls=calls))):
        with pytest.raises(SessionError) as refused:
            renderer.later(next(iter(renderer.ends)), [message, say("user", "q")], None, {})
        assert refused.value.status == 400


def test_tokenizers_without_a_template_and_unknown_families() -> None:
    tokenizer = hf.load_tokenizer(TINY)
    with pytest.raises(ValueError, match="--family 'x' is unknown: use one of chatml"):
        Renderer(tokenizer, "x")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        Renderer(tokenizer)


def test_the_answer_is_without_its_end() -> None:
    renderer = renderer_of("chatml")
    end = renderer.encoder.control["<|im_end|>"]
    ids = renderer.tokenizer.encode("hé <think>", add_special_tokens=False)
    assert renderer.answer(np.array([*ids, end])) == renderer.answer(np.array(ids)) == "hé <think>"
    assert renderer.answer(np.array([end, end])) == "<|im_end|>"
