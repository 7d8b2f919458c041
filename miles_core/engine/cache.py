"""Pages of KV cache: who holds them, and the tree of token prefixes they can be found by. No tensors.

A page is PAGE token positions of every layer. It is free, or held by `refs[page]` sequences, or idle: held by none but kept for its
content, until its space is needed (least recently used first).

The prefix tree. A full page is known by (version, page before it, its tokens), so that walking a prompt page by page finds the longest
prefix computed under the same weights. A sequence that holds a page holds all pages before it, and gives them back last first; so an
idle page's successors are idle and go before it, and evicting in order never leaves a page without its parent.

A prompt that ends inside a page gets one more entry, its *tail*: the same key with fewer tokens; and so does a sequence that leaves.
Whoever agrees with an entry in its first tokens copies these positions into a page of its own. Thus n samples of one prompt share its
prefill at any length, and the next turn of a conversation goes on from the last token of the one before.

Departs from nano-vllm's BlockManager: exact keys instead of hashes, the version in the key, tails, eviction in order of last use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from kernels.attention import PAGE

ROOT = -1  # stands for the page before the first


class Key(NamedTuple):
    version: int
    parent: int  # page number, or ROOT
    tokens: bytes


class Match(NamedTuple):
    """The cached prefix of a sequence: whole `pages` to share, then `count` (< PAGE) positions of page `source` to copy."""

    pages: list[int]
    source: int
    count: int


class PagePool:
    """`num_pages` pages, their holders and the prefix tree."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.free = list(range(num_pages))[::-1]
        self.idle: dict[int, None] = {}  # insertion order = order of last use
        self.index: dict[Key, int] = {}
        self.keys: dict[int, list[Key]] = {}
        self.children: dict[tuple[int, int], list[bytes]] = {}  # (version, parent) -> the tokens of its keys, sorted

    @property
    def available(self) -> int:
        """Pages that `allocate` can give out now."""
        return len(self.free) + len(self.idle)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each held once; their content is whatever it was."""
        assert count <= self.available, f"{count} pages wanted, {self.available} available"
        pages = [self.free.pop() if self.free else self._evict() for _ in range(count)]
        for page in pages:
            assert self.refs[page] == 0, f"page {page} is held"
            self.refs[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Hold each page once more."""
        for page in pages:
            if self.refs[page] == 0:
                del self.idle[page]
            self.refs[page] += 1

    def release(self, pages: list[int]) -> None:
        """Hold each page once less. Pages of a sequence come in order of position; the last goes first (see above)."""
        for page in reversed(pages):
            assert self.refs[page] > 0, f"page {page} is not held"
            self.refs[page] -= 1
            if self.refs[page] == 0:
                if page in self.keys:
                    self.idle[page] = None
                else:
                    self.free.append(page)

    def _evict(self) -> int:
        page = next(iter(self.idle))
        del self.idle[page]
        for key in self.keys.pop(page):
            del self.index[key]
            siblings = self.children[key.version, key.parent]
            del siblings[bisect_left(siblings, key.tokens)]
            if not siblings:
                del self.children[key.version, key.parent]
        return page

    def insert(self, key: Key, page: int) -> int:
        """Enter a held page under `key`, unless another page stands there. Returns the page that does."""
        assert self.refs[page] > 0, f"page {page} is not held"
        known = self.index.setdefault(key, page)
        if known == page and key not in self.keys.setdefault(page, []):
            self.keys[page].append(key)
            insort(self.children.setdefault((key.version, key.parent), []), key.tokens)
        return known

    def match(self, version: int, tokens: np.ndarray) -> Match:
        """Longest cached prefix of `tokens` (int64) under `version`, without the last token: its logits are wanted, so it is computed."""
        pages: list[int] = []
        parent, last = ROOT, len(tokens) - 1
        for start in range(0, last - PAGE + 1, PAGE):
            page = self.index.get(Key(version, parent, tokens[start : start + PAGE].tobytes()))
            if page is None:
                break
            pages.append(page)
            parent = page
        best = Match(pages, ROOT, 0)
        wanted, siblings = tokens[len(pages) * PAGE : last][:PAGE], self.children.get((version, parent), [])
        at = bisect_left(siblings, wanted.tobytes())
        for known in siblings[max(at - 1, 0) : at + 1]:  # nothing that is sorted has more of its beginning than its neighbours
            count = _agreement(np.frombuffer(known, np.int64), wanted)
            if count > best.count:
                best = Match(pages, self.index[Key(version, parent, known)], count)
        return best

    def forget(self) -> None:
        """Empty the tree: the weights changed, so no page can be asked for again."""
        self.free.extend(self.idle)
        self.idle.clear()
        self.index.clear()
        self.keys.clear()
        self.children.clear()


def _agreement(a: np.ndarray, b: np.ndarray) -> int:
    """How many of their first elements are equal."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
