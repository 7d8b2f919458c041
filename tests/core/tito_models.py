"""For tests of sessions: small tokenizers with the families' chat formats, and a model that says what it is told to.

The templates are written here after the formats of the models named; they are not the models' own files.

Legend: T tokens of a prompt, M sampled tokens.
"""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from miles_core.engine.sequence import Rows, SamplingParams
from miles_core.model import hf
from miles_core.tito.backend import Piece, TurnRequest, TurnResult

_TOOLS = "{{ '<tools>' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '\\n</tools>' }}"

_IM_HEAD = (
    "{% if messages[0].role == 'system' %}{% set lead = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set lead = LEAD %}{% set rest = messages %}{% endif %}"
    "{% if tools %}{{ '<|im_start|>system\\n' + lead + '\\n\\n' }}" + _TOOLS + "{{ '<|im_end|>\\n' }}"
    "{% elif lead %}{{ '<|im_start|>system\\n' + lead + '<|im_end|>\\n' }}{% endif %}"
)
_IM_TOOL = (
    "{% elif m.role == 'tool' %}{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_IM_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}"
)
QWEN25 = (
    _IM_HEAD.replace("LEAD", "'You help.'")
    + "{% for m in rest %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + m.content }}"
    + _IM_CALLS
    + _IM_TOOL
    + "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN3 = (
    _IM_HEAD.replace("LEAD", "''") + "{% set ns = namespace(asked=-1) %}"
    "{% for m in rest %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.asked and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}"
    + _IM_CALLS
    + _IM_TOOL
    + "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
    + _TOOLS
    + "{{ '<|eot_id|>' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}"
    "{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{ '"
    '{"name": "\' + f.name + \'", "parameters": \' + (f.arguments | tojson) + \'}<|eot_id|>\' }}'
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% if tools %}" + _TOOLS + "{% endif %}{% set talk = messages | rejectattr('role', 'equalto', 'system') | list %}{% for m in talk %}"
    "{% set after_tool = not loop.first and loop.previtem.role == 'tool' %}"
    "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}{% if not after_tool %}{{ '<｜Assistant｜>' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}"
    "{{ c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}"
    "{% if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ '\\n' if after_tool else '<｜tool▁outputs▁begin｜>' }}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and talk[-1].role != 'tool' %}{{ '<｜Assistant｜>' }}{% endif %}"
)
GLM = (
    "{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\\n' }}" + _TOOLS + "{% endif %}{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% set slow = enable_thinking is defined and not enable_thinking %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\\n<think>' }}"
    "{{ ((m.reasoning_content or '') if loop.index0 > ns.asked else '') + '</think>' }}"
    "{% if m.content | trim %}{{ '\\n' + m.content | trim }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name }}"
    "{% for k, v in c.function.arguments | items %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    "{{ v if v is string else v | tojson }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}"
    "{% else %}{{ '<|' + m.role + '|>\\n' + m.content + ('/nothink' if slow and m.role == 'user' else '') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% if slow %}{{ '\\n<think></think>' }}{% endif %}{% endif %}"
)
# Of nobody's family: one that appends, and one that counts its messages at the top.
PLAIN = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% else %}{{ '[' + m.role + '] ' + m.content + ' [/' + m.role + ']' }}{% endif %}{% endfor %}"
)
COUNTING = "{{ '<s>' + (messages | length | string) }}" + PLAIN.removeprefix("{{ '<s>' }}")

_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_DEEPSEEK_TAGS = [f"<｜tool▁{x}｜>" for x in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end")]
_DEEPSEEK_TAGS += ["<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜User｜>", "<｜Assistant｜>"]
_LLAMA_MARKS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"]
# family: (template, eos, further special tokens, added tokens that are not special)
MODELS = {
    "chatml": (QWEN25, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"], _TAGS),
    "qwen3": (QWEN3, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"], _TAGS),
    "llama3": (LLAMA3, "<|eot_id|>", _LLAMA_MARKS, []),
    "deepseek-v3": (DEEPSEEK, "<｜end▁of▁sentence｜>", ["<｜begin▁of▁sentence｜>"], _DEEPSEEK_TAGS),
    "glm-4.5": (
        GLM, "<|endoftext|>", ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"], [*_TAGS, "<arg_key>"],
    ),
    "default": (PLAIN, "</s>", ["<s>"], []),
    "counting": (COUNTING, "</s>", ["<s>"], []),
}  # fmt: skip


@functools.cache
def model_dir(name: str) -> Path:
    """A directory with the tokenizer of this name: byte-level BPE with a few merges, and the template."""
    template, eos, special, tags = MODELS[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["the assistant and the user look at the roof, system tool_response\n\n " * 3, "What is 12 + 34? <tool> think {}\n" * 3]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (eos, *special)])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    directory = Path(tempfile.mkdtemp(prefix=f"tito-{name}-"))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "clean_up_tokenization_spaces": False}))
    return directory


@functools.cache
def tokenizer_of(name: str) -> hf.Tokenizer:
    return hf.load_tokenizer(model_dir(name))


def sampling(max_new_tokens: int = 64, **other: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": (), "max_new_tokens": max_new_tokens, **other})


class FakeTurn:
    """A turn whose tokens are known; one piece for each token. `gate`: nothing is sampled before it is set."""

    def __init__(self, request: TurnRequest, tokens: list[int], finish: str, version: int, gate: asyncio.Event | None) -> None:
        self.request, self.tokens, self.finish, self.version, self.gate = request, tokens, finish, version, gate
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for token in self.tokens:
            await self._step()
            yield Piece([token], [-0.5], [[]])

    async def result(self) -> TurnResult:
        await self._step()
        n, rng = len(self.tokens), np.random.default_rng(len(self.request.tokens))
        versions = np.sort(rng.integers(self.version, self.version + 3, n))
        logp = -rng.random(n).astype(np.float32)
        known = self.request.routes.version_R if self.request.routes else ()
        new = len(self.request.tokens) + n - 1 - len(known)
        routes = Rows(torch.from_numpy(rng.integers(0, 256, (new, 2, 1), np.uint8)), np.full(new, self.version, np.int32))
        self.made = TurnResult(np.array(self.tokens, np.int32), logp, versions.astype(np.int32), self.finish, 0, routes)
        return self.made

    async def _step(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        if self.cancelled:
            raise asyncio.CancelledError

    def cancel(self) -> None:
        self.cancelled = True


class FakeBackend:
    """The engine's side. `say(request)` -> (ids, finish) of the answer."""

    def __init__(self, say: Callable[[TurnRequest], tuple[list[int], str]], max_context: int = 1 << 20) -> None:
        self.say, self.max_context, self.gate = say, max_context, None
        self.turns: list[FakeTurn] = []

    def submit(self, request: TurnRequest) -> FakeTurn:
        tokens, finish = self.say(request)
        self.turns.append(FakeTurn(request, tokens[: request.params.max_new_tokens], finish, len(self.turns), self.gate))
        return self.turns[-1]

    @property
    def load(self) -> int:
        return 0
