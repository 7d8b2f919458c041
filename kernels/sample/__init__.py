"""Sampling that does not depend on the batch: noise is a function of (seed, group, sample, position), log-probs are the trainer's bits.

Legend: M rows, V vocabulary.
"""

from __future__ import annotations

import torch

from kernels.cpu.loader import load
from kernels.dispatch import dense, on_triton
from kernels.logprob import rows
from kernels.sample import ref


def uniform(seed: int, group_M: torch.Tensor, sample_M: torch.Tensor, position_M: torch.Tensor) -> torch.Tensor:
    """float64 [M] in [0, 1): Philox4x32-10 with key `seed` (64 bits) and counter (group low, group high, sample, position).

    int64 [M] each; sample and position below 2^32.
    """
    assert 0 <= seed < 1 << 64, seed
    if on_triton(group_M):
        from kernels.sample.triton import uniform as triton_uniform

        return triton_uniform(seed, *(dense(x) for x in (group_M, sample_M, position_M)))
    lib = load()
    if lib is None:
        return ref.uniform(seed, group_M, sample_M, position_M)
    for x in (group_M, sample_M, position_M):
        assert x.dtype is torch.int64 and x.shape == group_M.shape and x.is_contiguous(), (x.dtype, x.shape, group_M.shape)
    out_M = torch.empty(group_M.shape, dtype=torch.float64)
    lib.uniform(seed, group_M.data_ptr(), sample_M.data_ptr(), position_M.data_ptr(), out_M.data_ptr(), group_M.numel())
    return out_M


def sample(
    logits_MV: torch.Tensor,
    temperature_M: torch.Tensor,
    top_p_M: torch.Tensor,
    top_k_M: torch.Tensor,
    uniform_M: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token int64 [M], its log-prob float32 [M]) by inverse CDF over the kept set in vocabulary order.

    logits, temperature and top_p float32, top_k int64, uniform float64 in [0, 1). Temperature 0 takes the largest logit, the lowest id
    among equals. The log-prob is bit for bit that of `kernels.logprob`. No autograd.
    """
    token_M, logp_M, _ = rows(logits_MV, temperature_M, top_p_M, top_k_M, uniform_M=uniform_M)
    return token_M, logp_M
