"""Causal attention on the GPU: one kernel for decode, chunked prefill and the packed forward of training.

The meaning is `kernels/attention/ref.py`; as there, pages of 64 keys lie at absolute positions and are walked in order with an online
softmax (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3). A program has a fixed number of query rows, which are the (token, head)
pairs of one sequence and one key/value head in order, so that the heads of a group read a page once. How rows are dealt to programs
follows from the lengths, and changes no bit: a page past a row's position multiplies what the row has by 1 and adds 0.

Legend: T query tokens, S sequences, B pages of a sequence, N query heads, K key/value heads, G = N / K, H head dim, W = H padded to a
power of two, R rows of a program, P keys of a page.
"""

import torch
import triton
import triton.language as tl

from kernels.attention.ref import PAGE
from kernels.tiles import DTYPES, Spec, arch_of, check, tile

_LOG2_E = 1.4426950408889634
_Constants = tuple[dict[str, int], int, int]  # of the kernel; warps; stages


@triton.jit(do_not_specialize=["num_tokens", "num_pages"])
def _write_kv_kernel(
    k_ptr, v_ptr, cache_k_ptr, cache_v_ptr, slots_ptr, num_tokens, num_pages,
    K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens of one head. A slot outside the cache is not written: better a page that parity finds stale than another's memory."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    h = tl.arange(0, W)
    real = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=real, other=-1)
    inside = real & (slot >= 0) & (slot < num_pages.to(tl.int64) * PAGE)
    mask = inside[:, None] & (h < H)[None, :]
    source = (token.to(tl.int64) * K + head)[:, None] * H + h[None, :]
    k = tl.load(k_ptr + source, mask=mask, other=0.0)
    v = tl.load(v_ptr + source, mask=mask, other=0.0)
    page, offset = ((slot // PAGE) * K + head) * H, slot % PAGE  # page is in rows of PAGE keys; slots are not negative where it is used
    tl.store(cache_k_ptr + (page[:, None] + h[None, :]) * PAGE + offset[:, None], k, mask=mask)
    tl.store(cache_v_ptr + page[:, None] * PAGE + offset[:, None] * H + h[None, :], v, mask=mask)


@triton.jit
def _find_sequence(block, cu_seqlens_ptr, num_sequences, G: tl.constexpr, BLOCK_R: tl.constexpr):
    """The sequence that owns this block of rows, and the block's first row in it.

    Sequence s owns the blocks from floor(cu_seqlens[s] * G / R) + s on. From there to the next one's first there is always room for
    its rows, and only the device has to know the lengths. The largest s whose first block is not past `block` is its owner.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(cu_seqlens_ptr + middle) * G // BLOCK_R + middle
        if first <= block:
            low = middle
        else:
            high = middle
    first = tl.load(cu_seqlens_ptr + low) * G // BLOCK_R + low
    return low, (block - first) * BLOCK_R


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "num_blocks", "num_pages"])
def _attention_kernel(
    q_ptr, cache_k_ptr, cache_v_ptr, table_ptr, cu_seqlens_ptr, contexts_ptr, out_ptr, lse_ptr,
    scale, num_tokens, num_sequences, num_blocks, num_pages,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = N // K
    s, row0 = _find_sequence(tl.program_id(0), cu_seqlens_ptr, num_sequences, G, BLOCK_R)
    kv_head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + s)
    num_queries = tl.load(cu_seqlens_ptr + s + 1) - start
    if row0 < num_queries * G:
        context = tl.load(contexts_ptr + s)
        first_position = context - num_queries
        # Lengths and pages that do not fit give NaN: nobody waits here to raise, and no other memory is read.
        fits = (first_position >= 0) & (context <= num_blocks * PAGE) & (start >= 0) & (start + num_queries <= num_tokens)
        row = row0 + tl.arange(0, BLOCK_R)
        real = (row < num_queries * G) & (start + row // G < num_tokens)
        token = tl.minimum(row // G, num_queries - 1)  # rows past the end repeat the last token's position
        position = first_position + token
        last = first_position + tl.minimum((row0 + BLOCK_R - 1) // G, num_queries - 1)
        output = (start + token).to(tl.int64) * N + kv_head * G + row % G
        h, key = tl.arange(0, W), tl.arange(0, PAGE)
        q = tl.load(q_ptr + output[:, None] * H + h[None, :], mask=(real & fits)[:, None] & (h < H)[None, :], other=0.0)
        top = tl.full([BLOCK_R], -float("inf"), tl.float32)
        total = tl.full([BLOCK_R], 0.0, tl.float32)
        out = tl.full([BLOCK_R, W], 0.0, tl.float32)
        for block in range(0, tl.where(fits, last // PAGE + 1, 0)):
            page = tl.load(table_ptr + s.to(tl.int64) * num_blocks + block)
            exists = (page >= 0) & (page < num_pages)
            fits = fits & exists
            base = (tl.where(exists, page, 0).to(tl.int64) * K + kv_head) * (H * PAGE)
            k = tl.load(cache_k_ptr + base + h[:, None] * PAGE + key[None, :], mask=(h < H)[:, None], other=0.0)
            score = tl.dot(q, k, input_precision="ieee") * scale
            seen = block * PAGE + key
            score = tl.where(seen[None, :] <= position[:, None], score, -float("inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            alpha = tl.exp2(top - new_top)
            weight = tl.exp2(score - new_top[:, None])
            total = total * alpha + tl.sum(weight, 1)
            # What stands past the last query's position may be anything, and 0 x NaN is NaN.
            value_mask = (seen <= last)[:, None] & (h < H)[None, :]
            v = tl.load(cache_v_ptr + base + key[:, None] * H + h[None, :], mask=value_mask, other=0.0)
            out = tl.dot(weight.to(v.dtype), v, out * alpha[:, None], input_precision="ieee")
            top = new_top
        nan = float("nan")
        total = tl.where(fits, total, 1.0)
        out = tl.where(fits, out / total[:, None] + 0.0, nan)  # + 0: a page that a row does not see may have turned its -0 into 0
        tl.store(out_ptr + output[:, None] * H + h[None, :], out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (h < H)[None, :])
        tl.store(lse_ptr + output, tl.where(fits, (top + tl.log2(total)) * 0.6931471805599453, nan), mask=real)


def _check_cache(op: str, kv_TKH: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> tuple[int, int, int]:
    """-> pages, key/value heads, head dim."""
    shape = tuple(cache_k.shape)
    ok = len(shape) == 4 and shape[3] == PAGE and tuple(cache_v.shape) == (shape[0], shape[1], PAGE, shape[2])
    ok = ok and kv_TKH.dim() == 3 and kv_TKH.shape[2] == shape[2] and shape[2] % 16 == 0 and 16 <= shape[2] <= 256
    ok = ok and kv_TKH.dtype in DTYPES and cache_k.dtype is cache_v.dtype is kv_TKH.dtype
    supported = f"tokens [T, heads, H], cache_k [pages, K, H, {PAGE}], cache_v [pages, K, {PAGE}, H], H a multiple of 16 up to 256, "
    check(op, kv_TKH, cache_k, cache_v, ok=ok, supported=supported + "all bfloat16 or all float32")
    return shape[0], shape[1], shape[2]


@torch.library.custom_op("miles_spmd::write_kv", mutates_args=("cache_k", "cache_v"))
def write_kv(k_TKH: torch.Tensor, v_TKH: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Store T keys and values in one layer's pages at `slots_T` int64 = page * PAGE + offset, all different. No autograd.

    A slot outside the cache is left out without a word, because checking would stop the GPU.
    """
    num_pages, num_kv_heads, head_dim = _check_cache("write_kv", k_TKH, cache_k, cache_v)
    ok = k_TKH.shape == v_TKH.shape and k_TKH.shape[1] == num_kv_heads and k_TKH.dtype is v_TKH.dtype
    ok = ok and slots_T.dtype is torch.int64 and slots_T.shape == k_TKH.shape[:1]
    check("write_kv", k_TKH, v_TKH, slots_T, cache_k, ok=ok, supported="k and v [T, K, H] like the cache, slots int64 [T]")
    if len(k_TKH):
        constants, warps, stages = _write_kv_constants(k_TKH.dtype, num_kv_heads, head_dim, arch_of(k_TKH))
        grid = (triton.cdiv(len(k_TKH), constants["BLOCK_T"]), num_kv_heads)
        arguments = (k_TKH, v_TKH, cache_k, cache_v, slots_T, len(k_TKH), num_pages)
        _write_kv_kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


@write_kv.register_fake
def _(k_TKH, v_TKH, cache_k, cache_v, slots_T):
    return None


@torch.library.custom_op("miles_spmd::paged_attention", mutates_args=())
def paged_attention(
    q_TNH: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    block_table_SB: torch.Tensor,
    cu_seqlens_q_S1: torch.Tensor,
    context_lens_S: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> output [T, N, H] and float32 log-sum-exp of the scaled scores [T, N]; arguments as in `kernels.attention.paged_attention`.

    Sequences whose lengths or pages do not fit come out as NaN, because checking would stop the GPU. Slots past the last query of a
    sequence are never read into a result; the keys and values of the queries of one call have to be finite. No autograd.
    """
    num_pages, num_kv_heads, head_dim = _check_cache("paged_attention", q_TNH, cache_k, cache_v)
    num_tokens, num_heads, _ = q_TNH.shape
    lengths = (block_table_SB, cu_seqlens_q_S1, context_lens_S)
    ok = block_table_SB.dim() == 2 and cu_seqlens_q_S1.dim() == context_lens_S.dim() == 1
    ok = ok and len(cu_seqlens_q_S1) - 1 == len(context_lens_S) == len(block_table_SB)
    ok = ok and num_heads % num_kv_heads == 0 and all(x.dtype is torch.int32 for x in lengths)
    supported = "N a multiple of K; int32 block_table [S, B], cu_seqlens_q [S + 1], context_lens [S]"
    check("paged_attention", q_TNH, cache_k, *lengths, ok=ok, supported=supported)
    out_TNH = torch.empty_like(q_TNH)
    lse_TN = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q_TNH.device)
    num_sequences, num_blocks = block_table_SB.shape
    if num_tokens and num_sequences:
        constants, warps, stages = _attention_constants(q_TNH.dtype, num_heads, num_kv_heads, head_dim, arch_of(q_TNH))
        # The blocks that `_find_sequence` deals out: the last sequence's first one, and room for its rows.
        grid = (num_tokens * (num_heads // num_kv_heads) // constants["BLOCK_R"] + num_sequences, num_kv_heads)
        tensors = (q_TNH, cache_k, cache_v, *lengths, out_TNH, lse_TN)
        numbers = (scale * _LOG2_E, num_tokens, num_sequences, num_blocks, num_pages)
        _attention_kernel[grid](*tensors, *numbers, **constants, num_warps=warps, num_stages=stages)
    return out_TNH, lse_TN


@paged_attention.register_fake
def _(q_TNH, cache_k, cache_v, block_table_SB, cu_seqlens_q_S1, context_lens_S, scale):
    return torch.empty_like(q_TNH), q_TNH.new_empty(q_TNH.shape[:2], dtype=torch.float32)


def _attention_constants(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, arch: str) -> _Constants:
    t = tile("attention", dtype, head_dim, PAGE, arch)
    shape = {"N": num_heads, "K": num_kv_heads, "H": head_dim, "W": t.block_k, "PAGE": PAGE, "BLOCK_R": t.block_m}
    return shape, t.warps, t.stages


def _write_kv_constants(dtype: torch.dtype, num_kv_heads: int, head_dim: int, arch: str) -> _Constants:
    t = tile("write_kv", dtype, 1, head_dim, arch)
    shape = {"K": num_kv_heads, "H": head_dim, "W": t.block_n, "PAGE": PAGE, "BLOCK_T": t.block_m}
    return shape, t.warps, t.stages


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """Variants for the head dims of common models, an odd one, and both ends of what is supported."""
    name, result = DTYPES[dtype], []
    for num_heads, num_kv_heads, head_dim in ((16, 8, 128), (14, 2, 64), (9, 3, 64), (6, 2, 96), (4, 4, 16), (8, 2, 256)):
        constants, warps, stages = _attention_constants(dtype, num_heads, num_kv_heads, head_dim, arch)
        signature = dict.fromkeys(("q_ptr", "cache_k_ptr", "cache_v_ptr"), f"*{name}")
        signature |= dict.fromkeys(("table_ptr", "cu_seqlens_ptr", "contexts_ptr"), "*i32") | {"out_ptr": f"*{name}", "lse_ptr": "*fp32"}
        signature |= {"scale": "fp32"} | dict.fromkeys(("num_tokens", "num_sequences", "num_blocks", "num_pages"), "i32")
        signature |= dict.fromkeys(constants, "constexpr")
        label = f"paged_attention {name} N={num_heads} K={num_kv_heads} H={head_dim}"
        result.append(Spec(label, _attention_kernel, signature, constants, warps, stages, dtype, dot=True))
    for num_kv_heads, head_dim in ((8, 128), (2, 96)):
        constants, warps, stages = _write_kv_constants(dtype, num_kv_heads, head_dim, arch)
        signature = dict.fromkeys(("k_ptr", "v_ptr", "cache_k_ptr", "cache_v_ptr"), f"*{name}") | {"slots_ptr": "*i64"}
        signature |= {"num_tokens": "i32", "num_pages": "i32"} | dict.fromkeys(constants, "constexpr")
        result.append(Spec(f"write_kv {name} K={num_kv_heads} H={head_dim}", _write_kv_kernel, signature, constants, warps, stages, dtype))
    return result
