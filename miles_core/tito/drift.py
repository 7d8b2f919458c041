"""How the ids that a session keeps differ from a fresh rendering of its messages: drift, in classes (DESIGN 4.8).

Both are cut into segments at the tokens that build the conversation (`Renderer.marks`), and compared segment by segment. What a model
samples is its own: such a token in the middle of an answer is text of the assistant, and which of several tokens ends it is its choice.

Legend: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from miles_core.schema import DRIFTS

if TYPE_CHECKING:
    from miles_core.tito.render import Renderer

HARD, SOFT = DRIFTS[:3], DRIFTS[3:]  # must be 0; reported
_CONTEXT = 40  # characters shown around a difference


@dataclass(frozen=True)
class Drift:
    """Numbers of differences.

    `special_count`: marks too many or too few (then nothing else is counted). `special_type`: marks that are others. `other_text`:
    segments between them that differ. `assistant_text`: segments of the assistant with another text; `retokenised`: with the same text in
    other tokens, which a session that kept text would have lost. `refused`: 1 if the template does not take the messages. `first`: the
    first difference, for people; a hard one if there is one.
    """

    special_count: int = 0
    special_type: int = 0
    other_text: int = 0
    assistant_text: int = 0
    retokenised: int = 0
    refused: int = 0
    first: str = ""

    @property
    def counts(self) -> np.ndarray:
        """int32 [D], by class of DRIFTS."""
        return np.array([getattr(self, name) for name in DRIFTS], np.int32)

    @property
    def hard(self) -> int:
        return sum(getattr(self, name) for name in HARD)

    @property
    def soft(self) -> int:
        return sum(getattr(self, name) for name in SOFT)


def measure(renderer: Renderer, kept_T: np.ndarray, sampled_T: np.ndarray, fresh_T: np.ndarray) -> Drift:
    """Drift of `kept_T` int32 [T] from `fresh_T`. `sampled_T` bool [T]: which of the kept tokens the model made."""
    if np.array_equal(kept_T, fresh_T):
        return Drift()
    kept = _segments(_is_mark(renderer, kept_T) & ~_is_text(renderer, kept_T, sampled_T))
    fresh = _segments(_is_mark(renderer, fresh_T))
    if len(kept) != len(fresh):
        pair = next((a, b) for a, b in zip_longest(kept, fresh) if a is None or b is None or not np.array_equal(kept_T[a], fresh_T[b]))
        return Drift(special_count=abs(len(kept) - len(fresh)), first=_show(renderer, kept_T, fresh_T, *pair))
    counts = dict.fromkeys(DRIFTS, 0)
    first: dict[str, str] = {}
    header, text = _assistant_header(renderer)
    for a, b in zip(kept, fresh, strict=True):
        kinds = []
        if a.start and kept_T[a.start - 1] != fresh_T[b.start - 1]:
            kinds.append("assistant_text" if sampled_T[a.start - 1] else "special_type")
        if not np.array_equal(kept_T[a], fresh_T[b]):
            said, says = renderer.encoder.decode(kept_T[a]), renderer.encoder.decode(fresh_T[b])
            opened = len(header) > 0 and np.array_equal(kept_T[max(a.start - len(header), 0) : a.start], header)
            assistants = (opened and said.startswith(text)) or bool(sampled_T[a].any())
            kinds.append("other_text" if not assistants else "retokenised" if said == says else "assistant_text")
        for kind in kinds:
            counts[kind] += 1
            first.setdefault(kind, _show(renderer, kept_T, fresh_T, a, b))
    return Drift(**counts, first=next((first[kind] for kind in DRIFTS if kind in first), ""))


def _is_mark(renderer: Renderer, ids_T: np.ndarray) -> np.ndarray:
    """bool [T]"""
    return np.isin(ids_T, list(renderer.marks))


def _is_text(renderer: Renderer, ids_T: np.ndarray, sampled_T: np.ndarray) -> np.ndarray:
    """bool [T]: sampled, and not the end of an answer that the rendering took as such."""
    last_T = sampled_T & ~np.append(sampled_T[1:], False)
    taken_T = last_T & np.isin(ids_T, list(renderer.ends))
    if renderer.family.header_ends:  # another header follows if the answer ended with a wrong one
        taken_T &= ~np.append(_is_mark(renderer, ids_T)[1:], False)
    return sampled_T & ~taken_T


def _segments(mark_T: np.ndarray) -> list[slice]:
    """The stretches between marks; each but the first comes right after its mark."""
    at = np.flatnonzero(mark_T).tolist()
    return [slice(start, stop) for start, stop in zip([0, *(i + 1 for i in at)], [*at, len(mark_T)], strict=True)]


def _assistant_header(renderer: Renderer) -> tuple[np.ndarray, str]:
    """What stands before an assistant's text: ids up to the last mark, none if the format has no header; and the text after them."""
    ids = renderer.generation_ids()
    last = max(np.flatnonzero(_is_mark(renderer, ids)).tolist(), default=-1) + 1
    return ids[:last], renderer.encoder.decode(ids[last:]).rstrip()


def _show(renderer: Renderer, kept_T: np.ndarray, fresh_T: np.ndarray, a: slice | None, b: slice | None) -> str:
    """Both texts from a little before the place where they part."""
    kept = renderer.encoder.decode(kept_T[max(a.start - 1, 0) : a.stop + 1]) if a else "(nothing)"
    fresh = renderer.encoder.decode(fresh_T[max(b.start - 1, 0) : b.stop + 1]) if b else "(nothing)"
    at = next((i for i, (x, y) in enumerate(zip(kept, fresh, strict=False)) if x != y), min(len(kept), len(fresh)))
    near = slice(max(at - _CONTEXT, 0), at + _CONTEXT)
    return f"kept {kept[near]!r}, a fresh rendering {fresh[near]!r}"
