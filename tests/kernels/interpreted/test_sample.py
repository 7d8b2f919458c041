"""The noise of kernels/sample/triton.py is that of kernels.sample. Run: pytest tests/kernels/interpreted/test_sample.py"""

import pytest
import torch
from conftest import assert_row_invariant, assert_same_bits

from kernels.sample import ref
from kernels.sample.triton import uniform

# Counter words, key words, and the first two words of the result: the known answers that the authors publish with Random123.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter, key, words):
    group = (counter[0] | counter[1] << 32) - (1 << 64 if counter[1] >> 31 else 0)  # as a signed 64-bit number
    u = uniform(key[0] | key[1] << 32, torch.tensor([group]), torch.tensor([counter[2]]), torch.tensor([counter[3]]))
    assert u.tolist() == [((words[0] >> 5 << 26) | (words[1] >> 6)) / 2**53]


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 + 1, 2**63 + 5, 2**64 - 1])
def test_noise_is_the_definitions(seed):
    """A seed of any size, groups past 32 bits, samples and positions up to 2^32 - 1, and more rows than one program has."""
    group = torch.arange(2500) * 12345678901 - 4 * 10**12
    sample, position = torch.arange(2500) % 8 + 2**31 - 4, 2**32 - 1 - torch.arange(2500) * 3
    assert_same_bits(uniform(seed, group, sample, position), ref.uniform(seed, group, sample, position))


def test_noise_does_not_depend_on_the_batch():
    assert_row_invariant(lambda *x: uniform(7, *x), torch.arange(40) * 12345678901, torch.arange(40) % 8, torch.arange(40) * 3)


def test_no_rows():
    empty = torch.empty(0, dtype=torch.int64)
    assert uniform(1, empty, empty, empty).shape == (0,)


def test_what_is_not_supported_is_named():
    x = torch.arange(4)
    with pytest.raises(ValueError, match="uniform: .*int32.* is not supported; supported: int64"):
        uniform(1, x.int(), x, x)
    with pytest.raises(ValueError, match="three vectors of one length"):
        uniform(1, x, x[:3].clone(), x)
    with pytest.raises(ValueError, match="seed -1"):
        uniform(-1, x, x, x)


def test_shapes_are_known_without_running():
    x = torch.empty(5, dtype=torch.int64, device="meta")
    assert uniform(1, x, x, x).shape == (5,) and uniform(1, x, x, x).dtype is torch.float64
