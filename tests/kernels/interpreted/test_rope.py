"""kernels/rope/triton.py in the interpreter. Run: pytest tests/kernels/interpreted/test_rope.py"""

import pytest
import torch
from conftest import DTYPES, EPSILON, assert_near, assert_row_invariant, assert_same_bits

from kernels.rope.triton import rope

SHAPES = [(1, 1, 16), (7, 3, 48), (33, 5, 64), (9, 4, 128), (3, 2, 256)]  # tokens, heads, width


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.rand(tokens, half) * 100
    return turns.cos(), turns.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backwards", [False, True])
def test_matches_float64(dtype, shape, backwards):
    x, (cos, sin) = torch.randn(shape).to(dtype), angles(shape[0], shape[2] // 2)
    first, second = x.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None] * (-1 if backwards else 1)
    expected = torch.cat([first * c - second * s, second * c + first * s], -1)
    y = rope(x, cos, sin, backwards)
    assert y.dtype is dtype
    assert_near(y, expected, 2e-6 + EPSILON[dtype] * expected.abs())


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(dtype):
    x, (cos, sin) = torch.randn(20, 3, 64).to(dtype), angles(20, 32)
    back = rope(rope(x, cos, sin), cos, sin, True)
    length = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True)
    assert_near(back, x.double(), 4 * EPSILON[dtype] * length)  # a rotation keeps lengths, so two roundings of both parts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 64])
def test_bits_do_not_depend_on_the_batch(dtype, width):
    x, (cos, sin) = torch.randn(70, 3, width).to(dtype), angles(70, width // 2)
    assert_row_invariant(rope, x, cos, sin)
    assert_same_bits(rope(x[:, 1:2].contiguous(), cos, sin), rope(x, cos, sin)[:, 1:2])


def test_no_tokens_and_what_is_not_supported():
    assert rope(torch.empty(0, 2, 16), *angles(0, 8)).shape == (0, 2, 16)
    for width in (8, 24, 272):
        with pytest.raises(ValueError, match=rf"rope: \[3, 2, {width}\].*multiple of 16 from 16 to 256"):
            rope(torch.randn(3, 2, width), *angles(3, width // 2))
    with pytest.raises(ValueError, match="cos and sin float32"):
        rope(torch.randn(3, 2, 16), *(x.bfloat16() for x in angles(3, 8)))
    with pytest.raises(ValueError, match=r"cos and sin float32 \[T, H / 2\]"):
        rope(torch.randn(3, 2, 16), *angles(4, 8))
