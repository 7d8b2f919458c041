"""kernels.sample: Philox known answers, exact inverse CDF, log-probs equal to the trainer's. Run: pytest tests/kernels/test_sample.py"""

import pytest
import torch
from conftest import assert_row_invariant
from test_logprob import SETTINGS, settings

from kernels.cpu import select
from kernels.linear import linear
from kernels.logprob import logprob
from kernels.sample import sample, uniform

# counter, key and first two result words of philox4x32-10 in kat_vectors of the Random123 distribution (Salmon et al., SC'11)
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(impl, counter, key, words):
    group = (counter[0] | counter[1] << 32) - (1 << 64 if counter[1] >> 31 else 0)  # as a signed 64-bit number
    u = uniform(key[0] | key[1] << 32, torch.tensor([group]), torch.tensor([counter[2]]), torch.tensor([counter[3]]))
    assert u.tolist() == [((words[0] >> 5 << 26) | (words[1] >> 6)) / 2**53]


def test_noise_is_the_same_in_both_implementations(impl):
    group, sample_index, position = torch.arange(1000) * 12345678901, torch.arange(1000) % 8, torch.arange(1000) * 3
    ours = uniform(2**63 + 5, group, sample_index, position)
    select("cpp")
    assert torch.equal(ours, uniform(2**63 + 5, group, sample_index, position))
    assert 0 <= ours.min() and ours.max() < 1 and abs(ours.mean() - 0.5) < 0.05 and ours.unique().numel() == 1000
    assert_row_invariant(lambda *x: uniform(7, *x), group, sample_index, position)


def test_every_token_gets_exactly_its_share(impl):
    """Over an even grid of noise, each token is drawn in proportion to its probability; dropped tokens never."""
    p = torch.tensor([0.125, 0.5, 0.0625, 0.25, 0.0625])
    grid = (torch.arange(160, dtype=torch.float64) + 0.5) / 160
    logits = p.log().expand(160, 5).contiguous()

    def counts(*truncation) -> list[int]:
        token, logp = sample(logits, *settings(160, 1.0, *truncation), grid)
        assert token.tolist() == sorted(token.tolist()), "inverse CDF in vocabulary order"
        torch.testing.assert_close(logp.exp(), p[token] / p[token.unique()].sum())
        return torch.bincount(token, minlength=5).tolist()

    assert counts(1.0, 0) == [20, 80, 10, 40, 10]
    assert counts(1.0, 2) == [0, 107, 0, 53, 0]
    assert counts(0.7, 0) == [0, 107, 0, 53, 0]
    assert counts(1.0, 4) == [21, 86, 10, 43, 0]
    assert counts(0.5, 0) == [0, 160, 0, 0, 0]


def test_largest_noise_takes_the_last_kept_token(impl):
    logits = torch.tensor([[0.0, 1.0, -1.0, 5.0, 0.5, -200.0] + [-torch.inf] * 30])
    top = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert sample(logits, *settings(1, 1.0, 1.0, 0), top)[0].item() == 4
    assert sample(logits, *settings(1, 1.0, 1.0, 2), top)[0].item() == 3
    assert sample(logits, *settings(1, 1.0, 1.0, 0), torch.zeros(1, dtype=torch.float64))[0].item() == 0


def test_noise_on_a_boundary_takes_the_next_token(impl):
    """The cumulative weight must exceed uniform x total: a token's interval is closed below and open above."""
    for vocab in (4, 40):
        grid = torch.arange(vocab, dtype=torch.float64) / vocab
        assert sample(torch.zeros(vocab, vocab), *settings(vocab, 1.0, 1.0, 0), grid)[0].tolist() == list(range(vocab))


def test_temperature_zero_takes_the_lowest_of_the_largest(impl):
    logits = torch.randn(5, 100).clamp(max=1.0)
    logits[:, [7, 31, 99]] = 1.0
    token, logp = sample(logits, *settings(5, 0.0, 0.1, 1), torch.rand(5, dtype=torch.float64))
    assert torch.equal(token, logits.argmax(1).clamp(max=7)) and torch.equal(logits.gather(1, token[:, None]), torch.ones(5, 1))
    torch.testing.assert_close(logp, logits.log_softmax(1).gather(1, token[:, None]).squeeze(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("vocab", "dim"), [(301, 40), (5000, 24)])
def test_log_probs_are_the_trainers_bits(impl, vocab, dim):
    """What the sampler reports is what kernels.logprob computes for the drawn token, for every setting, drawn in any batch."""
    count = 64
    hidden, weight = torch.randn(count, dim), torch.randn(vocab, dim) * 2 / dim**0.5
    mixed = [torch.tensor(column)[torch.arange(count) % len(SETTINGS)] for column in zip(*SETTINGS, strict=True)]
    noise = torch.rand(count, dtype=torch.float64)
    logits = linear(hidden, weight)
    token, logp = sample(logits, *mixed, noise)
    assert torch.equal(logp, logprob(hidden, weight, token, *mixed)[0])
    assert_row_invariant(lambda *x: sample(*x)[0], logits, *mixed, noise)


def test_the_logits_are_left_alone(impl):
    logits = torch.randn(3, 40)
    before = logits.clone()
    sample(logits, *settings(3, 0.5, 0.5, 3), torch.rand(3, dtype=torch.float64))
    assert torch.equal(logits, before)


def test_nan_is_refused(impl):
    with pytest.raises(AssertionError, match="not finite"):
        sample(torch.full((1, 20), torch.nan), *settings(1, 1.0, 1.0, 0), torch.rand(1, dtype=torch.float64))
