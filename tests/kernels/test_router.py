"""kernels.router: the rule of the choice, spelled out; weights and their gradient. Run: pytest tests/kernels/test_router.py"""

import pytest
import torch
from conftest import assert_row_invariant, doubles, gradients

from kernels.router import ref, select, weigh

SCORING = ["softmax", "sigmoid"]
SIZES = [(1, 1, 1), (5, 3, 3), (40, 8, 2), (33, 60, 4), (9, 257, 8), (2, 1000, 1000)]  # tokens, experts, slots
GROUPS = [(8, 2, 1, 4), (8, 4, 2, 3), (60, 5, 2, 6), (64, 8, 4, 8), (256, 8, 4, 8)]  # experts, groups, best groups, slots


def scores_of(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """The scores that the implementation itself computes: the weights of all experts."""
    every = torch.arange(logits.shape[1]).expand(logits.shape).contiguous()
    return weigh(logits, every, scoring=scoring, normalise=False, scale=1.0)


def expected_ids(choices: torch.Tensor, top_k: int, num_groups: int = 1, top_groups: int = 1) -> list[list[int]]:
    """One token after the other, in plain Python; sorted() is stable."""
    chosen = []
    for row in choices:
        groups = [(i * len(row) // num_groups, group) for i, group in enumerate(row.split(len(row) // num_groups))]
        if num_groups > 1:
            groups = sorted(groups, key=lambda g: -float(sum(g[1].sort(descending=True).values[:2])))[:top_groups]
        candidates = [(start + i, float(choice)) for start, group in sorted(groups, key=lambda g: g[0]) for i, choice in enumerate(group)]
        chosen.append([e for e, _ in sorted(candidates, key=lambda c: -c[1])[:top_k]])
    return chosen


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
def test_the_largest_scores_in_order(impl, scoring, tokens, experts, top_k):
    logits = torch.randn(tokens, experts) * 2
    ids = select(logits, top_k, scoring=scoring)
    assert ids.dtype is torch.int64 and ids.tolist() == expected_ids(scores_of(logits, scoring), top_k)
    exact = logits.double().softmax(-1) if scoring == "softmax" else logits.double().sigmoid()
    torch.testing.assert_close(scores_of(logits, scoring).double(), exact, rtol=2e-6, atol=1e-37)


def test_as_many_experts_as_an_id_of_16_bits_names(impl):
    logits = torch.randn(2, 1 << 16)
    assert select(logits, 8).tolist() == expected_ids(scores_of(logits, "softmax"), 8)


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("experts", "num_groups", "top_groups", "top_k"), GROUPS)
def test_bias_and_groups(impl, scoring, experts, num_groups, top_groups, top_k):
    logits, bias = torch.randn(50, experts), torch.randn(experts) / 4
    ids = select(logits, top_k, scoring=scoring, bias_E=bias, num_groups=num_groups, top_groups=top_groups)
    assert ids.tolist() == expected_ids(scores_of(logits, scoring) + bias, top_k, num_groups, top_groups)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)])
def test_the_lower_index_wins_among_equals(impl, groups):
    """Few different logits, so that ties are everywhere, among groups too."""
    logits = torch.randint(3, (200, 64)).float()
    logits[0] = 0.0
    ids = select(logits, 6, scoring="sigmoid", num_groups=groups[0], top_groups=groups[1])
    assert ids.tolist() == expected_ids(scores_of(logits, "sigmoid"), 6, *groups)
    assert ids[0].tolist() == [0, 1, 2, 3, 4, 5]
    zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert select(torch.full((1, 4), -200.0), 4, scoring="sigmoid", bias_E=zeros[0]).tolist() == [[0, 1, 2, 3]]


def test_the_bias_chooses_and_does_not_weigh(impl):
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert select(logits, 1, bias_E=bias).tolist() == [[2]]
    assert weigh(logits, torch.tensor([[2]]), scoring="softmax", normalise=False, scale=1.0).tolist() == [[0.25]]


@pytest.mark.parametrize("scoring", SCORING)
def test_ids_stay_distinct_and_inside_whatever_the_logits_are(impl, scoring):
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0, -torch.nan])
    logits = bad[torch.randint(len(bad), (300, 16))]
    logits[0], logits[1], logits[2] = torch.nan, torch.inf, -torch.inf
    for groups in ((1, 1), (4, 2)):
        ids = select(logits, 8, scoring=scoring, bias_E=bad[torch.randint(len(bad), (16,))], num_groups=groups[0], top_groups=groups[1])
        assert ids.min() >= 0 and ids.max() < 16
        assert (ids.sort().values.diff() > 0).all()


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("experts", [3, 8, 60, 257])
def test_rows_do_not_depend_on_the_batch(impl, scoring, experts):
    logits, bias = torch.randn(70, experts) * 3, torch.randn(experts) / 8
    ids = torch.stack([torch.randperm(experts)[:3] for _ in range(70)])
    assert_row_invariant(lambda rows: select(rows, 3, scoring=scoring, bias_E=bias), logits)
    assert_row_invariant(lambda rows, i: weigh(rows, i, scoring=scoring, normalise=True, scale=2.5), logits, ids)


@pytest.mark.parametrize("scoring", SCORING)
def test_weights_are_divided_by_their_sum_in_slot_order(impl, scoring):
    """The rule, spelled out: the bits of float32 operations one by one, for ids that need not be the chosen ones."""
    logits = torch.randn(40, 12)
    ids = torch.stack([torch.randperm(12)[:5] for _ in range(40)])
    picked = scores_of(logits, scoring).gather(1, ids)
    total = picked[:, 0]
    for k in range(1, 5):
        total = total + picked[:, k]
    assert torch.equal(weigh(logits, ids, scoring=scoring, normalise=True, scale=2.5), picked / (total + 1e-20)[:, None] * 2.5)
    assert torch.equal(weigh(logits, ids, scoring=scoring, normalise=False, scale=2.5), picked * 2.5)
    assert torch.equal(weigh(logits.t().contiguous().t(), ids, scoring=scoring, normalise=False, scale=1.0), picked)


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("normalise", [False, True])
def test_gradients_match_float64(impl, scoring, normalise):
    """Autograd through the definition in float64, and finite differences of the definition, for ids that a replay may bring."""
    logits = torch.randn(9, 10, requires_grad=True)
    ids = torch.stack([torch.randperm(10)[:4] for _ in range(9)])
    (wide,) = doubles(logits)
    reference = ref.weigh(wide, ids, scoring == "sigmoid", normalise, 2.5)
    weights = weigh(logits, ids, scoring=scoring, normalise=normalise, scale=2.5)
    torch.testing.assert_close(weights.double(), reference, rtol=1e-5, atol=1e-7)
    cotangent = torch.randn(9, 4)
    (expected,) = gradients(reference, [wide], cotangent)
    (ours,) = gradients(weights, [logits], cotangent)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-6)
    step = 1e-6 * torch.randn(9, 10, dtype=torch.float64)
    moved = [(ref.weigh(wide.detach() + s, ids, scoring == "sigmoid", normalise, 2.5) * cotangent).sum() for s in (step, -step)]
    torch.testing.assert_close((ours.double() * step).sum() * 2, moved[0] - moved[1], rtol=1e-3, atol=1e-10)
    chosen = torch.zeros(9, 10, dtype=torch.bool).scatter_(1, ids, True)
    # The others move through the softmax's total, unless the weights are divided by their sum (up to rounding, then).
    assert bool(ours[~chosen].abs().max() > 1e-4) == (scoring == "softmax" and not normalise)


def test_what_does_not_fit_is_named(impl):
    logits = torch.randn(3, 8)
    for settings, said in [
        ({"top_k": 9}, "top_k=9.*8 experts.*1 <= top_k <= 8"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 2, "num_groups": 3}, "num_groups=3.*equal groups of at least 2"),
        ({"top_k": 2, "num_groups": 8}, "num_groups=8.*equal groups of at least 2"),
        ({"top_k": 2, "num_groups": 4, "top_groups": 5}, "top_groups <= num_groups"),
        ({"top_k": 2, "top_groups": 2}, "top_groups <= num_groups"),
        ({"top_k": 5, "num_groups": 4, "top_groups": 2}, "1 <= top_k <= 4"),
        ({"top_k": 2, "scoring": "tanh"}, "scoring='tanh'.*softmax, sigmoid"),
        ({"top_k": 2, "bias_E": torch.zeros(7)}, r"bias \[7\].*float32 \[8\]"),
    ]:
        with pytest.raises(ValueError, match=said):
            select(logits, **settings)
    with pytest.raises(ValueError, match=r"logits \[3, 8\] torch.float64.*float32"):
        select(logits.double(), 2)
    assert select(torch.empty(0, 8), 2).shape == (0, 2)
    assert weigh(torch.empty(0, 8), torch.empty(0, 2, dtype=torch.int64), scoring="softmax", normalise=True, scale=1.0).shape == (0, 2)


def test_an_id_outside_is_an_error():
    with pytest.raises(AssertionError, match="token 1 has ids"):
        weigh(torch.randn(2, 4), torch.tensor([[0], [4]]), scoring="softmax", normalise=False, scale=1.0)
