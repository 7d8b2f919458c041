"""kernels/attention/triton.py: float64 reference, and the same bits however the work is cut.

Run: pytest tests/kernels/interpreted/test_attention.py
"""

import pytest
import torch
from conftest import DTYPES, EPSILON, assert_near, assert_same_bits

from kernels.attention import ref
from kernels.attention.triton import PAGE, paged_attention, write_kv

HEADS = [(3, 1, 16), (4, 2, 48), (9, 3, 64), (2, 2, 32), (2, 1, 144)]  # query heads, key/value heads, head dim
LENGTHS = [1, 63, 7, 64, 66]
MANY = (70, 1, 16)  # more heads in a group than a program has rows


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def qkv(tokens: int, heads: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(tokens, count, heads[2]).to(dtype) for count in (heads[0], heads[1], heads[1])]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention with the whole score matrix in float64, one sequence after another: (output, log-sum-exp)."""
    out, lse, group = [], [], q.shape[1] // k.shape[1]
    for q_s, k_s, v_s in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        k_s, v_s = (x.repeat_interleave(group, 1) for x in (k_s, v_s))
        score = torch.einsum("inh,jnh->nij", q_s, k_s) * scale
        score = score.masked_fill(torch.ones(score.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        out.append(torch.einsum("nij,jnh->inh", score.softmax(-1), v_s))
        lse.append(score.logsumexp(-1).t())
    return torch.cat(out), torch.cat(lse)


class Paged:
    """Sequences in a cache whose unwritten slots hold NaN, their pages in shuffled order."""

    def __init__(self, lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype):
        blocks = [-(-n // PAGE) for n in lengths]
        pages = sum(blocks) + 2
        self.cache_k = torch.full((pages, heads[1], heads[2], PAGE), torch.nan, dtype=dtype)
        self.cache_v = torch.full((pages, heads[1], PAGE, heads[2]), torch.nan, dtype=dtype)
        order = iter(torch.randperm(pages).tolist())
        self.table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
        for s, count in enumerate(blocks):
            self.table[s, :count] = int32(*(next(order) for _ in range(count)))

    def slots(self, s: int, start: int, stop: int) -> torch.Tensor:
        position = torch.arange(start, stop)
        return self.table[s].long()[position // PAGE] * PAGE + position % PAGE

    def write(self, s: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        write_kv(k.clone(), v.clone(), self.cache_k, self.cache_v, self.slots(s, start, start + len(k)))

    def attend(self, q: torch.Tensor, sequences: list[int], queries: list[int], contexts: list[int], scale: float):
        return paged_attention(q, self.cache_k, self.cache_v, self.table[sequences], starts(queries), int32(*contexts), scale)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole sequences one after another, as in training."""
    paged = Paged(lengths, (q.shape[1], *k.shape[1:]), q.dtype)
    write_kv(k, v, paged.cache_k, paged.cache_v, torch.cat([paged.slots(s, 0, n) for s, n in enumerate(lengths)]))
    return paged.attend(q, list(range(len(lengths))), lengths, lengths, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "lengths"), [*((heads, LENGTHS) for heads in HEADS), (MANY, [3, 6])])
def test_matches_float64(dtype, heads, lengths):
    scale = heads[2] ** -0.5
    inputs = qkv(sum(lengths), heads, dtype)
    out, lse = packed(*inputs, lengths, scale)
    expected_out, expected_lse = dense(*inputs, lengths, scale)
    assert out.dtype is dtype and lse.dtype is torch.float32
    # Two roundings to the dtype, of the weights and of the output, of values up to 4; the rest is float32.
    assert_near(out, expected_out, 5e-6 if dtype is torch.float32 else 2 * EPSILON[dtype] * 4)
    assert_near(lse, expected_lse, 5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "lengths", "sizes"),
    [((3, 1, 16), [67, 7, 20], (1, 3, 7, 16, 20)), ((4, 2, 48), [3, 66, 20], (7, 20)), (MANY, [2, 5, 1], (1, 3))],
)
def test_prefill_chunks_and_decode_give_the_same_bits(dtype, heads, lengths, sizes):
    """Every link of the chain: whole = in chunks = one by one, together with other sequences, over pages whose unwritten slots are NaN."""
    scale = heads[2] ** -0.5
    q, k, v = qkv(sum(lengths), heads, dtype)
    together = packed(q, k, v, lengths, scale)
    expected = list(zip(*(x.split(lengths) for x in together), strict=True))
    sequences = list(zip(*(x.split(lengths) for x in (q, k, v)), strict=True))
    for size in sizes:
        paged, got = Paged(lengths, heads, dtype), [[], [], []]
        for start in range(0, max(lengths), size):
            live = [s for s in range(3) if start < lengths[s]]
            stops = [min(start + size, lengths[s]) for s in live]
            spans, queries = list(zip(live, stops, strict=True)), [stop - start for stop in stops]
            rows_q, rows_k, rows_v = (torch.cat([sequences[s][i][start:stop] for s, stop in spans]) for i in range(3))
            write_kv(rows_k, rows_v, paged.cache_k, paged.cache_v, torch.cat([paged.slots(s, start, stop) for s, stop in spans]))
            result = paged.attend(rows_q, live, queries, stops, scale)
            for s, *o in zip(live, *(x.split(queries) for x in result), strict=True):
                got[s].append(o)
        for s in range(3):
            assert_same_bits(tuple(torch.cat(x) for x in zip(*got[s], strict=True)), expected[s], f"chunks of {size}, sequence {s}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_does_not_see_its_neighbours(dtype):
    """Alone, in another order, and with sequences that have no query at all between them."""
    heads, lengths = (6, 2, 32), [66, 3, 20]
    q, k, v = (x.split(lengths) for x in qkv(sum(lengths), heads, dtype))
    together = [x.split(lengths) for x in packed(*(torch.cat(x) for x in (q, k, v)), lengths, 0.2)]
    for s, n in enumerate(lengths):
        assert_same_bits(packed(q[s].clone(), k[s].clone(), v[s].clone(), [n], 0.2), tuple(x[s] for x in together))
    paged = Paged(lengths, heads, dtype)
    for s in range(3):
        paged.write(s, 0, k[s], v[s])
    order, queries = [1, 0, 0, 2, 1], [0, 0, 66, 20, 3]
    got = paged.attend(torch.cat([q[0], q[2], q[1]]), order, queries, [3, 66, 66, 20, 3], 0.2)
    assert_same_bits(got, tuple(torch.cat([x[0], x[2], x[1]]) for x in together))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_query_does_not_see_changes_nothing(dtype):
    """Later slots of its page and pages past its end hold infinity or NaN; and a result of -0 keeps its sign in no cut."""
    q, k, v = qkv(90, (2, 1, 16), dtype)
    v[:, :, 3] = -0.0
    short = packed(q[:70].clone(), k[:70].clone(), v[:70].clone(), [70], 0.25)
    for junk in (torch.inf, torch.nan):
        paged = Paged([200], (2, 1, 16), dtype)
        paged.write(0, 0, k, v)
        paged.write(0, 70, torch.full((130, 1, 16), junk, dtype=dtype), torch.full((130, 1, 16), junk, dtype=dtype))
        assert_same_bits(paged.attend(q[:70].clone(), [0], [70], [70], 0.25), short)
        assert_same_bits(paged.attend(q[:20].clone(), [0], [20], [20], 0.25), tuple(x[:20] for x in short))
    assert (short[0][:, :, 3] == 0).all() and not short[0][:, :, 3].signbit().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_writes_its_slots_and_no_other(dtype):
    k, v = torch.randn(2, 37, 3, 48).to(dtype)
    slots = torch.randperm(4 * PAGE)[:37]
    expected = [torch.zeros(4, 3, 48, PAGE, dtype=dtype), torch.zeros(4, 3, PAGE, 48, dtype=dtype)]
    ref.write_kv(k, v, *expected, slots)
    outside = torch.tensor([-1, 4 * PAGE, -PAGE, 2**40])
    everything = torch.cat([slots, outside])[torch.randperm(41)]
    source = torch.stack([torch.argwhere(slots == slot)[0, 0] if slot in slots else torch.tensor(0) for slot in everything])
    got = [torch.zeros_like(x) for x in expected]
    write_kv(k[source].clone(), v[source].clone(), *got, everything)
    assert_same_bits(tuple(got), tuple(expected))


@pytest.mark.filterwarnings("ignore:invalid value")  # what is computed before it is thrown away
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_and_pages_that_do_not_fit_give_nan(dtype):
    """And only in the sequence that has them."""
    q, k, v = qkv(10, (2, 1, 16), dtype)
    paged = Paged([10, 10], (2, 1, 16), dtype)
    for s in range(2):
        paged.write(s, 0, k, v)
    good = paged.attend(q[:5].clone(), [1], [5], [10], 0.25)
    good_page = int(paged.table[1, 0])
    for context, page in ((4, good_page), (65, good_page), (10, 9), (10, -1)):
        table = int32(page, good_page)[:, None]
        both = paged_attention(q, paged.cache_k, paged.cache_v, table, int32(0, 5, 10), int32(context, 10), 0.25)
        assert all(x[:5].isnan().all() for x in both), (context, page)
        second = paged_attention(q[5:].clone(), paged.cache_k, paged.cache_v, table[1:].clone(), int32(0, 5), int32(10), 0.25)
        assert_same_bits(tuple(x[5:] for x in both), second)
    beyond = paged_attention(q[:5].clone(), paged.cache_k, paged.cache_v, table[1:].clone(), int32(0, 9), int32(10), 0.25)
    assert all(x.isnan().all() for x in beyond) and not good[0].isnan().any()


def test_no_tokens_and_no_sequences():
    paged = Paged([1], (2, 1, 16), torch.float32)
    assert paged.attend(torch.empty(0, 2, 16), [0], [0], [1], 1.0)[0].shape == (0, 2, 16)
    paged.write(0, 0, torch.empty(0, 1, 16), torch.empty(0, 1, 16))


def test_what_is_not_supported_is_named():
    q, k, v = qkv(4, (2, 1, 16), torch.float32)
    paged = Paged([4], (2, 1, 16), torch.float32)
    arguments = (paged.table, int32(0, 4), int32(4), 1.0)
    with pytest.raises(ValueError, match="paged_attention: .* is not supported; supported: .*H a multiple of 16 up to 256"):
        paged_attention(torch.empty(4, 2, 24), torch.empty(1, 1, 24, PAGE), torch.empty(1, 1, PAGE, 24), *arguments)
    with pytest.raises(ValueError, match="all bfloat16 or all float32"):
        paged_attention(q.bfloat16(), paged.cache_k, paged.cache_v, *arguments)
    with pytest.raises(ValueError, match="N a multiple of K; int32"):
        paged_attention(q, paged.cache_k, paged.cache_v, paged.table.long(), *arguments[1:])
    with pytest.raises(ValueError, match="slots int64"):
        write_kv(k, v, paged.cache_k, paged.cache_v, int32(0, 1, 2, 3))
    with pytest.raises(ValueError, match="contiguous"):
        write_kv(k, v, paged.cache_k, paged.cache_v, torch.arange(8)[::2])
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        write_kv(k[1:], v[1:], paged.cache_k, paged.cache_v, torch.arange(4)[1:])


def test_shapes_are_known_without_running():
    meta = {"device": "meta", "dtype": torch.bfloat16}
    cache = torch.empty(3, 2, 32, PAGE, **meta), torch.empty(3, 2, PAGE, 32, **meta)
    lengths = [torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((2, 1), (3,), (2,))]
    out, lse = paged_attention(torch.empty(7, 4, 32, **meta), *cache, *lengths, 1.0)
    assert out.shape == (7, 4, 32) and out.dtype is torch.bfloat16 and lse.shape == (7, 4) and lse.dtype is torch.float32
