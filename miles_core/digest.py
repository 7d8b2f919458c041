"""64-bit digests (XXH3) of memory, and a copy that takes the digest on its way: the second read comes from cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

BLOCK = 128 * 1024  # bytes; fits the L2 cache several times over


def digest(data: np.ndarray | memoryview) -> int:
    """Digest of the bytes as a signed 64-bit integer, so that it fits an int64 word of shared memory."""
    return signed(xxhash.xxh3_64_intdigest(data))


def copy_and_digest(target: np.ndarray, source: np.ndarray) -> int:
    """Copy `source` to `target` (both uint8 [n]) and return the digest of what now stands in `target`."""
    assert target.shape == source.shape, (target.shape, source.shape)
    state = xxhash.xxh3_64()
    for start in range(0, len(source), BLOCK):
        block = target[start : start + BLOCK]
        block[:] = source[start : start + BLOCK]
        state.update(block)
    return signed(state.intdigest())


def file_digest(path: Path) -> int:
    """Digest of a file's bytes."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            state.update(block)
    return signed(state.intdigest())


def signed(value: int) -> int:
    """An unsigned 64-bit integer as a signed one."""
    return value - (1 << 64) if value >> 63 else value
