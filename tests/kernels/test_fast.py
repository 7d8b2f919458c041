"""The fast ops of --parity off: what computes them, that they agree with the invariant ones, that nobody else meets them.

python -m pytest tests/kernels/test_fast.py
"""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import gradients

from kernels import dispatch
from kernels.attention import packed, packed_attention
from kernels.dispatch import describe, fast, has_flash_attn, use_fast
from kernels.invariance import self_test
from kernels.linear import linear, pack
from kernels.logprob import logprob
from kernels.rmsnorm import rmsnorm, rmsnorm_residual
from kernels.swiglu import swiglu
from miles_core.assets import TINY
from miles_core.model import hf
from miles_core.model.attend import PackedAttend
from rollout import choose_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CU_SEQLENS = torch.tensor([0, 1, 66, 66, 100], dtype=torch.int32)


@pytest.fixture(autouse=True)
def invariant_before_and_after() -> Iterator[None]:
    assert not fast(), "a process starts with the invariant ops"
    yield
    use_fast(False)  # also after a failure


def sdpa(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
    """By a mask over all tokens at once: another way than that of the op."""
    sequence_T = torch.bucketize(torch.arange(len(q_TNH)), CU_SEQLENS, right=True)
    visible = (sequence_T[:, None] == sequence_T).tril()
    return F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q_TNH, k_TKH, v_TKH)), visible, scale=0.3, enable_gqa=True
    ).transpose(0, 1)


def cases() -> dict[str, tuple]:
    """op, what it must be with `use_fast`, inputs."""
    torch.manual_seed(0)
    x, residual, gate, up, weight = (torch.randn(shape) for shape in ((70, 200), (70, 200), (70, 33), (70, 33), (200,)))
    matrix, bias = torch.randn(48, 200) * 0.1, torch.randn(48)
    q, k, v = torch.randn(100, 6, 40), torch.randn(100, 2, 40), torch.randn(100, 2, 40)
    return {
        "linear": (lambda *a: linear(*a), F.linear, (x, matrix, bias)),
        "linear, more dimensions": (lambda *a: linear(*a), F.linear, (x.view(7, 10, 200), matrix)),
        "linear, wide": (lambda *a: linear(*a, wide=True), F.linear, (x, matrix)),
        "rmsnorm": (lambda x, w: rmsnorm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (200,), w, 1e-5), (x, weight)),
        "rmsnorm_residual": (
            lambda *a: torch.stack(rmsnorm_residual(*a, 1e-5)),
            lambda x, r, w: torch.stack([F.rms_norm(x + r, (200,), w, 1e-5), x + r]),
            (x, residual, weight),
        ),
        "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, (gate, up)),
        "packed attention": (lambda *a: packed_attention(*a, CU_SEQLENS, 0.3), sdpa, (q, k, v)),
    }


@pytest.mark.parametrize("name", cases())
def test_a_fast_op_is_torchs_and_agrees_with_the_invariant_one(name: str) -> None:
    op, plain, inputs = cases()[name]
    inputs = [x.requires_grad_() for x in inputs]

    def both(f) -> list[torch.Tensor]:
        y = f(*inputs)
        return [y.detach(), *gradients(y, inputs, torch.linspace(-1, 1, y.numel()).view(y.shape))]

    invariant = both(op)
    use_fast(True)
    found, expected = both(op), both(plain)
    for ours, theirs, before in zip(found, expected, invariant, strict=True):
        torch.testing.assert_close(ours, before, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    if name != "packed attention":
        assert torch.equal(found[0], expected[0]), "the very bits of torch"
    use_fast(False)
    assert all(torch.equal(ours, before) for ours, before in zip(both(op), invariant, strict=True)), "the switch leaves nothing behind"


def test_which_matrix_products_are_whose(impl: str) -> None:
    """A C++ pack keeps the C++ kernel; on the torch path there is none. Logits of bfloat16 are wide, on a GPU (here: shapes only)."""
    x, weight = torch.randn(2, 9, 300)
    invariant, plain = linear(x, weight), F.linear(x, weight)
    assert impl == "torch" or not torch.equal(invariant, plain), "else this shows nothing"
    use_fast(True)
    assert torch.equal(linear(x, weight), plain)
    assert torch.equal(linear(x, weight, None, pack(weight)), invariant if impl == "cpp" else plain)
    meta = torch.empty(9, 300, dtype=torch.bfloat16, device="meta")
    assert linear(meta, meta, wide=True).dtype is torch.float32 and linear(meta, meta, wide=True).shape == (9, 9)
    assert linear(meta, meta).dtype is torch.bfloat16


def test_log_probs_agree() -> None:
    """The row routine stays ours, its logits come from torch."""
    hidden, weight = torch.randn(45, 300, requires_grad=True), (torch.randn(301, 300) * 0.1).requires_grad_()
    arguments = (torch.arange(45), torch.full((45,), 0.8), torch.full((45,), 0.95), torch.full((45,), 30))

    def both() -> list[torch.Tensor]:
        logp, entropy = logprob(hidden, weight, *arguments)
        return [logp.detach(), entropy, *gradients(logp, [hidden, weight], torch.ones(45))]

    invariant = both()
    use_fast(True)
    for ours, before in zip(both(), invariant, strict=True):
        torch.testing.assert_close(ours, before, rtol=1e-4, atol=1e-5)


def scored(model: torch.nn.Module) -> list[torch.Tensor]:
    """Log-probs of two packed sequences, and the gradient of every parameter."""
    tokens = torch.arange(127) * 7 % model.config.vocab_size
    positions = torch.cat([torch.arange(90), torch.arange(37)])
    attend = PackedAttend(torch.tensor([0, 90, 127], dtype=torch.int32), model.config.head_dim**-0.5)
    sampling = (torch.ones(127), torch.ones(127), torch.zeros(127, dtype=torch.int64))
    logp, _ = model(tokens, positions, attend, torch.arange(127), tokens.roll(-1), sampling)
    return [logp.detach(), *torch.autograd.grad(logp.mean(), list(model.parameters()))]


def test_only_parity_off_is_fast() -> None:
    """The embedded policy: "off" agrees to float32 rounding, "strict" and "report" have the same bits before and after."""
    model = hf.load(TINY)
    choose_kernels(model.config, CPU, torch.float32, "strict")
    assert not fast()
    invariant = scored(model)
    choose_kernels(model.config, CPU, torch.float32, "off")
    assert fast()
    for ours, before in zip(found := scored(model), invariant, strict=True):
        torch.testing.assert_close(ours, before, rtol=1e-3, atol=1e-5)
    assert not torch.equal(found[0], invariant[0])
    for parity in ("report", "strict"):
        choose_kernels(model.config, CPU, torch.float32, parity)
        assert not fast() and all(torch.equal(ours, before) for ours, before in zip(scored(model), invariant, strict=True))


def test_the_self_test_is_not_of_fast_ops() -> None:
    use_fast(True)
    with pytest.raises(AssertionError, match="the self-test is of the invariant ops"):
        self_test([(24, 8)], head_dim=8, num_heads=2, num_kv_heads=1, vocab=16)


def test_what_the_start_up_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fast" not in describe(CPU, torch.float32, 64)
    use_fast(True)
    rest = "embedding: a copy; fast ops, their results depend on the batch"
    assert describe(CPU, torch.float32, 64) == (
        "linear, rmsnorm, swiglu: torch; linear of packed weights: C++; packed attention: torch SDPA; "
        f"paged attention, rope, logprob, sample: C++; {rest}"
    )
    ours = f"paged attention, rope, logprob, sample: Triton; {rest}"
    for installed, dtype, head_dim, attention in (
        (True, torch.bfloat16, 128, "flash-attn"),
        (True, torch.float32, 128, "torch SDPA"),
        (True, torch.bfloat16, 512, "torch SDPA"),
        (False, torch.bfloat16, 128, "torch SDPA"),
    ):
        monkeypatch.setattr(dispatch, "has_flash_attn", lambda installed=installed: installed)
        assert describe(CUDA, dtype, head_dim) == f"linear, rmsnorm, swiglu: torch; packed attention: {attention}; {ours}"


@pytest.mark.parametrize("deterministic", [True, False])
def test_how_flash_attn_is_called(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    """It is not installed here: a stand-in notes what it is given. A run that must repeat itself asks it to."""
    assert not has_flash_attn() and "flash_attn" not in sys.modules
    torch.use_deterministic_algorithms(deterministic)
    calls = []
    stand_in = SimpleNamespace(flash_attn_varlen_func=lambda *args, **kwargs: calls.append((args, kwargs)) or args[0])
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    monkeypatch.setattr(packed, "uses_flash_attn", lambda device, dtype, head_dim: (device, dtype, head_dim) == (CPU, torch.float32, 40))
    use_fast(True)
    q, k, v = torch.randn(100, 6, 40), torch.randn(100, 2, 40), torch.randn(100, 2, 40)
    assert packed_attention(q, k, v, CU_SEQLENS, 0.3) is q
    ((args, kwargs),) = calls
    assert all(a is b for a, b in zip(args[:5], (q, k, v, CU_SEQLENS, CU_SEQLENS), strict=True)) and args[5:] == (65, 65)
    assert kwargs == {"softmax_scale": 0.3, "causal": True, "deterministic": deterministic}
