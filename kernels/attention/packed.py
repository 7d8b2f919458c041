"""Attention of the training forward: whole sequences packed one after another, differentiable.

The forward copies keys and values into temporary pages and runs the paged routine. The backward recomputes the probabilities from
the saved log-sum-exp (FlashAttention-2, Dao, arXiv 2307.08691, algorithm 2) in plain torch, for one sequence and a bounded number of
queries at a time.

Legend: T packed tokens, S sequences, N query heads, K key/value heads, G = N / K, H head dim, Q queries of a chunk, J keys.
"""

from __future__ import annotations

import torch

from kernels.attention import ref
from kernels.cpu.loader import load

CHUNK = 128  # queries of one step of the backward: keys after the last of them are skipped
CHUNK_SCORES = 1 << 23  # and at most this many scores: 32 MiB


def packed_attention(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, cu_seqlens_S1: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention inside each sequence [cu_seqlens[s], cu_seqlens[s + 1]) -> [T, N, H]; the bits of `paged_attention`."""
    if torch.is_grad_enabled() and (q_TNH.requires_grad or k_TKH.requires_grad or v_TKH.requires_grad):
        return _PackedAttention.apply(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale)
    return _forward(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale)[0]


def _forward(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale):
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads = k_TKH.shape[1]
    assert k_TKH.shape == v_TKH.shape == (num_tokens, num_kv_heads, head_dim), (q_TNH.shape, k_TKH.shape, v_TKH.shape)
    assert head_dim % 8 == 0 == num_heads % num_kv_heads, (q_TNH.shape, k_TKH.shape)
    assert q_TNH.dtype is torch.float32 is k_TKH.dtype is v_TKH.dtype and cu_seqlens_S1.dtype is torch.int32
    lib = load()
    if lib is None:
        return _forward_torch(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale)
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


def _forward_torch(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale):
    lengths = cu_seqlens_S1.diff().tolist()
    blocks = [-(-length // ref.PAGE) for length in lengths]
    table_SB, slots, first = torch.zeros(len(lengths), max(blocks, default=0), dtype=torch.int32), [], 0
    for s, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        table_SB[s, :count] = torch.arange(first, first + count)
        slots.append(first * ref.PAGE + torch.arange(length))
        first += count
    num_kv_heads, head_dim = k_TKH.shape[1:]
    cache_k = q_TNH.new_zeros(first, num_kv_heads, head_dim, ref.PAGE)
    cache_v = q_TNH.new_zeros(first, num_kv_heads, ref.PAGE, head_dim)
    ref.write_kv(k_TKH, v_TKH, cache_k, cache_v, torch.cat(slots))
    return ref.paged_attention(q_TNH, cache_k, cache_v, table_SB, cu_seqlens_S1, cu_seqlens_S1.diff(), scale)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale):
        out_TNH, lse_TN = _forward(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, out_TNH, lse_TN)
        ctx.cu_seqlens, ctx.scale = cu_seqlens_S1.tolist(), scale
        return out_TNH

    @staticmethod
    def backward(ctx, grad_TNH):
        q_TNH, k_TKH, v_TKH, out_TNH, lse_TN = ctx.saved_tensors
        num_heads, num_kv_heads = q_TNH.shape[1], k_TKH.shape[1]
        delta_TN = (grad_TNH * out_TNH).sum(-1)
        grad_q, grad_k, grad_v = torch.empty_like(q_TNH), torch.zeros_like(k_TKH), torch.zeros_like(v_TKH)
        for begin, end in zip(ctx.cu_seqlens, ctx.cu_seqlens[1:], strict=False):
            step = max(1, min(CHUNK, CHUNK_SCORES // (num_heads * max(1, end - begin))))
            for start in range(begin, end, step):
                rows, keys = slice(start, min(start + step, end)), slice(begin, min(start + step, end))
                chunk = _backward_chunk(
                    *(_by_kv_head(x[rows], num_kv_heads) for x in (q_TNH, grad_TNH, lse_TN[..., None], delta_TN[..., None])),
                    k_TKH[keys].transpose(0, 1),
                    v_TKH[keys].transpose(0, 1),
                    ctx.scale,
                )
                grad_q[rows] = chunk[0].flatten(0, 1).transpose(0, 1)
                grad_k[keys] += chunk[1].transpose(0, 1)
                grad_v[keys] += chunk[2].transpose(0, 1)
        return grad_q, grad_k, grad_v, None, None


def _by_kv_head(x_QNH: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[Q, N, H] -> [K, G, Q, H]."""
    return x_QNH.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


def _backward_chunk(q_KGQH, grad_KGQH, lse_KGQ1, delta_KGQ1, k_KJH, v_KJH, scale):
    """Gradients of the last Q of J positions: (q [K, G, Q, H], k [K, J, H], v [K, J, H])."""
    group, num_queries = q_KGQH.shape[1:3]
    q, grad, lse, delta = (x.flatten(1, 2) for x in (q_KGQH * scale, grad_KGQH, lse_KGQ1, delta_KGQ1))
    p = torch.baddbmm(-lse, q, k_KJH.mT)
    future_QQ = torch.ones(num_queries, num_queries, dtype=torch.bool).triu(1)
    p.unflatten(1, (group, num_queries))[..., -num_queries:].masked_fill_(future_QQ, -torch.inf)
    p.exp_()
    grad_score = torch.baddbmm(-delta, grad, v_KJH.mT).mul_(p)
    grad_q = torch.bmm(grad_score, k_KJH).mul_(scale)
    return grad_q.unflatten(1, (group, num_queries)), torch.bmm(grad_score.mT, q), torch.bmm(p.mT, grad)
