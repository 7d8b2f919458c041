"""Attention of the training forward: whole sequences packed one after another, differentiable.

The forward copies keys and values into temporary pages and runs the paged routine. The backward recomputes the probabilities from
the saved log-sum-exp (FlashAttention-2, Dao, arXiv 2307.08691, algorithm 2) in plain torch, for a bounded number of queries at a time.

Legend: T packed tokens, S sequences, N query heads, K key/value heads, G = N / K, H head dim, Q queries of a chunk, J keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels.attention import ref
from kernels.cpu.loader import load
from kernels.dispatch import dense, fast, on_triton, uses_flash_attn

CHUNK = 128  # queries of one step of the backward: keys after the last of them are skipped
CHUNK_SCORES = 1 << 21  # and at most this many scores (8 MiB): more sequences at once than fit in the caches gain nothing


def packed_attention(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, cu_seqlens_S1: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention inside each sequence [cu_seqlens[s], cu_seqlens[s + 1]) -> [T, N, H]; the bits of `paged_attention`."""
    if fast():
        return _fast_attention(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale)
    if torch.is_grad_enabled() and (q_TNH.requires_grad or k_TKH.requires_grad or v_TKH.requires_grad):
        return _PackedAttention.apply(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale)
    return _forward(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale)[0]


def _fast_attention(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale):
    """By flash-attn (FlashAttention-2, Dao, arXiv 2307.08691), or by torch SDPA sequence by sequence; with the backward of either."""
    lengths = cu_seqlens_S1.diff().tolist()
    if uses_flash_attn(q_TNH.device, q_TNH.dtype, q_TNH.shape[-1]):
        from flash_attn import flash_attn_varlen_func

        same_every_time = torch.are_deterministic_algorithms_enabled()
        cut = (cu_seqlens_S1, cu_seqlens_S1, max(lengths), max(lengths))
        return flash_attn_varlen_func(q_TNH, k_TKH, v_TKH, *cut, softmax_scale=scale, causal=True, deterministic=same_every_time)
    out = []
    for sequence in zip(*(x_TNH.split(lengths) for x_TNH in (q_TNH, k_TKH, v_TKH)), strict=True):
        heads_first = (x_QNH.transpose(0, 1)[None] for x_QNH in sequence)
        out.append(F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


def _forward(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale):
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads = k_TKH.shape[1]
    assert k_TKH.shape == v_TKH.shape == (num_tokens, num_kv_heads, head_dim), (q_TNH.shape, k_TKH.shape, v_TKH.shape)
    if on_triton(q_TNH):
        from kernels.attention import triton as kernels

        return _forward_paged(kernels.write_kv, kernels.paged_attention, q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale)
    assert head_dim % 8 == 0 == num_heads % num_kv_heads, (q_TNH.shape, k_TKH.shape)
    assert q_TNH.dtype is torch.float32 is k_TKH.dtype is v_TKH.dtype and cu_seqlens_S1.dtype is torch.int32
    lib = load()
    if lib is None:
        return _forward_paged(ref.write_kv, ref.paged_attention, q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale)
    q_TNH, k_TKH, v_TKH, cu_seqlens_S1 = (x.contiguous() for x in (q_TNH, k_TKH, v_TKH, cu_seqlens_S1))
    out_TNH, lse_TN = torch.empty_like(q_TNH), torch.empty(num_tokens, num_heads)
    bad = lib.packed_attention(
        q_TNH.data_ptr(),
        k_TKH.data_ptr(),
        v_TKH.data_ptr(),
        cu_seqlens_S1.data_ptr(),
        scale,
        out_TNH.data_ptr(),
        lse_TN.data_ptr(),
        num_tokens,
        len(cu_seqlens_S1) - 1,
        num_heads,
        num_kv_heads,
        head_dim,
        torch.get_num_threads(),
    )
    assert bad < 0, f"cu_seqlens {cu_seqlens_S1.tolist()} does not cut {num_tokens} tokens into sequences"
    return out_TNH, lse_TN


def _forward_paged(write_kv, paged_attention, q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale):
    """By the routines of decode, over temporary pages, one sequence after another."""
    lengths_S = cu_seqlens_S1.diff()
    blocks_S = -(-lengths_S // ref.PAGE).long()
    first_S, num_pages = blocks_S.cumsum(0) - blocks_S, int(blocks_S.sum())
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_S), device=q_TNH.device), lengths_S)
    slots_T = first_S[sequence_T] * ref.PAGE + torch.arange(len(q_TNH), device=q_TNH.device) - cu_seqlens_S1[sequence_T]
    num_blocks = int(blocks_S.max()) if len(blocks_S) else 0
    table_SB = first_S[:, None] + torch.arange(num_blocks, device=q_TNH.device)
    num_kv_heads, head_dim = k_TKH.shape[1:]
    cache_k = q_TNH.new_zeros(num_pages, num_kv_heads, head_dim, ref.PAGE)
    cache_v = q_TNH.new_zeros(num_pages, num_kv_heads, ref.PAGE, head_dim)
    write_kv(dense(k_TKH), dense(v_TKH), cache_k, cache_v, slots_T)
    table_SB = table_SB.clamp(max=max(0, num_pages - 1)).int()  # columns past a sequence's own pages are not read
    return paged_attention(dense(q_TNH), cache_k, cache_v, table_SB, cu_seqlens_S1, lengths_S, scale)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale):
        out_TNH, lse_TN = _forward(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, out_TNH, lse_TN)
        ctx.cu_seqlens_S1, ctx.scale = cu_seqlens_S1, scale
        return out_TNH

    @staticmethod
    def backward(ctx, grad_TNH):
        dtype = grad_TNH.dtype
        q_TNH, k_TKH, v_TKH, out_TNH, lse_TN, grad_TNH = (x.float() for x in (*ctx.saved_tensors, grad_TNH))
        num_heads, num_kv_heads = q_TNH.shape[1], k_TKH.shape[1]
        delta_TN = (grad_TNH * out_TNH).sum(-1)
        grad_q, grad_k, grad_v = torch.zeros_like(q_TNH), torch.zeros_like(k_TKH), torch.zeros_like(v_TKH)
        for rows_SQ, keys_SJ, real_SQ in _chunks(ctx.cu_seqlens_S1, num_heads):
            # Rows past the end of a sequence repeat its last one with gradients of 0, and add 0 to everything.
            zero = ~real_SQ[..., None]
            rows = [x[rows_SQ] for x in (q_TNH, lse_TN, grad_TNH, delta_TN)]
            rows[2].masked_fill_(zero[..., None], 0.0), rows[3].masked_fill_(zero, 0.0)
            q, lse, grad, delta = (_by_kv_head(x.view(*rows_SQ.shape, num_heads, -1), num_kv_heads) for x in rows)
            chunk_q, chunk_k, chunk_v = _backward_chunk(
                q, grad, lse, delta, *(_by_kv_head(x[keys_SJ], num_kv_heads) for x in (k_TKH, v_TKH)), ctx.scale, rows_SQ.shape[1]
            )
            grad_q.index_add_(0, rows_SQ.flatten(), _by_token(chunk_q, rows_SQ.shape, num_kv_heads))
            grad_k.index_add_(0, keys_SJ.flatten(), _by_token(chunk_k, keys_SJ.shape, num_kv_heads))
            grad_v.index_add_(0, keys_SJ.flatten(), _by_token(chunk_v, keys_SJ.shape, num_kv_heads))
        return *(x.to(dtype) for x in (grad_q, grad_k, grad_v)), None, None


def _chunks(cu_seqlens_S1: torch.Tensor, num_heads: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Pieces of the backward: (tokens of the queries [S, Q], of the keys up to them [S, J], which of [S, Q] are real).

    The c-th CHUNK queries of several sequences at once, as many as CHUNK_SCORES allows, those of similar length together.
    """
    lengths_S, order_S = cu_seqlens_S1.diff().long().sort()
    begins_S = cu_seqlens_S1[:-1].long()[order_S]
    for start in range(0, int(lengths_S.max()) if len(lengths_S) else 0, CHUNK):
        last = len(lengths_S)
        while last > 0 and (longest := int(lengths_S[last - 1])) > start:
            stop = min(start + CHUNK, longest)
            first = max(last - max(1, CHUNK_SCORES // (num_heads * (stop - start) * stop)), int((lengths_S <= start).sum()))
            begin_S1, length_S1 = begins_S[first:last, None], lengths_S[first:last, None]
            positions_J = torch.arange(stop, device=begins_S.device)
            tokens_SJ = begin_S1 + positions_J.minimum(length_S1 - 1)
            yield tokens_SJ[:, start:], tokens_SJ, (positions_J < length_S1)[:, start:]
            last = first


def _by_kv_head(x_SQNH: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[S, Q, N, H] -> [S K, G Q, H]."""
    return x_SQNH.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(1, 2)


def _by_token(x: torch.Tensor, shape: torch.Size, num_kv_heads: int) -> torch.Tensor:
    """[S K, G Q, H] -> [S Q, N, H]: the way back."""
    return x.view(shape[0], num_kv_heads, -1, shape[1], x.shape[-1]).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)


def _backward_chunk(q_BIH, grad_BIH, lse_BI1, delta_BI1, k_BJH, v_BJH, scale, num_queries):
    """Gradients of the last Q of J positions, B = S K and I = G Q: (q [B, I, H], k [B, J, H], v [B, J, H])."""
    q_BIH = q_BIH * scale
    p_BIJ = torch.baddbmm(-lse_BI1, q_BIH, k_BJH.mT)
    future_QQ = torch.ones(num_queries, num_queries, dtype=torch.bool, device=p_BIJ.device).triu(1)
    p_BIJ.unflatten(1, (-1, num_queries))[..., -num_queries:].masked_fill_(future_QQ, -torch.inf)
    p_BIJ.exp_()
    grad_score_BIJ = torch.baddbmm(-delta_BI1, grad_BIH, v_BJH.mT).mul_(p_BIJ)
    grad_q_BIH = torch.bmm(grad_score_BIJ, k_BJH).mul_(scale)
    return grad_q_BIH, torch.bmm(grad_score_BIJ.mT, q_BIH), torch.bmm(p_BIJ.mT, grad_BIH)
