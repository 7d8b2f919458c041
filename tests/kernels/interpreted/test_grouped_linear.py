"""kernels/grouped_linear/triton.py in the interpreter. Run: pytest tests/kernels/interpreted/test_grouped_linear.py"""

import pytest
import torch
from conftest import DTYPES, EPSILON, assert_near, assert_same_bits

from kernels import grouped_linear as entry
from kernels.combine import combine
from kernels.dispatch import triton_on_cpu
from kernels.expert_order import expert_order
from kernels.grouped_linear import triton as op
from kernels.grouped_linear.triton import grouped_linear, grouped_weight_grad
from kernels.linear.triton import linear
from kernels.router import select, weigh
from kernels.swiglu import swiglu

COUNTS = [[1], [0, 3, 0, 0, 1], [7, 1, 65, 0, 6], [0, 0], [130, 0, 2]]  # rows of each expert; a row block has 64


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def expert_of(counts: list[int]) -> torch.Tensor:
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 100), (70, 64)])
def test_a_row_has_the_bits_of_linear_with_its_expert(dtype, counts, outputs, inputs):
    """The same tile, so also the same sums; rows gathered and not."""
    x, weight = torch.randn(sum(counts) + 2, inputs).to(dtype), torch.randn(len(counts), outputs, inputs).to(dtype)
    rows = torch.randint(len(x), (sum(counts),))
    expected = torch.cat([linear(x[own], w.clone()) for own, w in zip(rows.split(counts), weight, strict=True)])
    assert_same_bits(grouped_linear(x, weight, offsets_of(counts), rows, False), expected)
    assert_same_bits(grouped_linear(x[rows], weight, offsets_of(counts), None, False), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_other_rows(dtype):
    """The batch in chunks, a row alone, and the rows of each expert turned around."""
    counts, weight, x = [11, 0, 1, 20, 6], torch.randn(5, 33, 40).to(dtype), torch.randn(38, 40).to(dtype)
    expert = expert_of(counts)
    whole = grouped_linear(x, weight, offsets_of(counts), None, False)
    for size in (1, 7, 16):
        for start in range(0, 38, size):
            part = expert[start : start + size]
            own = offsets_of(torch.bincount(part, minlength=5).tolist())
            y = grouped_linear(x, weight, own, torch.arange(start, start + len(part)), False)
            assert_same_bits(y, whole[start : start + size], f"{size} rows from {start}")
    turned = torch.cat([rows.flip(0) for rows in torch.arange(38).split(counts)])
    assert_same_bits(grouped_linear(x, weight, offsets_of(counts), turned, False), whole[turned])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_that_are_not_numbers_stay_out(dtype):
    """A row of NaN reaches its own outputs, an expert of NaN its own rows."""
    counts, weight, x = [3, 2, 4], torch.randn(3, 6, 40).to(dtype), torch.randn(9, 40).to(dtype)
    clean = grouped_linear(x, weight, offsets_of(counts), None, False)
    x[1], weight[1] = torch.nan, torch.inf
    others = torch.tensor([0, 2, 5, 6, 7, 8])
    assert_same_bits(grouped_linear(x, weight, offsets_of(counts), None, False)[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("counts", [[9, 0, 4, 1, 16], [70, 2], [0, 30]], ids=str)
def test_gradients_match_float64(dtype, gathered, counts):
    """Through the op, as a trainer calls it; an expert without rows has the gradient 0, and the sums are the same every time."""
    num_rows, outputs, inputs = sum(counts), 33, 70
    rows = torch.randperm(num_rows) // 2 if gathered else None
    x = torch.randn(num_rows // 2 + 1 if gathered else num_rows, inputs).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), outputs, inputs).to(dtype).requires_grad_()
    cotangent = torch.randn(num_rows, outputs).to(dtype)

    def gradients() -> tuple[torch.Tensor, ...]:
        with triton_on_cpu():
            return torch.autograd.grad(entry.grouped_linear(x, weight, offsets_of(counts), rows), (x, weight), cotangent)

    ours, (wide_x, wide_weight) = gradients(), (t.detach().double().requires_grad_() for t in (x, weight))
    gathered_x = wide_x if rows is None else wide_x[rows]
    reference = torch.einsum("md,mnd->mn", gathered_x, wide_weight[expert_of(counts)])
    expected = torch.autograd.grad(reference, (wide_x, wide_weight), cotangent.double())
    # bfloat16: x's gradient is rounded once for each row that reads it and once for their sum.
    bounds = [1e-5 + (3 * EPSILON[dtype] * 30 if gathered and dtype is torch.bfloat16 else EPSILON[dtype] * expected[0].abs())]
    bounds += [1e-5 + EPSILON[dtype] * expected[1].abs()]
    for grad, other, bound in zip(ours, expected, bounds, strict=True):
        assert grad.dtype is dtype
        assert_near(grad, other, bound)
    assert (ours[1][torch.tensor(counts) == 0] == 0).all()
    assert_same_bits(gradients(), ours)


def test_the_gradient_of_a_weight_sees_its_own_rows_only():
    """NaN in the next expert's rows, which share the last block, stays out."""
    grad, x, offsets = torch.randn(9, 6), torch.randn(9, 10), offsets_of([5, 4])
    clean = grouped_weight_grad(grad, x, offsets, None)[0]
    grad[5:], x[5:] = torch.nan, torch.nan
    assert_same_bits(grouped_weight_grad(grad, x, offsets, None)[0], clean)


def layer_of_experts(x, logits, gate, up, down) -> tuple[torch.Tensor, torch.Tensor]:
    """As a model has it, top-2 of sigmoid scores, and the chosen ids."""
    ids = select(logits, 2, scoring="sigmoid")
    weights = weigh(logits, ids, scoring="sigmoid", normalise=True, scale=1.5)
    order, place, offsets = expert_order(ids, logits.shape[1])
    hidden = swiglu(*(entry.grouped_linear(x, weight, offsets, order // 2) for weight in (gate, up)))
    return combine(entry.grouped_linear(hidden, down, offsets), weights, place), ids


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_of_experts(dtype):
    """Values and all gradients against float64; a token alone and in another order of the batch."""
    shapes = [(13, 24), (5, 40, 24), (5, 40, 24), (5, 24, 40)]
    x, gate, up, down = ((torch.randn(s) * s[-1] ** -0.5 * (4 if len(s) == 2 else 1)).to(dtype).requires_grad_() for s in shapes)
    logits = torch.randn(13, 5, requires_grad=True)
    inputs, cotangent = [x, logits, gate, up, down], torch.randn(13, 24).to(dtype)
    with triton_on_cpu():
        y, ids = layer_of_experts(*inputs)
        ours = torch.autograd.grad(y, inputs, cotangent)
        with torch.no_grad():
            for t in range(13):
                assert_same_bits(layer_of_experts(x[t, None], logits[t, None], gate, up, down)[0][0], y[t], f"token {t}")
            assert_same_bits(layer_of_experts(x.roll(5, 0), logits.roll(5, 0), gate, up, down)[0].roll(-5, 0), y)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    score = wide[1].sigmoid().gather(1, ids)
    mix = torch.zeros(13, 5, dtype=torch.float64).scatter(1, ids, score / score.sum(1, keepdim=True) * 1.5)
    hidden = [torch.einsum("td,efd->tef", wide[0], weight) for weight in wide[2:4]]
    reference = torch.einsum("te,tef,edf->td", mix, torch.nn.functional.silu(hidden[0]) * hidden[1], wide[4])
    expected = torch.autograd.grad(reference, wide, cotangent.double())
    for one, other in zip((y, *ours), (reference, *expected), strict=True):
        assert_near(one, other, (8 * EPSILON[dtype] + 1e-5) * other.abs().max())


def test_no_rows():
    x, weight, offsets = torch.empty(0, 8), torch.randn(2, 3, 8), offsets_of([0, 0])
    assert grouped_linear(x, weight, offsets, None, False).shape == (0, 3)
    assert_same_bits(grouped_weight_grad(torch.empty(0, 3), x, offsets, None), torch.zeros(2, 3, 8))


def test_what_is_not_supported_is_named():
    x, weight, offsets = torch.randn(4, 8), torch.randn(2, 6, 8), offsets_of([1, 3])
    for wrong in (
        (x, torch.randn(2, 6, 9), offsets, None),
        (x, weight, offsets.long(), None),
        (x, weight, offsets_of([1, 2, 1]), None),
        (x, weight, offsets, torch.zeros(4, dtype=torch.int32)),
        (x, weight.bfloat16(), offsets, None),
    ):
        with pytest.raises(ValueError, match=r"grouped_linear: \[4, 8\] float32.*supported: x \[R, D\]"):
            grouped_linear(*wrong, False)
    with pytest.raises(ValueError, match=r"grouped_linear: \[4, 8\] float32"):
        grouped_linear(x, weight, offsets, None, True)
    with pytest.raises(ValueError, match=r"grouped_weight_grad: \[3, 6\] float32.*supported: grad \[M, N\]"):
        grouped_weight_grad(torch.randn(3, 6), x, offsets, None)
    with pytest.raises(ValueError, match="contiguous"):
        grouped_linear(torch.randn(8, 4).t(), weight, offsets, None, False)


def test_shapes_are_known_without_running():
    x, weight, offsets, utils = torch.randn(4, 8), torch.randn(2, 6, 8), offsets_of([1, 3]), ("test_schema", "test_faketensor")
    torch.library.opcheck(op.grouped_linear, (x, weight, offsets, torch.arange(4), False), test_utils=utils)
    torch.library.opcheck(op.grouped_linear, (torch.randn(4, 6), weight, offsets, None, True), test_utils=utils)
    torch.library.opcheck(op.grouped_weight_grad, (torch.randn(4, 6), x, offsets, None), test_utils=utils)
