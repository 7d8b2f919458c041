"""How the ids that a session keeps differ from a fresh rendering of its messages: drift, in classes (DESIGN 4.8).

Both are cut into segments at the tokens that build the conversation (`Renderer.marks`), and compared segment by segment.

Legend: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from miles_core.tito.render import Renderer

HARD = ("special_count", "special_type", "other_text")  # must be 0
SOFT = ("assistant_text", "retokenised")  # reported
_CONTEXT = 40  # characters shown around a difference


@dataclass(frozen=True)
class Drift:
    """Numbers of differences. `special_count`: marks too many or too few (then nothing else is counted). `special_type`: marks that are others.
    `other_text`, `assistant_text`: segments with another text. `retokenised`: segments of the same text in other tokens.
    `first`: the first difference, for people; a hard one if there is one.
    """

    special_count: int = 0
    special_type: int = 0
    other_text: int = 0
    assistant_text: int = 0
    retokenised: int = 0
    first: str = ""

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
    kept, fresh = _segments(renderer, kept_T), _segments(renderer, fresh_T)
    if len(kept) != len(fresh):
        pair = next((a, b) for a, b in zip_longest(kept, fresh) if a is None or b is None or not np.array_equal(kept_T[a], fresh_T[b]))
        return Drift(special_count=abs(len(kept) - len(fresh)), first=_show(renderer, kept_T, fresh_T, *pair))
    counts = dict.fromkeys((*HARD, *SOFT), 0)
    first: dict[str, str] = {}
    header, text = _assistant_header(renderer)
    for a, b in zip(kept, fresh, strict=True):
        kinds = []
        if a.start and kept_T[a.start - 1] != fresh_T[b.start - 1]:
            kinds.append("special_type")
        if not np.array_equal(kept_T[a], fresh_T[b]):
            said, says = renderer.encoder.decode(kept_T[a]), renderer.encoder.decode(fresh_T[b])
            opened = np.array_equal(kept_T[max(a.start - len(header), 0) : a.start], header) and said.startswith(text)
            kinds.append("retokenised" if said == says else "assistant_text" if opened or sampled_T[a].any() else "other_text")
        for kind in kinds:
            counts[kind] += 1
            first.setdefault(kind, _show(renderer, kept_T, fresh_T, a, b))
    return Drift(**counts, first=next((first[kind] for kind in (*HARD, *SOFT) if kind in first), ""))


def _segments(renderer: Renderer, ids_T: np.ndarray) -> list[slice]:
    """The stretches between marks; each but the first comes right after its mark."""
    at = np.flatnonzero(np.isin(ids_T, list(renderer.marks))).tolist()
    return [slice(start, stop) for start, stop in zip([0, *(i + 1 for i in at)], [*at, len(ids_T)], strict=True)]


def _assistant_header(renderer: Renderer) -> tuple[np.ndarray, str]:
    """What stands before an assistant's text: ids up to the last mark, and the text after it."""
    ids = renderer.generation_ids()
    last = max(np.flatnonzero(np.isin(ids, list(renderer.marks))).tolist(), default=-1) + 1
    return ids[:last], renderer.encoder.decode(ids[last:]).rstrip()


def _show(renderer: Renderer, kept_T: np.ndarray, fresh_T: np.ndarray, a: slice | None, b: slice | None) -> str:
    """Both texts from a little before the place where they part."""
    kept = renderer.encoder.decode(kept_T[max(a.start - 1, 0) : a.stop + 1]) if a else "(nothing)"
    fresh = renderer.encoder.decode(fresh_T[max(b.start - 1, 0) : b.stop + 1]) if b else "(nothing)"
    at = next((i for i, (x, y) in enumerate(zip(kept, fresh, strict=False)) if x != y), min(len(kept), len(fresh)))
    near = slice(max(at - _CONTEXT, 0), at + _CONTEXT)
    return f"kept {kept[near]!r}, a fresh rendering {fresh[near]!r}"
