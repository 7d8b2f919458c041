"""Causal attention: one routine for decode, chunked prefill and the packed forward of training.

A query walks the 64-key pages of its sequence in order of position with an online softmax. Pages are aligned to absolute position, so
a query's bits depend on itself and on the keys up to its own position, never on how the work was cut.

Legend: T query tokens, S sequences, B pages of a sequence, L layers, N query heads, K key/value heads (N a multiple of K), H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.attention import ref
from kernels.attention.packed import packed_attention
from kernels.cpu.loader import load
from kernels.dispatch import dense, on_triton

PAGE = ref.PAGE

__all__ = ["PAGE", "KVCache", "allocate_cache", "packed_attention", "paged_attention", "write_kv"]


class KVCache(NamedTuple):
    """Pages: k [L, pages, K, H, PAGE] (keys transposed, so that scores stream along keys), v [L, pages, K, PAGE, H]."""

    k: torch.Tensor
    v: torch.Tensor


def allocate_cache(
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> KVCache:
    """Zeroed pages for all layers."""
    shape, where = (num_layers, num_pages, num_kv_heads), {"device": device, "dtype": dtype}
    return KVCache(torch.zeros(*shape, head_dim, PAGE, **where), torch.zeros(*shape, PAGE, head_dim, **where))


def write_kv(k_TKH: torch.Tensor, v_TKH: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Store T keys and values in one layer's pages (cache_k [pages, K, H, PAGE]) at `slots_T` int64 = page * PAGE + offset. No autograd."""
    if on_triton(k_TKH):
        from kernels.attention.triton import write_kv as triton_write_kv

        return triton_write_kv(dense(k_TKH), dense(v_TKH), cache_k, cache_v, dense(slots_T))
    lib = load()
    if lib is None:
        return ref.write_kv(k_TKH, v_TKH, cache_k, cache_v, slots_T)
    num_tokens, num_kv_heads, head_dim = k_TKH.shape
    num_pages = cache_k.shape[0]
    assert cache_v.shape == (num_pages, num_kv_heads, PAGE, head_dim) and cache_k.is_contiguous() and cache_v.is_contiguous(), cache_v.shape
    assert slots_T.dtype is torch.int64 and slots_T.shape == (num_tokens,), (slots_T.dtype, slots_T.shape)
    k_TKH, v_TKH, slots_T = k_TKH.contiguous(), v_TKH.contiguous(), slots_T.contiguous()
    bad = lib.write_kv(
        k_TKH.data_ptr(),
        v_TKH.data_ptr(),
        cache_k.data_ptr(),
        cache_v.data_ptr(),
        slots_T.data_ptr(),
        num_tokens,
        num_pages,
        num_kv_heads,
        head_dim,
    )
    assert bad < 0, f"token {bad}: slot {int(slots_T[bad])} is outside the {num_pages} pages"


def paged_attention(
    q_TNH: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    block_table_SB: torch.Tensor,
    cu_seqlens_q_S1: torch.Tensor,
    context_lens_S: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """-> [T, N, H]. The queries of sequence s are the last cu_seqlens_q[s + 1] - cu_seqlens_q[s] of its context_lens[s] positions.

    One layer's pages (already holding the keys of these queries); block_table [S, B] int32 lists each sequence's pages in order of
    position, cu_seqlens_q [S + 1] and context_lens [S] are int32; scores are multiplied by `scale`. Slots past the context are never
    read into a result. No autograd.
    """
    if on_triton(q_TNH):
        from kernels.attention.triton import paged_attention as triton_attention

        return triton_attention(dense(q_TNH), cache_k, cache_v, block_table_SB, cu_seqlens_q_S1, context_lens_S, scale)[0]
    lib = load()
    if lib is None:
        return ref.paged_attention(q_TNH, cache_k, cache_v, block_table_SB, cu_seqlens_q_S1, context_lens_S, scale)[0]
    num_pages, num_kv_heads = cache_k.shape[:2]
    num_tokens, num_heads, head_dim = q_TNH.shape
    assert cache_k.shape == (num_pages, num_kv_heads, head_dim, PAGE) and cache_v.shape == (num_pages, num_kv_heads, PAGE, head_dim)
    assert q_TNH.dtype is torch.float32 and head_dim % 8 == 0 == num_heads % num_kv_heads, (q_TNH.dtype, q_TNH.shape, num_kv_heads)
    num_sequences, num_blocks = block_table_SB.shape
    for x in (block_table_SB, cu_seqlens_q_S1, context_lens_S):
        assert x.dtype is torch.int32 and x.is_contiguous() and x.shape[0] - num_sequences in (0, 1), (x.dtype, x.shape)
    q_TNH = q_TNH.contiguous()
    out_TNH = torch.empty_like(q_TNH)
    bad = lib.paged_attention(
        q_TNH.data_ptr(),
        cache_k.data_ptr(),
        cache_v.data_ptr(),
        block_table_SB.data_ptr(),
        cu_seqlens_q_S1.data_ptr(),
        context_lens_S.data_ptr(),
        scale,
        out_TNH.data_ptr(),
        num_tokens,
        num_sequences,
        num_blocks,
        num_pages,
        num_heads,
        num_kv_heads,
        head_dim,
        torch.get_num_threads(),
    )
    assert bad < 0, f"sequence {bad}: lengths or pages that do not fit (context {int(context_lens_S[bad])}, table of {num_blocks} pages)"
    return out_TNH
