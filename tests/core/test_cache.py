"""The page pool: no page owned twice, none lost, and a prefix is only found under the version and tokens that made it.

    python -m pytest tests/core/test_cache.py
"""

import numpy as np
import pytest

from kernels.attention import PAGE
from miles_core.engine.cache import ROOT, Key, PagePool


def check(pool: PagePool, held: list[list[int]]) -> None:
    """Every page is free, idle or held; it is held as often as `held` lists it; the tree is closed under parents."""
    counts = np.bincount([page for pages in held for page in pages], minlength=pool.num_pages)
    assert counts.tolist() == pool.refs
    owners = [*pool.free, *pool.idle, *np.flatnonzero(counts).tolist()]
    assert sorted(owners) == list(range(pool.num_pages)), "a page is owned twice or lost"
    assert {key: page for page, keys in pool.keys.items() for key in keys} == pool.index
    by_parent = [Key(*place, tokens) for place, siblings in pool.children.items() for tokens in siblings]
    assert len(by_parent) == len(pool.index) and set(by_parent) == pool.index.keys()
    assert all(siblings and siblings == sorted(siblings) for siblings in pool.children.values())
    assert set(pool.idle) <= set(pool.keys) and not set(pool.free) & set(pool.keys)
    for key in pool.index:
        assert key.parent == ROOT or any(len(k.tokens) == 8 * PAGE for k in pool.keys.get(key.parent, [])), "a page without its parent"
    order = list(pool.idle)
    for page in order:
        for key in pool.keys[page]:
            assert key.parent not in pool.idle or order.index(page) < order.index(key.parent), "a parent would be evicted first"


def enter(pool: PagePool, version: int, tokens: np.ndarray, pages: list[int]) -> None:
    """Enter whole pages and the tail of a computed sequence, as the scheduler does."""
    parent = ROOT
    for i in range(-(-len(tokens) // PAGE)):
        part = tokens[i * PAGE : (i + 1) * PAGE]
        known = pool.insert(Key(version, parent, part.tobytes()), pages[i])
        if known != pages[i] and len(part) == PAGE:
            pool.share([known])
            pool.release([pages[i]])
            pages[i] = known
        parent = pages[i]


def test_random_operations_keep_every_invariant():
    rng = np.random.default_rng(0)
    pool, held, version, hits = PagePool(24), [], 0, 0
    for _ in range(4000):
        action = rng.random()
        if action < 0.5:
            # few distinct tokens and lengths, so that prefixes and whole prompts repeat
            tokens = np.repeat(rng.integers(0, 2, 4), PAGE)[: rng.choice([5, 40, PAGE, 70, 2 * PAGE, 3 * PAGE + 7])]
            match = pool.match(version, tokens)
            need = -(-len(tokens) // PAGE) - len(match.pages)
            assert len(match.pages) * PAGE + match.count < len(tokens)
            pool.share(match.pages)
            if pool.available < need:
                pool.release(match.pages)
                continue
            hits += len(match.pages)
            pages = match.pages + pool.allocate(need)
            enter(pool, version, tokens, pages)
            held.append(pages)
        elif action < 0.98 and held:
            pool.release(held.pop(rng.integers(len(held))))
        elif action >= 0.98:
            version += 1
            pool.forget()
            for pages in held:  # those in flight when the weights change never enter the tree again
                assert not set(pages) & set(pool.keys)
        check(pool, held)
    assert hits > 100
    for pages in held:
        pool.release(pages)
    check(pool, [])
    assert pool.available == pool.num_pages, "a page leaked"


def test_a_prefix_is_found_only_under_its_version_and_tokens():
    pool = PagePool(8)
    tokens = np.arange(2 * PAGE + 10)
    pages = pool.allocate(3)
    enter(pool, 3, tokens, pages)
    assert pool.match(3, tokens) == (pages[:2], pages[2], 9)
    assert pool.match(4, tokens) == pool.match(2, tokens) == ([], ROOT, 0)
    for changed, kept in ((0, 0), (PAGE, 1), (2 * PAGE, 2)):
        other = tokens.copy()
        other[changed] += 1
        assert pool.match(3, other) == (pages[:kept], ROOT, 0)
    shorter = tokens[:-1]
    assert pool.match(3, shorter) == (pages[:2], pages[2], 8), "as far as they agree"
    longer = np.concatenate([tokens, tokens])
    assert pool.match(3, longer) == (pages[:2], pages[2], 10), "the next turn goes on from the last token"
    forked = longer.copy()
    forked[PAGE + 5] = 999
    assert pool.match(3, forked) == (pages[:1], pages[1], 5), "a branch inside a whole page copies what it shares"


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 130])
def test_everything_but_the_last_token_of_a_known_prompt_is_found(length):
    pool, tokens = PagePool(4), np.arange(length)
    pages = pool.allocate(-(-length // PAGE))
    enter(pool, 0, tokens, pages)
    match = pool.match(0, tokens)
    assert len(match.pages) * PAGE + match.count == length - 1
    # with an answer behind it, the prompt is found to its last token
    match = pool.match(0, np.append(tokens, [7, 8]))
    assert len(match.pages) * PAGE + match.count == length


def test_idle_pages_are_given_out_oldest_first_and_children_before_parents():
    pool = PagePool(5)
    first, second = np.arange(2 * PAGE), np.arange(2 * PAGE) + 1000
    a, b = pool.allocate(2), pool.allocate(2)
    enter(pool, 0, first, a)
    enter(pool, 0, second, b)
    pool.release(a)
    pool.release(b)
    assert pool.match(0, first).pages == a[:1]
    pool.share(a[:1])  # used again: no longer the oldest
    pool.release(a[:1])
    assert pool.allocate(5) == [4, a[1], b[1], b[0], a[0]]
    assert not pool.index


def test_taking_more_than_there_is_and_giving_back_twice_are_caught():
    pool = PagePool(2)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 pages wanted, 0 available"):
        pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="not held"):
        pool.release(pages)


def test_of_many_prompts_with_a_common_beginning_each_finds_its_own():
    """As sessions that share a system prompt: any number of entries stand after one page, and the one that agrees longest is taken."""
    rng, pool = np.random.default_rng(1), PagePool(300)
    prompts = [np.append(np.arange(PAGE), rng.integers(0, 3, rng.integers(1, PAGE))) for _ in range(200)]
    for tokens in prompts:
        head = pool.match(0, tokens).pages
        pool.share(head)
        enter(pool, 0, tokens, head + pool.allocate(2 - len(head)))

    def common(a: np.ndarray, b: np.ndarray) -> int:
        return int(np.cumprod(a[: min(len(a), len(b))] == b[: min(len(a), len(b))]).sum())

    for tokens in prompts:
        asked = np.append(tokens, rng.integers(0, 3, 9))[: 2 * PAGE]
        match = pool.match(0, asked)
        assert len(match.pages) * PAGE + match.count == max(common(asked[:-1], known) for known in prompts) >= len(tokens) - 1
