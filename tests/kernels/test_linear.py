"""kernels.linear: float64 reference, the documented order of summation, invariance. Run: pytest tests/kernels/test_linear.py"""

import numpy as np
import pytest
import torch
from conftest import assert_row_invariant, doubles, gradients

from kernels.linear import linear, pack

SHAPES = [(1, 1, 1), (3, 5, 7), (13, 17, 23), (64, 48, 192), (5, 33, 193), (9, 70, 383), (12, 31, 384), (70, 65, 577), (401, 20, 700)]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_forward_and_gradients_match_float64(impl, rows, outputs, inputs, with_bias):
    x, weight = torch.randn(rows, inputs, requires_grad=True), torch.randn(outputs, inputs, requires_grad=True)
    bias = torch.randn(outputs, requires_grad=True) if with_bias else None
    wide = doubles(x, weight, *([bias] if with_bias else []))
    reference = torch.nn.functional.linear(*wide)
    y = linear(x, weight, bias)
    bound = 1e-6 * (x.detach().abs() @ weight.detach().abs().t() + 1)
    assert ((y - reference).abs() <= bound).all()
    cotangent = torch.randn(rows, outputs)
    ours = gradients(y, [x, weight] + ([bias] if with_bias else []), cotangent)
    for grad, expected in zip(ours, gradients(reference, wide, cotangent), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs", [150, 300, 301, 450])
def test_every_output_is_chains_of_192_in_order(inputs):
    """The C++ rule, spelled out: fma over k; one chain up to 192 terms, two halves below 384, then 192 each; partial sums in order."""
    x, weight, bias = torch.randn(3, inputs), torch.randn(18, inputs), torch.randn(18)
    y = linear(x, weight, bias).numpy()
    cuts = [0, inputs] if inputs <= 192 else [0, (inputs + 1) // 2, inputs] if inputs < 384 else [0, 192, 384, inputs]
    for m in range(3):
        for n in range(18):
            total = bias[n].numpy()
            for start, stop in zip(cuts, cuts[1:], strict=False):
                chain = np.float32(0)
                for a, b in zip(x[m, start:stop].numpy(), weight[n, start:stop].numpy(), strict=True):
                    chain = np.float32(np.longdouble(a) * np.longdouble(b) + np.longdouble(chain))
                total = np.float32(total + chain)
            assert y[m, n] == total, (m, n)


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 577), (24, 96), (130, 200)])
def test_bits_do_not_depend_on_the_number_of_rows(impl, outputs, inputs):
    x, weight, bias = torch.randn(70, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    packed = pack(weight)
    full = linear(x, weight, bias)
    for rows in range(1, 71):
        assert torch.equal(linear(x[:rows], weight, bias, packed), full[:rows]), rows
        assert torch.equal(linear(x[-rows:], weight, bias), full[-rows:]), rows
    assert_row_invariant(lambda rows: linear(rows, weight, bias), x)


def test_bits_do_not_depend_on_row_blocks(impl):
    x, weight = torch.randn(1000, 700), torch.randn(50, 700)
    full = linear(x, weight)
    for rows in (slice(0, 500), slice(370, 371), slice(993, 1000)):
        assert torch.equal(linear(x[rows], weight), full[rows])


def test_bits_do_not_depend_on_threads(two_threads):
    x, weight = torch.randn(40, 300), torch.randn(200, 300)
    one = linear(x, weight), linear(x, weight, None, pack(weight))
    two_threads()
    two = linear(x, weight), linear(x, weight, None, pack(weight))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) and torch.equal(one[0], one[1])


def test_leading_dims_and_strides(impl):
    x, weight = torch.randn(30, 4, 5).permute(1, 2, 0), torch.randn(30, 12).t()
    y = linear(x, weight)
    assert y.shape == (4, 5, 12)
    assert torch.equal(y.reshape(20, 12), linear(x.reshape(20, 30), weight.contiguous()))
    assert linear(torch.empty(0, 30), weight).shape == (0, 12)


def test_a_pack_is_refused_once_the_weight_has_changed(impl):
    weight = torch.randn(8, 8)
    packed = pack(weight)
    linear(torch.randn(2, 8), weight, None, packed)
    weight.mul_(2)
    with pytest.raises(AssertionError, match="pack it again"):
        linear(torch.randn(2, 8), weight, None, packed)
    again = pack(weight, into=packed)
    x = torch.randn(2, 8)
    assert torch.equal(linear(x, weight, None, again), linear(x, weight))
    assert impl == "torch" or again.panels is packed.panels
