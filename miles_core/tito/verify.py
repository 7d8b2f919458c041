"""Does a session's rendering write what the model's chat template writes? Proves or refutes it, over every cut of a corpus.

    python -m miles_core.tito.verify --model DIR               is the template append-only as it is?
    python -m miles_core.tito.verify --model DIR --family F    does the rendering of family F write what the template writes?

Exit codes: 0 proven, 1 refuted (the first difference is printed, and which family would do), 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from miles_core.tito import drift
from miles_core.tito.corpus import CORPUS, Conversation
from miles_core.tito.errors import SessionError
from miles_core.tito.families import DEFAULT, FAMILIES, fingerprint
from miles_core.tito.render import Renderer

if TYPE_CHECKING:
    from miles_core.model.hf import Tokenizer


@dataclass
class Proof:
    """What was compared: "conversation, cut: difference".

    `hard`: classes that must be 0. `rewritten`: an assistant's earlier text that the template writes otherwise now. `retokenised`: it has
    the same text in other tokens, so that only a session that keeps tokens is right. `refused`: what template or family does not take.
    """

    cuts: int = 0
    hard: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    retokenised: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def holds(self, family: str) -> bool:
        """A family may keep what the template rewrites in the assistant's earlier turns; the template's own rendering may not rewrite."""
        return self.cuts > 0 and not self.hard and (family != DEFAULT or not self.rewritten)

    @property
    def first(self) -> str:
        return next(iter(self.hard + self.rewritten), "it takes none of the conversations")


def prove(renderer: Renderer, corpus: list[Conversation] = CORPUS) -> Proof:
    """Compare the prompts that sessions would keep with fresh renderings: sessions that start at some cut, and jumps to a later one."""
    proof = Proof()
    for conversation in corpus:
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        points = turns if conversation.messages[-1]["role"] == "assistant" else [*turns, len(conversation.messages)]
        for i, start in enumerate(points[:-1]):
            for steps in (points[i:], *([start, point] for point in points[i + 2 :])):
                try:
                    for point, kept, sampled in _session(renderer, conversation, steps):
                        _compare(renderer, conversation, point, kept, sampled, proof)
                except SessionError as error:
                    proof.refused.append(f"{conversation.name}: {error.message}")
    return proof


def _session(renderer: Renderer, conversation: Conversation, steps: list[int]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(point, prompt, which of its tokens were sampled) of a session that answers at these points as the template spells the answers."""
    messages, tools, kwargs = conversation.messages, conversation.tools, conversation.template_kwargs
    kept, sampled, done = np.zeros(0, np.int32), np.zeros(0, bool), 0
    for point in steps:
        new = messages[done:point]
        made = renderer.later(int(kept[-1]), new, tools, kwargs) if done else renderer.first(new, tools, kwargs)
        kept, sampled = np.append(kept, made.tokens), np.append(sampled, np.zeros(len(made.tokens), bool))
        yield point, kept, sampled
        if point < len(messages):
            answer = renderer.sampled(messages[: point + 1], tools, kwargs)
            if renderer.family.header_ends and point + 1 < len(messages) and messages[point + 1]["role"] == "tool":
                answer[-1] = renderer.encoder.control[renderer.family.ends[1]]  # it ends with the header of what comes next
            kept, sampled, done = np.append(kept, answer), np.append(sampled, np.ones(len(answer), bool)), point + 1


def _compare(renderer: Renderer, talk: Conversation, point: int, kept: np.ndarray, sampled: np.ndarray, proof: Proof) -> None:
    fresh = renderer.whole(talk.messages[:point], talk.tools, talk.template_kwargs, generate=True)
    found = drift.measure(renderer, kept, sampled, fresh)
    proof.cuts += 1
    if found.hard or found.soft:
        kind = proof.hard if found.hard else proof.rewritten if found.assistant_text else proof.retokenised
        kind.append(f"{talk.name}, before message {point}: {found.first}")


def renderer_for(tokenizer: Tokenizer, family: str = "auto", ends: tuple[int, ...] = ()) -> Renderer:
    """A renderer that is proven for this tokenizer. `auto`: the family of the template's fingerprint, else "default".

    ValueError, naming --family and the first difference, if none is.
    """
    names = dict.fromkeys((fingerprint(str(tokenizer.chat_template)), DEFAULT)) if family == "auto" else [family]
    failed = []
    for name in names:
        renderer = Renderer(tokenizer, name, ends)
        proof = prove(renderer)
        if proof.holds(name):
            return renderer
        failed.append(f"{name}: {proof.first}")
    others = proven_families(tokenizer)
    advice = f"use --family {others[0]}" if others else "no family known here renders this template; sessions need one that is append-only"
    raise ValueError(f"--family {family}: not what the chat template writes ({'; '.join(failed)}); {advice}")


def proven_families(tokenizer: Tokenizer) -> list[str]:
    """All families whose rendering is right for this tokenizer."""
    proven = []
    for name in (*FAMILIES, DEFAULT):
        try:
            renderer = Renderer(tokenizer, name)
        except ValueError:  # it lacks the family's tokens
            continue
        if prove(renderer).holds(name):
            proven.append(name)
    return proven


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, 1 or 2."""
    from miles_core.model import hf  # here: it loads torch

    parser = argparse.ArgumentParser(
        prog="python -m miles_core.tito.verify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--family", default=DEFAULT, help=f"one of {', '.join((*FAMILIES, DEFAULT))}")
    args = parser.parse_args(arguments)
    try:
        tokenizer = hf.load_tokenizer(args.model)
        renderer = Renderer(tokenizer, args.family)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    proof = prove(renderer)
    what = "the template is append-only" if args.family == DEFAULT else f"family {args.family} writes what the template writes"
    for label, lines in (("refused", proof.refused), ("rewritten", proof.rewritten), ("retoken'd", proof.retokenised)):
        for line in dict.fromkeys(lines):
            print(f"{label:10}{line}")
    if proof.holds(args.family):
        print(f"proven    {what}: {proof.cuts} cuts of {len(CORPUS)} conversations")
        return 0
    print(f"refuted   {what}: {len(proof.hard)} hard differences and {len(proof.rewritten)} rewritten turns in {proof.cuts} cuts")
    print(f"first     {proof.first}")
    print(f"fixed by  {' or '.join(f'--family {name}' for name in proven_families(tokenizer)) or 'no family known here'}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
