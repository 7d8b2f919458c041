"""How a layer attends: the one thing in which rollout and training differ. Both run the same attention routine on the same page grid.

Legend: T packed tokens, S sequences, B pages of a sequence, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention import KVCache, packed_attention, paged_attention, write_kv


@dataclass(frozen=True)
class PackedAttend:
    """Training: whole sequences packed one after another, differentiable. `cu_seqlens_S1` int32."""

    cu_seqlens_S1: torch.Tensor
    scale: float

    def __call__(self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        return packed_attention(q_TNH, k_TKH, v_TKH, self.cu_seqlens_S1, self.scale)


@dataclass(frozen=True)
class PagedAttend:
    """Rollout: new keys and values go into the paged cache at `slots_T` (int64), and queries read their sequence's pages.

    The queries of sequence s are the last cu_seqlens_q[s + 1] - cu_seqlens_q[s] of its context_lens[s] positions (both int32).
    """

    cache: KVCache
    block_table_SB: torch.Tensor
    cu_seqlens_q_S1: torch.Tensor
    context_lens_S: torch.Tensor
    slots_T: torch.Tensor
    scale: float

    def __call__(self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        cache_k, cache_v = self.cache.k[layer], self.cache.v[layer]
        write_kv(k_TKH, v_TKH, cache_k, cache_v, self.slots_T)
        return paged_attention(q_TNH, cache_k, cache_v, self.block_table_SB, self.cu_seqlens_q_S1, self.context_lens_S, self.scale)
