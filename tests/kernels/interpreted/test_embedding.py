"""kernels/embedding/triton.py in the interpreter. Run: pytest tests/kernels/interpreted/test_embedding.py"""

import pytest
import torch
from conftest import DTYPES, EPSILON, assert_near, assert_row_invariant, assert_same_bits

from kernels.embedding.triton import embedding, embedding_backward


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 1, 1), (9, 5, 7), (20, 300, 64), (3, 11, 1500)])
def test_is_a_copy(dtype, tokens, rows, width):
    ids, weight = torch.randint(rows, (tokens,)), torch.randn(rows, width).to(dtype)
    assert_same_bits(embedding(ids, weight), weight[ids])


def test_bits_do_not_depend_on_the_batch():
    weight = torch.randn(11, 24)
    assert_row_invariant(lambda ids: embedding(ids, weight), torch.randint(11, (30,)))


def test_an_id_outside_gives_nan():
    y = embedding(torch.tensor([-1, 0, 4, 5, 2**40]), torch.ones(5, 8))
    assert y.isnan().all(1).tolist() == [True, False, False, True, True] and (y[1:3] == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 3, 1), (9, 5, 7), (70, 2, 40), (50, 300, 64), (3, 11, 1500)])
def test_gradient_matches_float64(dtype, tokens, rows, width):
    ids, grad = torch.randint(rows, (tokens,)), torch.randn(tokens, width).to(dtype)
    expected = torch.zeros(rows, width, dtype=torch.float64).index_add_(0, ids, grad.double())
    size = torch.zeros(rows, width, dtype=torch.float64).index_add_(0, ids, grad.double().abs())
    ours = embedding_backward(grad, ids, rows)
    assert ours.dtype is dtype
    assert_near(ours, expected, 1e-6 * size + EPSILON[dtype] * expected.abs())  # float32 sums, then one rounding
    unused = torch.ones(rows, dtype=torch.bool).index_fill_(0, ids, False)
    assert (ours[unused] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_a_row_depends_on_its_own_tokens_in_their_order_only(dtype):
    """Other tokens before, between and after, so that the run stands elsewhere in the sorted list: the same bits."""
    run, others = torch.randn(37, 24).to(dtype), torch.randn(40, 24).to(dtype)
    alone = embedding_backward(run, torch.full((37,), 3), 7)[3]
    mine = torch.randperm(77) < 37  # 37 places among 77
    grad, ids = torch.empty(77, 24, dtype=dtype), torch.empty(77, dtype=torch.int64)
    grad[mine], grad[~mine] = run, others
    ids[mine], ids[~mine] = 3, torch.tensor([0, 1, 2, 4, 5, 6])[torch.randint(6, (40,))]
    assert_same_bits(embedding_backward(grad, ids, 7)[3], alone)


def test_nothing_and_what_is_not_supported():
    assert embedding(torch.empty(0, dtype=torch.int64), torch.ones(3, 4)).shape == (0, 4)
    assert (embedding_backward(torch.empty(0, 4), torch.empty(0, dtype=torch.int64), 3) == torch.zeros(3, 4)).all()
    with pytest.raises(ValueError, match=r"embedding: \[2\] int32.*supported: ids int64 \[T\]"):
        embedding(torch.zeros(2, dtype=torch.int32), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"embedding_backward: \[2, 4\] float32.*\[3\] int64.*supported: grad \[T, D\]"):
        embedding_backward(torch.ones(2, 4), torch.zeros(3, dtype=torch.int64), 5)
