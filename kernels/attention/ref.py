"""Causal attention over paged keys and values: the definition in torch.

Every query walks the pages of its sequence in order of position with an online softmax (Milakov and Gimelshein, arXiv 1805.02867,
algorithm 3), so its arithmetic depends on the keys at or before its own position only. All matrix products here have one fixed shape.

Legend: T query tokens, S sequences, B pages of a sequence, N query heads, K key/value heads, G = N / K, H head dim, P = 64 keys of a page.
"""

import torch
import torch.nn.functional as F

PAGE = 64  # keys of one page and of one softmax block
QUERIES = 16  # queries of one matrix product; fewer are padded, so that its shape is always the same


def write_kv(k_TKH: torch.Tensor, v_TKH: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Copy keys and values of T tokens to slots page * PAGE + offset of cache_k [pages, K, H, P] and cache_v [pages, K, P, H]."""
    page_T, offset_T = slots_T // PAGE, slots_T % PAGE
    cache_k[page_T, :, :, offset_T] = k_TKH
    cache_v[page_T, :, offset_T] = v_TKH


def paged_attention(
    q_TNH: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    block_table_SB: torch.Tensor,
    cu_seqlens_q_S1: torch.Tensor,
    context_lens_S: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> output [T, N, H] and log-sum-exp of the scaled scores [T, N]; arguments as in `kernels.attention.paged_attention`."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    out_TNH, lse_TN = torch.empty_like(q_TNH), q_TNH.new_empty(num_tokens, num_heads)
    starts, contexts = cu_seqlens_q_S1.tolist(), context_lens_S.tolist()
    for s, context in enumerate(contexts):
        for start in range(starts[s], starts[s + 1], QUERIES):
            stop = min(start + QUERIES, starts[s + 1])
            position = context - (starts[s + 1] - start)
            out, lse = _attend(q_TNH[start:stop] * scale, cache_k, cache_v, block_table_SB[s].tolist(), position)
            out_TNH[start:stop], lse_TN[start:stop] = out, lse
    return out_TNH, lse_TN


def _attend(
    q_QNH: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, pages: list[int], first_position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """At most QUERIES queries at consecutive positions of one sequence, over its pages."""
    num_queries, num_heads, head_dim = q_QNH.shape
    num_kv_heads = cache_k.shape[1]
    group = num_heads // num_kv_heads
    padded = F.pad(q_QNH, (0, 0, 0, 0, 0, QUERIES - num_queries))
    q_KRH = padded.view(QUERIES, num_kv_heads, group, head_dim).transpose(0, 1).reshape(num_kv_heads, QUERIES * group, head_dim)
    position_R1 = (first_position + torch.arange(QUERIES).clamp(max=num_queries - 1)).repeat_interleave(group)[:, None]
    last = first_position + num_queries - 1
    top = q_KRH.new_full((num_kv_heads, QUERIES * group, 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q_KRH)
    for block in range(last // PAGE + 1):
        key_P = block * PAGE + torch.arange(PAGE)
        visible = key_P <= position_R1
        score = torch.where(visible, torch.bmm(q_KRH, cache_k[pages[block]]), -torch.inf)
        new_top = torch.maximum(top, score.amax(-1, keepdim=True))
        alpha, weight = torch.exp(top - new_top), torch.exp(score - new_top)
        value = torch.where((key_P <= last)[:, None], cache_v[pages[block]], 0.0)  # 0 x NaN in a slot not yet written would poison
        total = total * alpha + weight.sum(-1, keepdim=True)
        out = out * alpha + torch.bmm(weight, value)
        top = new_top

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.view(num_kv_heads, QUERIES, group, -1).transpose(0, 1).reshape(QUERIES, num_heads, -1)[:num_queries]

    return rows(out / total), rows(top + torch.log(total)).squeeze(-1)
