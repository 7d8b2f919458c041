"""kernels.logprob: float64 reference with every truncation, gradients, invariance. Run: pytest tests/kernels/test_logprob.py"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_row_invariant, doubles, gradients

import kernels.logprob as module
from kernels.linear import pack
from kernels.logprob import logprob, rows

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.9, 0), (0.8, 1.0, 5), (1.0, 0.8, 20), (0.5, 0.3, 1), (1.0, 1e-6, 0), (0.0, 0.5, 3)]


def settings(count: int, temperature: float, top_p: float, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.full((count,), temperature), torch.full((count,), top_p), torch.full((count,), top_k)


def kept(logits: np.ndarray, temperature: float, top_p: float, top_k: int, target: int) -> np.ndarray:
    """The kept set of one row, by the words of its definition."""
    vocab = len(logits)
    if temperature == 0:
        return np.ones(vocab, bool)
    order = sorted(range(vocab), key=lambda i: (-logits[i], i))[: top_k or vocab]
    p = np.exp((logits[order] - logits[order[0]]) / temperature)
    count = 1 if top_p < 1 else len(order)
    while count < len(order) and p[:count].sum() < top_p * p.sum():
        count += 1
    keep = np.zeros(vocab, bool)
    keep[order[:count]] = keep[target] = True
    return keep


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
@pytest.mark.parametrize(("count", "vocab", "dim"), [(13, 50, 24), (5, 333, 40)])
def test_forward_and_gradients_match_float64(impl, monkeypatch, temperature, top_p, top_k, count, vocab, dim):
    monkeypatch.setattr(module, "CHUNK_LOGITS", 1)  # the smallest chunks: 16 rows
    hidden, weight = torch.randn(count, dim, requires_grad=True), (torch.randn(vocab, dim) / dim**0.5).requires_grad_()
    targets = torch.randint(vocab, (count,))
    wide_hidden, wide_weight = doubles(hidden, weight)
    logits = wide_hidden @ wide_weight.t()
    keep = np.stack([kept(x, temperature, top_p, top_k, t) for x, t in zip(logits.detach().numpy(), targets.tolist(), strict=True)])
    scaled = (logits / (temperature or 1)).masked_fill(~torch.from_numpy(keep), -torch.inf)
    log_p = scaled.log_softmax(1)
    reference = log_p.gather(1, targets[:, None]).squeeze(1)
    logp, entropy = logprob(hidden, weight, targets, *settings(count, temperature, top_p, top_k))
    torch.testing.assert_close(logp.double(), reference, rtol=0, atol=2e-5)
    expected_entropy = -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0)).sum(1)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=2e-5)
    cotangent = torch.randn(count)
    ours, expected = gradients(logp, [hidden, weight], cotangent), gradients(reference, [wide_hidden, wide_weight], cotangent)
    for grad, exact in zip(ours, expected, strict=True):
        torch.testing.assert_close(grad.double(), exact, rtol=0, atol=2e-5)
    assert not entropy.requires_grad


def test_equal_logits_are_kept_by_lowest_id(impl):
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 0.0]])
    z = torch.empty(1, 6)
    rows(logits, *settings(1, 1.0, 1.0, 2), targets_M=torch.tensor([1]), z_MV=z)
    assert z.isfinite().tolist() == [[False, True, True, False, False, False]]
    rows(logits, *settings(1, 1.0, 0.3, 0), targets_M=torch.tensor([5]), z_MV=z)  # two of the three largest weigh 0.57, one 0.29
    assert z.isfinite().tolist() == [[False, True, True, False, False, True]]


@torch.no_grad()
def test_bits_do_not_depend_on_the_batch(impl):
    """Rows with different settings side by side, chunks of every size, packed weight or not."""
    count, vocab, dim = 70, 301, 40
    hidden, weight, targets = torch.randn(count, dim), torch.randn(vocab, dim), torch.randint(vocab, (count,))
    mixed = [torch.tensor(column)[torch.arange(count) % len(SETTINGS)] for column in zip(*SETTINGS, strict=True)]
    for packed in (None, pack(weight)):
        for output in (0, 1):
            assert_row_invariant(lambda *x, o=output, p=packed: logprob(x[0], weight, *x[1:], packed=p)[o], hidden, targets, *mixed)


@torch.no_grad()
def test_bits_do_not_depend_on_chunks_or_threads(impl, monkeypatch, two_threads):
    hidden, weight, targets = torch.randn(50, 200), torch.randn(150, 200), torch.randint(150, (50,))
    whole = logprob(hidden, weight, targets, *settings(50, 0.9, 0.9, 0))
    monkeypatch.setattr(module, "CHUNK_LOGITS", 1)
    chunked = logprob(hidden, weight, targets, *settings(50, 0.9, 0.9, 0))
    assert torch.equal(whole[0], chunked[0]) and torch.equal(whole[1], chunked[1])
    two_threads()
    assert impl == "torch" or torch.equal(whole[0], logprob(hidden, weight, targets, *settings(50, 0.9, 0.9, 0))[0])


def test_bad_rows_are_refused(impl):
    hidden, weight = torch.randn(3, 8), torch.randn(20, 8)
    hidden[1, 0] = torch.nan
    with pytest.raises(AssertionError, match="not finite"):
        logprob(hidden, weight, torch.tensor([0, 1, 2]), *settings(3, 1.0, 1.0, 0))
    if impl == "cpp":
        with pytest.raises(AssertionError, match="row 2: target outside"):
            logprob(torch.randn(3, 8), weight, torch.tensor([0, 19, 20]), *settings(3, 1.0, 1.0, 0))


PEAK = """
from pathlib import Path
import torch
from kernels.logprob import logprob

def resident(field):
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)).split()[1]) * 1024

def step(tokens, vocab):
    hidden, weight = torch.randn(tokens, 64, requires_grad=True), torch.randn(vocab, 64, requires_grad=True)
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)  # memory of the results is not counted
    ones, off = torch.ones(tokens), torch.zeros(tokens, dtype=torch.int64)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    logprob(hidden, weight, off, ones, ones, off)[0].sum().backward()
    return resident("VmHWM") - before

torch.set_num_threads(1)
step(16, 100)
print(step(2048, 49152))
"""


def test_peak_memory_is_a_quarter_of_the_logits():
    """Forward and backward of 2,048 tokens over a vocabulary of 49,152, whose float32 logits would take 403 MB."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # so that the process holds what is alive, and nothing that was freed
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, cwd=ROOT, timeout=120, env=env)
    assert run.returncode == 0, run.stderr
    assert 0 < int(run.stdout) < 0.25 * 2048 * 49152 * 4, f"{int(run.stdout) / 2**20:.0f} MiB"
