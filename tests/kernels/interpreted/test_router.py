"""kernels/router/triton.py in the interpreter. Run: pytest tests/kernels/interpreted/test_router.py"""

import pytest
import torch
from conftest import assert_near, assert_row_invariant, assert_same_bits

from kernels import router
from kernels.dispatch import triton_on_cpu
from kernels.router import ref
from kernels.router import triton as op
from kernels.router.triton import select, weigh

BOTH = [False, True]
SIZES = [(1, 1, 1), (5, 3, 3), (40, 8, 2), (9, 60, 4), (3, 257, 8), (2, 520, 5)]  # tokens, experts, slots
GROUPS = [(8, 2, 1, 4), (8, 4, 2, 3), (60, 5, 2, 6), (64, 8, 4, 8)]  # experts, groups, best groups, slots


def every_score(logits: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    """The scores that the kernel itself computes: the weights of all experts."""
    return weigh(logits, torch.arange(logits.shape[1]).expand(logits.shape).contiguous(), sigmoid, False, 1.0)


def chosen(monkeypatch: pytest.MonkeyPatch, logits, top_k, sigmoid, bias=None, num_groups=1, top_groups=1) -> torch.Tensor:
    """What the definition chooses by the kernel's own scores."""
    with monkeypatch.context() as patch:
        patch.setattr(ref, "scores", lambda *_: every_score(logits, sigmoid))
        return ref.select(logits, top_k, sigmoid, bias, num_groups, top_groups)


@pytest.mark.parametrize("sigmoid", BOTH)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
def test_the_largest_scores_in_order(monkeypatch, sigmoid, tokens, experts, top_k):
    logits = torch.randn(tokens, experts) * 2
    exact = logits.double().sigmoid() if sigmoid else logits.double().softmax(-1)
    assert_near(every_score(logits, sigmoid), exact, 1e-6 * exact)
    assert_same_bits(select(logits, top_k, sigmoid), chosen(monkeypatch, logits, top_k, sigmoid))


@pytest.mark.parametrize("sigmoid", BOTH)
@pytest.mark.parametrize(("experts", "num_groups", "top_groups", "top_k"), GROUPS)
def test_bias_and_groups(monkeypatch, sigmoid, experts, num_groups, top_groups, top_k):
    logits, settings = torch.randn(20, experts), (torch.randn(experts) / 4, num_groups, top_groups)
    assert_same_bits(select(logits, top_k, sigmoid, *settings), chosen(monkeypatch, logits, top_k, sigmoid, *settings))


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)])
def test_the_lower_index_wins_among_equals(monkeypatch, groups):
    logits = torch.randint(3, (60, 64)).float()
    logits[0] = 0.0
    ids = select(logits, 6, True, None, *groups)
    assert_same_bits(ids, chosen(monkeypatch, logits, 6, True, None, *groups))
    assert ids[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert select(torch.full((1, 4), -200.0), 4, True, torch.tensor([-0.0, 0.0, -0.0, 0.0])).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("sigmoid", BOTH)
def test_ids_stay_distinct_and_inside_whatever_the_logits_are(sigmoid):
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0, -torch.nan])
    logits = bad[torch.randint(len(bad), (100, 16))]
    logits[0], logits[1], logits[2] = torch.nan, torch.inf, -torch.inf
    for groups in ((1, 1), (4, 2)):
        ids = select(logits, 8, sigmoid, bad[torch.randint(len(bad), (16,))], *groups)
        assert ids.min() >= 0 and ids.max() < 16
        assert (ids.sort().values.diff() > 0).all()


@pytest.mark.parametrize("sigmoid", BOTH)
@pytest.mark.parametrize("experts", [3, 8, 60])
def test_bits_do_not_depend_on_the_batch(sigmoid, experts):
    logits, bias = torch.randn(70, experts) * 3, torch.randn(experts) / 8
    ids = torch.stack([torch.randperm(experts)[:3] for _ in range(70)])
    assert_row_invariant(lambda rows: select(rows, 3, sigmoid, bias), logits)
    assert_row_invariant(lambda rows, i: weigh(rows, i, sigmoid, True, 2.5), logits, ids)


@pytest.mark.parametrize("sigmoid", BOTH)
def test_a_token_that_is_not_a_number_stays_by_itself(sigmoid):
    logits, ids = torch.randn(9, 12), torch.stack([torch.randperm(12)[:3] for _ in range(9)])
    clean = weigh(logits, ids, sigmoid, True, 1.0)
    logits[4], logits[7] = torch.nan, torch.inf
    others = torch.tensor([0, 1, 2, 3, 5, 6, 8])
    assert_same_bits(weigh(logits, ids, sigmoid, True, 1.0)[others], clean[others])


@pytest.mark.parametrize("sigmoid", BOTH)
def test_weights_are_divided_by_their_sum_in_slot_order(sigmoid):
    logits, ids = torch.randn(20, 12), torch.stack([torch.randperm(12)[:5] for _ in range(20)])
    picked = every_score(logits, sigmoid).gather(1, ids)
    total = picked[:, 0]
    for k in range(1, 5):
        total = total + picked[:, k]
    assert_same_bits(weigh(logits, ids, sigmoid, True, 2.5), picked / (total + 1e-20)[:, None] * 2.5)
    assert_same_bits(weigh(logits, ids, sigmoid, False, 2.5), picked * 2.5)


def test_an_id_outside_gives_nan():
    weights = weigh(torch.randn(2, 4), torch.tensor([[0, 4], [-1, 2**40]]), False, False, 1.0)
    assert weights.isnan().tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize("scoring", router.SCORING)
def test_the_op_dispatches_and_has_its_gradient(scoring):
    logits = torch.randn(6, 10, requires_grad=True)
    settings = {"scoring": scoring, "normalise": True, "scale": 2.5}
    with triton_on_cpu():
        ids = router.select(logits, 3, scoring=scoring, bias_E=torch.randn(10))
        (ours,) = torch.autograd.grad(router.weigh(logits, ids, **settings)[:, 0].sum(), logits)
    wide = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(ref.weigh(wide, ids, scoring == "sigmoid", True, 2.5)[:, 0].sum(), wide)
    assert_near(ours, expected, 1e-5)


def test_nothing_and_what_is_not_supported():
    assert select(torch.empty(0, 8), 2, False).shape == (0, 2)
    assert weigh(torch.empty(0, 8), torch.empty(0, 2, dtype=torch.int64), False, True, 1.0).shape == (0, 2)
    with pytest.raises(ValueError, match=r"router.select: \[1, 4097\] float32.*supported: logits float32 \[T, E\], 1 <= E <= 4096"):
        select(torch.randn(1, 4097), 2, False)
    with pytest.raises(ValueError, match=r"router.select: \[3, 8\] float64"):
        select(torch.randn(3, 8).double(), 2, False)
    with pytest.raises(ValueError, match="bias"):
        select(torch.randn(3, 8), 2, False, torch.randn(9))
    with pytest.raises(ValueError, match=r"router.weigh: \[3, 8\] float32.*\[2, 2\] int64"):
        weigh(torch.randn(3, 8), torch.zeros(2, 2, dtype=torch.int64), False, True, 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        select(torch.randn(8, 8).t(), 2, False)


def test_shapes_are_known_without_running():
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.select, (torch.randn(5, 8), 2, True, torch.randn(8), 4, 2), test_utils=utils)
    torch.library.opcheck(op.weigh, (torch.randn(5, 8), torch.zeros(5, 2, dtype=torch.int64), False, True, 1.0), test_utils=utils)
