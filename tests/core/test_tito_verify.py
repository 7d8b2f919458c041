"""Proofs of renderings: every family is proven for its own format, and what is not append-only is refuted.

python -m pytest tests/core/test_tito_verify.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tito_models import MODELS, model_dir, tokenizer_of

from miles_core.assets import TINY
from miles_core.model import hf
from miles_core.tito import verify
from miles_core.tito.families import FAMILIES, fingerprint
from miles_core.tito.render import Renderer


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_family_is_proven_for_its_format(family: str) -> None:
    assert fingerprint(MODELS[family][0]) == family
    proof = verify.prove(Renderer(tokenizer_of(family), family))
    assert proof.hard == [] and proof.cuts > 80, proof
    assert verify.renderer_for(tokenizer_of(family)).name == family


SPELLINGS = {
    # as DeepSeek-V3.1 differs from V3
    "no thinking": (
        "deepseek-v3",
        [
            ("{% if not after_tool %}{{ '<｜Assistant｜>' }}", "{% if not after_tool %}{{ '<｜Assistant｜></think>' }}"),
            ("role != 'tool' %}{{ '<｜Assistant｜>' }}", "role != 'tool' %}{{ '<｜Assistant｜></think>' }}"),
            ("'\\n' if after_tool else '<｜tool▁outputs▁begin｜>'", "''"),
            ("{{ '<｜tool▁outputs▁end｜>' }}", ""),
            ("function<｜tool▁sep｜>' + c.function.name", "' + c.function.name + '<｜tool▁sep｜>'"),
            ("+ '\\n```json\\n' }}", "}}"),
            (" + '\\n```<｜tool▁call▁end｜>'", " + '<｜tool▁call▁end｜>'"),
            ("loop.first else '\\n'", "loop.first else ''"),
        ],
    ),
    # as some templates of V3 do
    "header with the user's message": (
        "deepseek-v3",
        [
            ("'<｜User｜>' + m.content", "'<｜User｜>' + m.content + '<｜Assistant｜>'"),
            ("{% if not after_tool %}{{ '<｜Assistant｜>' }}{% endif %}", ""),
            ("and talk[-1].role != 'tool'", "and false"),
        ],
    ),
    # as GLM-4.7 differs from 4.5
    "no newlines": (
        "glm-4.5",
        [
            ("\\n", ""),
            ("'<|assistant|><think>' }}", "'<|assistant|></think>' }}"),
            ("((m.reasoning_content or '') if loop.index0 > ns.asked else '') + '</think>'", "''"),
            ("('/nothink' if slow and m.role == 'user' else '')", "''"),
            ("'<think></think>'", "'</think>'"),
        ],
    ),
    "results that are not quoted": ("llama3", [("(m.content | tojson)", "m.content")]),
    "results as turns of their own": (
        "chatml",
        [
            ("{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}", "{{ '<|im_start|>tool' }}"),
            ("'\\n<tool_response>\\n' + m.content + '\\n</tool_response>'", "'\\n' + m.content"),
            ("{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}", "{{ '<|im_end|>\\n' }}"),
        ],
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_family_adapts_to_the_spellings_of_its_models(spelling: str) -> None:
    family, changes = SPELLINGS[spelling]
    tokenizer = hf.load_tokenizer(model_dir(family))
    for old, new in changes:
        assert old in tokenizer.chat_template, old
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    proof = verify.prove(Renderer(tokenizer, family))
    assert proof.hard == [] and proof.cuts > 80, proof.first
    assert fingerprint(tokenizer.chat_template) == family
    unadapted = Renderer(tokenizer, family)
    unadapted.family = FAMILIES[family]
    if "user's message" not in spelling:
        assert verify.prove(unadapted).hard


def test_what_the_families_cannot_append_is_refused_and_nothing_else_is() -> None:
    refused = {family: set(verify.prove(Renderer(tokenizer_of(family), family)).refused) for family in FAMILIES}
    assert refused["chatml"] == refused["qwen3"] == refused["glm-4.5"] == set()
    assert {line.partition(":")[0] for line in refused["deepseek-v3"]} == {"system in the middle"}
    assert {line.partition(":")[0] for line in refused["llama3"]} == {"parallel calls"}


def test_a_template_that_drops_thinking_is_refuted_and_its_family_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["--model", str(model_dir("qwen3"))]) == 1
    said = capsys.readouterr().out
    assert "\nrefuted " in said and "\nfirst " in said and "<think>" in said.partition("\nfirst ")[2]
    assert "--family qwen3" in said.partition("\nfixed by ")[2]
    assert verify.main(["--model", str(model_dir("qwen3")), "--family", "qwen3"]) == 0
    assert "\nproven " in capsys.readouterr().out


@pytest.mark.parametrize("directory", [TINY, "chatml", "default"])
def test_templates_that_append_are_proven_as_they_are(directory: Path | str) -> None:
    assert verify.main(["--model", str(directory if isinstance(directory, Path) else model_dir(directory))]) == 0


def test_a_template_that_counts_its_messages_is_refuted_and_nobody_fixes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["--model", str(model_dir("counting"))]) == 1
    said = capsys.readouterr().out
    assert "fixed by  no family known here" in said
    with pytest.raises(ValueError, match="--family auto.*append-only"):
        verify.renderer_for(tokenizer_of("counting"))


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["--model", str(tmp_path)]) == 2
    assert verify.main(["--model", str(TINY), "--family", "chatmul"]) == 2
    assert "--family 'chatmul' is unknown: use one of chatml" in capsys.readouterr().err
    assert verify.main(["--model", str(TINY), "--family", "llama3"]) == 2
    assert "<|eot_id|>" in capsys.readouterr().err


def test_a_family_named_wrongly_is_refused_and_the_right_one_named() -> None:
    with pytest.raises(ValueError, match="--family default: .*use --family qwen3|--family default: .*use --family chatml"):
        verify.renderer_for(tokenizer_of("qwen3"), "default")


@pytest.mark.parametrize("mistake", ["\n", "<|im_end|>"])
def test_one_wrong_boundary_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(tokenizer_of("chatml"), "chatml")
    right = type(renderer.family).later
    monkeypatch.setattr(type(renderer.family), "later", lambda *a: mistake + right(*a))
    proof = verify.prove(renderer)
    assert proof.hard and not proof.holds("chatml")


def test_one_wrong_spelling_of_a_tool_result_is_found() -> None:
    renderer = Renderer(tokenizer_of("chatml"), "chatml")
    renderer.family = dataclasses.replace(renderer.family, tool_user=False)
    assert any("one call" in line for line in verify.prove(renderer).hard)


def test_the_embedded_policy_is_chatml() -> None:
    assert verify.renderer_for(hf.load_tokenizer(TINY)).name == "chatml"
