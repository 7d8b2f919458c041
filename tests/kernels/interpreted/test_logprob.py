"""kernels/logprob/triton.py: the kept set, the draw and the log-prob by their definition, and bits that do not depend on the batch.

Run: pytest tests/kernels/interpreted/test_logprob.py
"""

import pytest
import torch
from conftest import assert_near, assert_row_invariant, assert_same_bits

from kernels.logprob import ref
from kernels.logprob.triton import token_rows

# temperature, top_p, top_k
SETTINGS = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.9, 0), (0.8, 1.0, 5), (1.0, 0.8, 20), (0.5, 0.3, 1), (1.0, 1e-6, 0), (0.0, 0.5, 3)]
PLAIN = [setting for setting in SETTINGS if setting[1:] == (1.0, 0) or setting[0] == 0]


def mixed(count: int, settings: list[tuple[float, float, int]] = SETTINGS) -> list[torch.Tensor]:
    """Rows with different settings side by side."""
    return [torch.tensor(column)[torch.arange(count) % len(settings)] for column in zip(*settings, strict=True)]


def same(count: int, temperature: float, top_p: float, top_k: int) -> list[torch.Tensor]:
    return mixed(count, [(temperature, top_p, top_k)])


def kept(logits: torch.Tensor, temperature: float, top_p: float, top_k: int, target: int | None) -> torch.Tensor:
    """The kept set of one row, by the words of its definition."""
    vocab = len(logits)
    if temperature == 0:
        return torch.ones(vocab, dtype=torch.bool)
    z = logits / temperature
    order = sorted(range(vocab), key=lambda i: (-z[i].item(), i))[: top_k or vocab]
    p = (z[order].double() - z[order[0]].double()).exp()
    count = 1 if top_p < 1 else len(order)
    while count < len(order) and p[:count].sum() < top_p * p.sum():
        count += 1
    keep = torch.zeros(vocab, dtype=torch.bool)
    keep[order[:count]] = True
    if target is not None:
        keep[target] = True
    return keep


def reference(logits: torch.Tensor, sampling: list[torch.Tensor], targets: torch.Tensor | None) -> torch.Tensor:
    """z of every row, with float64 values and -inf outside the kept set."""
    rows = zip(logits, *(x.tolist() for x in sampling), targets.tolist() if targets is not None else [None] * len(logits), strict=True)
    keep = torch.stack([kept(*row) for row in rows])
    z = logits.double() / torch.where(sampling[0] == 0, 1.0, sampling[0]).double()[:, None]
    return z.masked_fill(~keep, -torch.inf)


@pytest.mark.parametrize(("count", "vocab"), [(16, 50), (8, 333), (8, 4500), (3, 1)])
def test_scores_match_float64(count, vocab):
    """One block and several, the last one not full."""
    logits, targets, sampling = torch.randn(count, vocab) * 2, torch.randint(vocab, (count,)), mixed(count)
    token, logp, entropy, z = token_rows(logits, *sampling, targets_M=targets, want_z=True)
    expected = reference(logits, sampling, targets)
    log_p = expected.log_softmax(1)
    assert_same_bits(token, targets)
    assert torch.equal(z.isfinite(), expected.isfinite())
    assert_near(logp, log_p.gather(1, targets[:, None]).squeeze(1), 5e-6)
    assert_near(entropy, -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0)).sum(1), 5e-6)
    assert_same_bits(z, torch.where(expected.isfinite(), logits / torch.where(sampling[0] == 0, 1.0, sampling[0])[:, None], -torch.inf))


@pytest.mark.parametrize(("count", "vocab"), [(16, 50), (8, 333), (8, 4500)])
def test_draws_are_the_inverse_distribution_function(count, vocab):
    logits, noise, sampling = torch.randn(count, vocab) * 2, torch.rand(count, dtype=torch.float64), mixed(count)
    token, logp, _, z = token_rows(logits, *sampling, uniform_M=noise, want_z=True)
    expected = reference(logits, sampling, None)
    assert torch.equal(z.isfinite(), expected.isfinite())
    drawn = torch.where(sampling[0] == 0, logits.argmax(1), ref.draw(expected, noise))
    assert torch.equal(token, drawn)
    assert_near(logp, expected.log_softmax(1).gather(1, token[:, None]).squeeze(1), 5e-6)


def test_every_token_gets_exactly_its_share():
    """Over an even grid of noise, each token is drawn in proportion to its probability; dropped tokens never."""
    p = torch.tensor([0.125, 0.5, 0.0625, 0.25, 0.0625])
    grid = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
    logits = p.log().expand(16, 5).contiguous()
    for truncation, counts in (((1.0, 0), [2, 8, 1, 4, 1]), ((0.7, 0), [0, 11, 0, 5, 0])):
        token, logp, _ = token_rows(logits, *same(16, 1.0, *truncation), uniform_M=grid)
        assert token.tolist() == sorted(token.tolist()), "in vocabulary order"
        assert torch.bincount(token, minlength=5).tolist() == counts, truncation
        torch.testing.assert_close(logp.exp(), p[token] / p[token.unique()].sum())


def test_noise_on_a_boundary_takes_the_next_token():
    """A token's interval is closed below and open above; the largest noise takes the last token that has weight."""
    for vocab in (4, 20):
        grid = torch.arange(vocab, dtype=torch.float64) / vocab
        token = token_rows(torch.zeros(vocab, vocab), *same(vocab, 1.0, 1.0, 0), uniform_M=grid)[0]
        assert token.tolist() == list(range(vocab))
    logits = torch.tensor([[0.0, 1.0, -1.0, 5.0, 0.5, -200.0] + [-torch.inf] * 3000])
    top, zero = torch.tensor([1 - 2.0**-53], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for top_k, noise, expected in ((0, top, 4), (2, top, 3), (0, zero, 0), (2, zero, 1)):
        assert token_rows(logits, *same(1, 1.0, 1.0, top_k), uniform_M=noise)[0].item() == expected


def test_equal_logits_are_kept_by_lowest_id():
    def kept_by(logits: list[float], top_p: float, top_k: int, target: int) -> list[bool]:
        z = token_rows(torch.tensor([logits]), *same(1, 1.0, top_p, top_k), targets_M=torch.tensor([target]), want_z=True)[3]
        return z[0].isfinite().nonzero().flatten().tolist()

    assert kept_by([1.0, 3.0, 3.0, 2.0, 3.0, 0.0], 1.0, 2, 1) == [1, 2]
    assert kept_by([1.0, 3.0, 3.0, 2.0, 3.0, 0.0], 0.3, 0, 5) == [1, 2, 5]  # two of the three largest weigh 0.57, one 0.29
    assert kept_by([-0.0, 0.0, -0.0, 0.0], 1.0, 3, 0) == [0, 1, 2]  # the two zeros are equal
    assert kept_by([0.0, 0.0, 0.0, 0.0], 0.5, 3, 0) == [0, 1]  # top_p is a share of the three
    assert kept_by([-torch.inf, 2.0, -torch.inf, 1.0], 1.0, 3, 1) == [1, 3]
    assert kept_by([0.0, 1.0, 2.0], 0.0, 0, 0) == [0, 2]  # the largest is kept even for top_p 0, and the target
    assert kept_by([5.0] * 3000, 1.0, 2500, 0) == list(range(2500))  # across blocks


def test_temperature_zero_takes_the_lowest_of_the_largest():
    logits = torch.randn(4, 3000).clamp(max=1.0)
    logits[:, [7, 31, 2999]] = 1.0
    sampling = same(4, 0.0, 0.1, 1)
    token, logp, _ = token_rows(logits, *sampling, uniform_M=torch.rand(4, dtype=torch.float64))
    assert torch.equal(token, logits.argmax(1)) and torch.equal(logits.gather(1, token[:, None]), torch.ones(4, 1))
    assert_near(logp, logits.double().log_softmax(1).gather(1, token[:, None]).squeeze(1), 5e-6)


@pytest.mark.parametrize("vocab", [301, 2500])
def test_the_samplers_log_probs_are_the_scorers_bits(vocab):
    """One compiled kernel does both; what is drawn from the kept set is scored by the same kept set."""
    logits, sampling = torch.randn(8, vocab) * 2, mixed(8)
    token, *drawn = token_rows(logits, *sampling, uniform_M=torch.rand(8, dtype=torch.float64))
    assert_same_bits(tuple(token_rows(logits, *sampling, targets_M=token)[1:]), tuple(drawn))


@pytest.mark.parametrize(("settings", "count"), [(SETTINGS, 9), (PLAIN, 25)])
def test_bits_do_not_depend_on_the_batch(settings, count):
    logits, sampling, noise = torch.randn(count, 301), mixed(count, settings), torch.rand(count, dtype=torch.float64)
    chunks = (1, 3, 7, 16, 20) if count > 20 else (1,)
    assert_row_invariant(lambda x, t, p, k, u: token_rows(x, t, p, k, uniform_M=u, want_z=False), logits, *sampling, noise, chunks=chunks)
    targets = torch.randint(301, (count,))
    assert_row_invariant(lambda x, t, p, k, y: token_rows(x, t, p, k, targets_M=y), logits, *sampling, targets, chunks=chunks)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_bad_rows_give_nan_and_leave_the_others_alone():
    logits, targets = torch.randn(6, 40), torch.tensor([0, 1, 2, 3, 40, -1])
    good = token_rows(logits[:1].clone(), *same(1, 1.0, 1.0, 0), targets_M=targets[:1].clone())
    logits[1, 7], logits[2, 7], logits[3] = torch.nan, torch.inf, -torch.inf
    _, *scores = token_rows(logits, *same(6, 1.0, 1.0, 0), targets_M=targets)
    for x, alone in zip(scores, good[1:], strict=True):
        assert x[1:].isnan().all() and x[0] == alone[0]
    for sampling in (same(4, 1.0, 1.0, 0), same(4, 1.0, 0.5, 5), same(4, 0.0, 1.0, 0)):
        token, *scores = token_rows(logits[:4].clone(), *sampling, uniform_M=torch.rand(4, dtype=torch.float64))
        assert all(x[1:].isnan().all() and x[0].isfinite() for x in scores) and ((token >= 0) & (token < 40)).all()


def test_the_logits_are_left_alone_and_no_rows_are_none():
    logits = torch.randn(3, 40)
    before = logits.clone()
    token_rows(logits, *same(3, 0.5, 1.0, 0), uniform_M=torch.rand(3, dtype=torch.float64), want_z=True)
    assert_same_bits(logits, before)
    empty = [x[:0].clone() for x in same(3, 1.0, 1.0, 0)]
    assert [len(x) for x in token_rows(logits[:0].clone(), *empty, targets_M=torch.empty(0, dtype=torch.int64))] == [0, 0, 0]


def test_what_is_not_supported_is_named():
    logits, sampling, targets = torch.randn(2, 8), same(2, 1.0, 1.0, 0), torch.tensor([0, 1])
    noise = torch.rand(2, dtype=torch.float64)
    for both in ({}, {"targets_M": targets, "uniform_M": noise}, {"targets_M": targets.int()}, {"uniform_M": noise.float()}):
        with pytest.raises(ValueError, match="token_rows: .* is not supported; supported: logits float32"):
            token_rows(logits, *sampling, **both)
    with pytest.raises(ValueError, match="contiguous"):
        token_rows(logits.t().contiguous().t(), *sampling, targets_M=targets)


def test_shapes_are_known_without_running():
    logits, *sampling, noise = (x.to("meta") for x in (torch.randn(2, 8), *same(2, 1.0, 1.0, 0), torch.rand(2, dtype=torch.float64)))
    token, logp, entropy, z = token_rows(logits, *sampling, uniform_M=noise, want_z=True)
    assert token.dtype is torch.int64 and logp.shape == entropy.shape == (2,) and z.shape == (2, 8)
