"""The noise of the sampler on the GPU: Philox4x32-10, bit for bit that of `kernels.sample.uniform`.

Drawing a token with it is part of the row routine, `kernels/logprob/triton.py`.

Legend: M rows.
"""

import torch
import triton
import triton.language as tl

from kernels.tiles import Spec, arch_of, check, tile


@triton.jit(do_not_specialize=["seed_low", "seed_high", "num_rows"])
def _uniform_kernel(group_ptr, sample_ptr, position_ptr, out_ptr, seed_low, seed_high, num_rows, BLOCK: tl.constexpr):
    """32-bit words in 64-bit integers: no product overflows, and a word's upper half is a shift away.

    Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11, section 3.3.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    group = tl.load(group_ptr + row, mask=mask, other=0).to(tl.uint64, bitcast=True)
    word = tl.full([BLOCK], 0xFFFFFFFF, tl.uint64)
    half = tl.full([BLOCK], 32, tl.uint64)
    c0, c1 = group & word, group >> half
    c2 = tl.load(sample_ptr + row, mask=mask, other=0).to(tl.uint64, bitcast=True) & word
    c3 = tl.load(position_ptr + row, mask=mask, other=0).to(tl.uint64, bitcast=True) & word
    key0 = tl.full([BLOCK], 0, tl.uint64) + (seed_low.to(tl.int64).to(tl.uint64, bitcast=True) & word)
    key1 = tl.full([BLOCK], 0, tl.uint64) + (seed_high.to(tl.int64).to(tl.uint64, bitcast=True) & word)
    for _ in tl.static_range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ key0, b & word, (a >> half) ^ c3 ^ key1, a & word
        key0, key1 = (key0 + 0x9E3779B9) & word, (key1 + 0xBB67AE85) & word
    bits = ((c0 >> 5) << 26) | (c1 >> 6)  # the top 53 bits of the first two words
    tl.store(out_ptr + row, bits.to(tl.float64) * (2.0**-53), mask=mask)


def uniform(seed: int, group_M: torch.Tensor, sample_M: torch.Tensor, position_M: torch.Tensor) -> torch.Tensor:
    """float64 [M] in [0, 1), a function of (seed, group, sample, position) alone. int64 [M] each; 0 <= seed < 2^64."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"uniform: seed {seed} is not supported; supported: 64 bits")
    low, high = seed & 0xFFFFFFFF, seed >> 32
    # The kernel's halves are int32 whatever the seed: an argument's type would follow its size, and make another variant.
    return _uniform(low - (low >> 31 << 32), high - (high >> 31 << 32), group_M, sample_M, position_M)


@torch.library.custom_op("miles_spmd::uniform", mutates_args=())
def _uniform(seed_low: int, seed_high: int, group_M: torch.Tensor, sample_M: torch.Tensor, position_M: torch.Tensor) -> torch.Tensor:
    counters = (group_M, sample_M, position_M)
    ok = all(x.dtype is torch.int64 and x.dim() == 1 and x.shape == group_M.shape for x in counters)
    check("uniform", *counters, ok=ok, supported="int64, three vectors of one length")
    out_M = torch.empty(group_M.shape, dtype=torch.float64, device=group_M.device)
    if len(group_M):
        t = tile("sample", torch.float32, 1, 1, arch_of(group_M))
        grid = (triton.cdiv(len(group_M), t.block_n),)
        _uniform_kernel[grid](*counters, out_M, seed_low, seed_high, len(group_M), BLOCK=t.block_n, num_warps=t.warps, num_stages=t.stages)
    return out_M


@_uniform.register_fake
def _(seed_low, seed_high, group_M, sample_M, position_M):
    return torch.empty(group_M.shape, dtype=torch.float64, device=group_M.device)


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """The one variant there is; the noise does not depend on the model's dtype."""
    t = tile("sample", torch.float32, 1, 1, arch)
    signature = {"group_ptr": "*i64", "sample_ptr": "*i64", "position_ptr": "*i64", "out_ptr": "*fp64"}
    signature |= {"seed_low": "i32", "seed_high": "i32", "num_rows": "i32", "BLOCK": "constexpr"}
    return [Spec("uniform", _uniform_kernel, signature, {"BLOCK": t.block_n}, t.warps, t.stages, dtype)]
