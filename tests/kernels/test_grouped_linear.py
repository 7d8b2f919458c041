"""kernels.grouped_linear: the bits of linear with each expert's weight; a whole layer of experts against float64.

Run: pytest tests/kernels/test_grouped_linear.py
"""

import pytest
import torch
from conftest import doubles, gradients

from kernels.combine import combine
from kernels.expert_order import expert_order
from kernels.grouped_linear import grouped_linear, pack_experts
from kernels.linear import linear
from kernels.router import select, weigh
from kernels.swiglu import swiglu

COUNTS = [[1], [0, 3, 0, 0, 1], [7, 1, 13, 0, 6], [0, 0], [400, 0, 2], [1] * 40]  # rows of each expert


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 100), (40, 577), (96, 192)])
@pytest.mark.parametrize("gathered", [False, True])
def test_a_row_has_the_bits_of_linear_with_its_expert(impl, counts, outputs, inputs, gathered):
    x, weight = torch.randn(max(1, sum(counts)), inputs)[: sum(counts)], torch.randn(len(counts), outputs, inputs)
    rows = torch.randint(len(x), (len(x),)) if gathered and len(x) else None
    x_sorted = x if rows is None else x[rows]
    expected = torch.cat([linear(part, w) for part, w in zip(x_sorted.split(counts), weight, strict=True)])
    for packed in (None, pack_experts(weight)):
        y = grouped_linear(x, weight, offsets_of(counts), rows, packed)
        assert y.shape == (len(x), outputs) and torch.equal(y, expected)


@pytest.mark.parametrize("gathered", [False, True])
def test_bits_do_not_depend_on_the_other_rows(impl, gathered):
    """Whole, an expert at a time, and a row at a time."""
    counts, weight = [11, 0, 1, 20, 6], torch.randn(5, 50, 300)
    x = torch.randn(sum(counts), 300)
    rows = torch.randperm(len(x)) if gathered else torch.arange(len(x))
    whole = grouped_linear(x, weight, offsets_of(counts), rows if gathered else None)
    experts = torch.arange(5).repeat_interleave(torch.tensor(counts))
    for m in range(len(x)):
        alone = grouped_linear(x[rows[m], None], weight, offsets_of([int(e == experts[m]) for e in range(5)]))
        assert torch.equal(alone[0], whole[m]), m
    for e in range(5):
        own = rows[experts == e]
        part = grouped_linear(x[own], weight, offsets_of([counts[e] * (i == e) for i in range(5)]), packed=pack_experts(weight))
        assert torch.equal(part, whole[experts == e]), e


def test_bits_do_not_depend_on_threads_or_waves(two_threads):
    """More inputs than are cut into runs at a time, most of them of one expert."""
    counts, weight = [300, 1500, 0, 7, 200], torch.randn(5, 40, 700)
    x, rows = torch.randn(900, 700), torch.randint(900, (sum(counts),))
    one = grouped_linear(x, weight, offsets_of(counts), rows)
    two_threads()
    assert torch.equal(grouped_linear(x, weight, offsets_of(counts), rows), one)
    assert torch.equal(grouped_linear(x, weight, offsets_of(counts), rows, pack_experts(weight)), one)


@pytest.mark.parametrize("gathered", [False, True])
def test_gradients_match_float64(impl, gathered):
    counts, top_k = [9, 0, 4, 1, 16], 3
    x, weight = torch.randn(10 if gathered else 30, 20, requires_grad=True), torch.randn(5, 12, 20, requires_grad=True)
    rows = torch.randperm(30) // top_k if gathered else None
    wide = doubles(x, weight)
    expert = torch.arange(5).repeat_interleave(torch.tensor(counts))
    reference = torch.einsum("md,mnd->mn", wide[0] if rows is None else wide[0][rows], wide[1][expert])
    y = grouped_linear(x, weight, offsets_of(counts), rows)
    torch.testing.assert_close(y.double(), reference, rtol=1e-4, atol=1e-5)
    cotangent = torch.randn(30, 12)
    ours = gradients(y, [x, weight], cotangent)
    for grad, expected in zip(ours, gradients(reference, wide, cotangent), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)
    assert (ours[1][1] == 0).all(), "an expert without rows"
    again = gradients(grouped_linear(x, weight, offsets_of(counts), rows), [x, weight], cotangent)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def test_the_gradient_of_a_shared_row_is_summed_in_the_order_of_the_sorted_rows(impl):
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(3, 5, 6)
    rows, offsets = torch.tensor([2, 0, 2, 1, 2, 0]), offsets_of([2, 1, 3])
    cotangent = torch.randn(6, 5)
    (ours,) = gradients(grouped_linear(x, weight, offsets, rows), [x], cotangent)
    apart = x.detach()[rows].requires_grad_()
    (each,) = gradients(grouped_linear(apart, weight, offsets), [apart], cotangent)
    assert torch.equal(ours[2], each[0] + each[2] + each[4]) and torch.equal(ours[0], each[1] + each[5])
    assert torch.equal(ours[1], each[3]) and (ours[3] == 0).all()


def test_a_pack_is_refused_once_the_weight_has_changed(impl):
    x, weight, offsets = torch.randn(4, 8), torch.randn(2, 20, 8), offsets_of([1, 3])
    packed = pack_experts(weight)
    grouped_linear(x, weight, offsets, None, packed)
    weight.mul_(2)
    with pytest.raises(AssertionError, match="pack it again"):
        grouped_linear(x, weight, offsets, None, packed)
    again = pack_experts(weight, into=packed)
    assert torch.equal(grouped_linear(x, weight, offsets, None, again), grouped_linear(x, weight, offsets))
    assert impl == "torch" or again.panels is packed.panels


@pytest.mark.parametrize("offsets", [[1, 2, 4], [0, 3, 2], [0, 2, 3], [0, 2, 5], [0, -1, 4], [0, 6, 4]], ids=str)
def test_offsets_that_do_not_fit_are_an_error(offsets):
    with pytest.raises(AssertionError, match="grouped_linear: row"):
        grouped_linear(torch.randn(4, 8), torch.randn(2, 3, 8), torch.tensor(offsets, dtype=torch.int32))


@pytest.mark.parametrize("row", [-1, 4, 2**40])
def test_a_row_outside_is_an_error(row):
    with pytest.raises(AssertionError, match="grouped_linear: row 1 of 3"):
        grouped_linear(torch.randn(4, 8), torch.randn(2, 3, 8), offsets_of([1, 2]), torch.tensor([0, row, 3]))


def layer_of_experts(x, router, gate, up, down, top_k):
    """As a model has it, and the chosen ids."""
    logits = linear(x, router)
    ids = select(logits, top_k)
    weights = weigh(logits, ids, scoring="softmax", normalise=True, scale=1.0)
    order, place, offsets = expert_order(ids, len(router))
    rows = order // top_k
    hidden = swiglu(grouped_linear(x, gate, offsets, rows), grouped_linear(x, up, offsets, rows))
    return combine(grouped_linear(hidden, down, offsets), weights, place), ids


def reference_layer(x, router, gate, up, down, ids):
    """Every expert on every token, and the chosen ones kept."""
    scores = (x @ router.t()).softmax(-1)
    weights = scores.gather(1, ids)
    dense = torch.zeros_like(scores).scatter(1, ids, weights / weights.sum(-1, keepdim=True))
    hidden = torch.nn.functional.silu(torch.einsum("td,efd->tef", x, gate)) * torch.einsum("td,efd->tef", x, up)
    return torch.einsum("te,tef,edf->td", dense, hidden, down)


def test_a_layer_of_experts_matches_float64_with_all_gradients(impl):
    tokens, experts, top_k, width, inner = 50, 8, 2, 24, 40
    shapes = [(tokens, width), (experts, width), (experts, inner, width), (experts, inner, width), (experts, width, inner)]
    inputs = [(torch.randn(shape) * shape[-1] ** -0.5 * (4 if i < 2 else 1)).requires_grad_() for i, shape in enumerate(shapes)]
    y, ids = layer_of_experts(*inputs, top_k)
    wide = doubles(*inputs)
    reference = reference_layer(*wide, ids)
    assert torch.equal((wide[0] @ wide[1].t()).topk(top_k).indices, ids)
    torch.testing.assert_close(y.double(), reference, rtol=1e-4, atol=1e-5)
    cotangent = torch.randn(tokens, width)
    for grad, expected in zip(gradients(y, inputs, cotangent), gradients(reference, wide, cotangent), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        for t in range(0, tokens, 7):
            assert torch.equal(layer_of_experts(inputs[0][t, None], *inputs[1:], top_k)[0][0], y[t]), t
