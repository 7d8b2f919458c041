"""Counter-based noise: the definition in numpy. Drawing a token with it is part of the row routine, `kernels/logprob/ref.py`.

Legend: M rows.
"""

import numpy as np
import torch

_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter_M4: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC'11, section 3.3).

    uint32 words held in uint64 arrays: counter [M, 4] and a key of two words -> [M, 4].
    """
    c0, c1, c2, c3 = counter_M4.T.astype(np.uint64)
    for r in range(10):
        key0, key1 = (np.uint64((key[i] + r * _WEYL[i]) & 0xFFFFFFFF) for i in range(2))
        product0, product1 = _MULTIPLIER[0] * c0, _MULTIPLIER[1] * c2
        c0, c1, c2, c3 = (product1 >> _SHIFT) ^ c1 ^ key0, product1 & _MASK, (product0 >> _SHIFT) ^ c3 ^ key1, product0 & _MASK
    return np.stack([c0, c1, c2, c3], axis=1)


def uniform(seed: int, group_M: torch.Tensor, sample_M: torch.Tensor, position_M: torch.Tensor) -> torch.Tensor:
    """float64 [M] in [0, 1): the top 53 bits of the first two words."""
    group, sample, position = (x.numpy().astype(np.uint64) for x in (group_M, sample_M, position_M))
    words = philox(np.stack([group & _MASK, group >> _SHIFT, sample & _MASK, position & _MASK], axis=1), (seed & 0xFFFFFFFF, seed >> 32))
    bits = (words[:, 0] >> np.uint64(5) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)
