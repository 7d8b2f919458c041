"""kernels.attention: float64 reference, gradients, the same bits however the work is cut. Run: pytest tests/kernels/test_attention.py"""

import pytest
import torch
from conftest import CHUNKS, doubles, gradients

import kernels.attention.packed as packed_module
from kernels.attention import PAGE, KVCache, allocate_cache, packed_attention, paged_attention, write_kv

HEADS = [(3, 1, 8), (4, 2, 24), (9, 3, 64), (2, 2, 40), (8, 1, 32), (2, 1, 136)]  # query heads, key/value heads, head dim
LENGTHS = [1, 63, 64, 65, 7, 200]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def qkv(tokens: int, heads: tuple[int, int, int]) -> list[torch.Tensor]:
    return [torch.randn(tokens, count, heads[2], requires_grad=True) for count in (heads[0], heads[1], heads[1])]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    """Softmax attention with the whole score matrix, one sequence after another."""
    out, group = [], q.shape[1] // k.shape[1]
    for q_s, k_s, v_s in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        k_s, v_s = (x.repeat_interleave(group, 1) for x in (k_s, v_s))
        score = torch.einsum("inh,jnh->nij", q_s, k_s) * scale
        future = torch.ones(score.shape[1:], dtype=torch.bool).triu(1)
        out.append(torch.einsum("nij,jnh->inh", score.masked_fill(future, -torch.inf).softmax(-1), v_s))
    return torch.cat(out)


class Paged:
    """Sequences in a cache whose unwritten slots hold NaN, their pages in shuffled order."""

    def __init__(self, lengths: list[int], heads: tuple[int, int, int]):
        blocks = [-(-n // PAGE) for n in lengths]
        cache = allocate_cache(1, sum(blocks) + 2, heads[1], heads[2])
        self.cache = KVCache(cache.k[0].fill_(torch.nan), cache.v[0].fill_(torch.nan))
        order = iter(torch.randperm(sum(blocks) + 2).tolist())
        self.table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for s, count in enumerate(blocks):
            self.table[s, :count] = int32(*(next(order) for _ in range(count)))

    def write(self, s: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        position = torch.arange(start, start + len(k))
        write_kv(k, v, *self.cache, self.table[s].long()[position // PAGE] * PAGE + position % PAGE)

    def attend(self, q: torch.Tensor, sequences: list[int], queries: list[int], contexts: list[int], scale: float) -> torch.Tensor:
        return paged_attention(q, *self.cache, self.table[sequences], starts(queries), int32(*contexts), scale)


@pytest.mark.parametrize("heads", HEADS)
def test_forward_and_gradients_match_float64(impl, heads):
    scale = heads[2] ** -0.5
    inputs = qkv(sum(LENGTHS), heads)
    wide = doubles(*inputs)
    reference = dense(*wide, LENGTHS, scale)
    out = packed_attention(*inputs, starts(LENGTHS), scale)
    torch.testing.assert_close(out.double(), reference, rtol=0, atol=3e-6)
    cotangent = torch.randn(out.shape)
    for grad, expected in zip(gradients(out, inputs, cotangent), gradients(reference, wide, cotangent), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=0, atol=3e-5)


def test_backward_in_chunks_of_queries(impl, monkeypatch):
    inputs = qkv(150, (4, 2, 16))
    whole = gradients(packed_attention(*inputs, int32(0, 150), 0.3), inputs, torch.ones(150, 4, 16))
    monkeypatch.setattr(packed_module, "CHUNK_SCORES", 150 * 4 * 16)
    for grad, expected in zip(gradients(packed_attention(*inputs, int32(0, 150), 0.3), inputs, torch.ones(150, 4, 16)), whole, strict=True):
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
@torch.no_grad()
def test_packed_prefill_chunks_and_decode_give_the_same_bits(impl, heads):
    """Every link of the chain, over pages whose unwritten slots are NaN. Sequences of one step are attended together."""
    lengths, scale = [65, 7, 130], heads[2] ** -0.5
    q, k, v = qkv(sum(lengths), heads)
    packed = packed_attention(q, k, v, starts(lengths), scale)
    expected = packed.split(lengths)
    sequences = list(zip(*(x.split(lengths) for x in (q, k, v)), strict=True))
    for size in (*CHUNKS, 130):
        paged, out = Paged(lengths, heads), [[], [], []]
        for start in range(0, max(lengths), size):
            live = [s for s in range(3) if start < lengths[s]]
            stops = [min(start + size, lengths[s]) for s in live]
            for s, stop in zip(live, stops, strict=True):
                paged.write(s, start, *(x[start:stop] for x in sequences[s][1:]))
            queries = [stop - start for stop in stops]
            rows = torch.cat([sequences[s][0][start:stop] for s, stop in zip(live, stops, strict=True)])
            for s, o in zip(live, paged.attend(rows, live, queries, stops, scale).split(queries), strict=True):
                out[s].append(o)
        for s in range(3):
            assert torch.equal(torch.cat(out[s]), expected[s]), (size, s)


@torch.no_grad()
def test_a_sequence_does_not_see_its_neighbours(impl):
    heads, lengths = (6, 2, 24), [100, 3, 64]
    inputs = qkv(sum(lengths), heads)
    together = packed_attention(*inputs, starts(lengths), 0.2).split(lengths)
    for alone, *sequence in zip(together, *(x.split(lengths) for x in inputs), strict=True):
        assert torch.equal(packed_attention(*sequence, int32(0, len(alone)), 0.2), alone)


@torch.no_grad()
def test_bits_do_not_depend_on_threads(two_threads):
    inputs = qkv(300, (6, 2, 32))
    one = packed_attention(*inputs, int32(0, 120, 300), 0.2)
    two_threads()
    assert torch.equal(packed_attention(*inputs, int32(0, 120, 300), 0.2), one)


@torch.no_grad()
def test_later_keys_change_nothing(impl):
    """A query's output is the same whatever stands at later positions, and those may even be infinite."""
    q, k, v = qkv(90, (2, 1, 16))
    short = packed_attention(q[:70], k[:70], v[:70], int32(0, 70), 0.25)
    paged = Paged([90], (2, 1, 16))
    paged.write(0, 0, k, v)
    paged.write(0, 70, torch.full((20, 1, 16), torch.inf), torch.full((20, 1, 16), torch.inf))
    assert torch.equal(paged.attend(q[:70], [0], [70], [70], 0.25), short)


@torch.no_grad()
def test_lengths_and_pages_that_do_not_fit_are_refused():
    q, k, v = qkv(4, (2, 1, 8))
    paged = Paged([70], (2, 1, 8))
    paged.write(0, 0, k, v)
    for context, table in ((3, paged.table), (129, paged.table), (4, int32(9, 0)[None]), (4, int32(-1, 0)[None])):
        with pytest.raises(AssertionError, match="do not fit"):
            paged_attention(q, *paged.cache, table, int32(0, 4), int32(context), 1.0)
    for bad_starts in (int32(1, 4), int32(0, 3), int32(0, 5)):
        with pytest.raises(AssertionError, match="do not fit"):
            paged_attention(q, *paged.cache, paged.table, bad_starts, int32(4), 1.0)
    with pytest.raises(AssertionError, match="outside the 4 pages"):
        write_kv(k, v, *paged.cache, torch.tensor([0, 1, 256, 2]))
    with pytest.raises(AssertionError, match="does not cut 4 tokens"):
        packed_attention(q, k, v, int32(0, 3), 1.0)


@torch.no_grad()
def test_no_tokens(impl):
    q, k, v = qkv(0, (2, 1, 8))
    assert packed_attention(q, k, v, int32(0, 0), 1.0).shape == (0, 2, 8)
