"""Digests notice every change, and the copy is what was digested. Run: python -m pytest tests/core/test_digest.py"""

from pathlib import Path

import numpy as np
import pytest
import xxhash

from miles_core.digest import BLOCK, copy_and_digest, digest, file_digest

SIZES = [0, 1, 7, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 12345]


@pytest.mark.parametrize("size", SIZES)
def test_block_by_block_equals_xxh3_of_the_whole_and_the_copy_is_exact(size: int, tmp_path: Path) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    target = np.full(size + 2, 0xAB, np.uint8)
    value = copy_and_digest(target[1:-1], source)
    assert (target[1:-1] == source).all() and target[0] == target[-1] == 0xAB
    assert value == digest(source) == digest(memoryview(source))
    assert value % 2**64 == xxhash.xxh3_64_intdigest(source.tobytes())
    assert np.int64(value) == value, "fits a word of shared memory"
    (tmp_path / "file").write_bytes(source.tobytes())
    assert file_digest(tmp_path / "file") == value


def test_every_flipped_bit_changes_the_digest() -> None:
    data = np.random.default_rng(0).integers(0, 256, BLOCK + 100, np.uint8)
    before, random = digest(data), np.random.default_rng(1)
    for place in [0, BLOCK - 1, BLOCK, len(data) - 1, *random.integers(0, len(data), 50)]:
        bit = np.uint8(1 << random.integers(0, 8))
        data[place] ^= bit
        assert digest(data) != before, place
        data[place] ^= bit
    assert digest(data) == before


def test_digests_of_both_signs_occur() -> None:
    values = [digest(np.array([i], np.int64)) for i in range(64)]
    assert min(values) < 0 < max(values)


def test_sizes_must_agree() -> None:
    with pytest.raises(AssertionError):
        copy_and_digest(np.zeros(4, np.uint8), np.zeros(5, np.uint8))
