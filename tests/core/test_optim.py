"""The optimizer on one process: AdamW, clipping and schedule against numbers worked out by hand, and gradients it refuses.

    python -m pytest tests/core/test_optim.py
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from miles_core.optim import Optimizer, grad_norm, learning_rate

PLAIN = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0, "max_grad_norm": 0.0}
PLAIN |= {"schedule": "constant", "warmup_steps": 0, "total_steps": 10}


def model_with(**gradients: list) -> nn.Module:
    """One parameter, all ones, for each gradient."""
    model = nn.Module()
    for name, gradient in gradients.items():
        value = torch.tensor(gradient, dtype=torch.float32)
        parameter = nn.Parameter(torch.ones_like(value))
        parameter.grad = value
        model.register_parameter(name, parameter)
    return model


def test_two_adamw_steps_by_hand() -> None:
    """Gradients 0.5, then -1, on a value of 1; lr 0.1, betas 0.9 / 0.99, eps 1e-8.

    Step 1: m / (1 - 0.9) = 0.5, v / (1 - 0.99) = 0.25 -> 1 - 0.1 * 0.5 / 0.5 = 0.9.
    Step 2: m = 0.9 * 0.05 - 0.1 = -0.055, / 0.19 = -0.2894737; v = 0.99 * 0.0025 + 0.01 = 0.012475, / 0.0199 = 0.6268844, root 0.7917603
            -> 0.9 + 0.1 * 0.2894737 / 0.7917603 = 0.9365609.
    """
    model = model_with(value=[0.5])
    optimizer = Optimizer(model, **PLAIN)
    assert optimizer.step(0) == 0.5
    assert model.value.item() == pytest.approx(0.9, abs=1e-6)
    assert model.value.grad is None
    model.value.grad = torch.tensor([-1.0])
    assert optimizer.step(1) == 1.0
    assert model.value.item() == pytest.approx(0.9365609, abs=1e-6)


def test_weight_decay_on_matrices_only() -> None:
    model = model_with(matrix=[[0.0, 0.0]], norm=[0.0, 0.0])
    Optimizer(model, **{**PLAIN, "weight_decay": 0.5}).step(0)
    assert model.matrix.tolist() == [[pytest.approx(0.95)] * 2]  # 1 - lr * decay
    assert model.norm.tolist() == [1.0, 1.0]


def clipped_gradients(max_grad_norm: float) -> tuple[float, list[float]]:
    """Gradients 3 and (0, 4): norm 5. beta1 = 0 leaves exactly the gradient that AdamW saw in its first moment."""
    model = model_with(first=[3.0], second=[[0.0, 4.0]])
    optimizer = Optimizer(model, **{**PLAIN, "max_grad_norm": max_grad_norm, "betas": (0.0, 0.99)})
    norm = optimizer.step(0)
    return norm, [x for p in (model.first, model.second) for x in optimizer.adamw.state[p]["exp_avg"].flatten().tolist()]


@pytest.mark.parametrize(
    ("max_grad_norm", "seen"),
    [(1.0, [0.6, 0.0, 0.8]), (2.5, [1.5, 0.0, 2.0]), (5.0, [3.0, 0.0, 4.0]), (9.0, [3.0, 0.0, 4.0]), (0.0, [3.0, 0.0, 4.0])],
)
def test_clipping_scales_the_whole_gradient_to_the_norm(max_grad_norm: float, seen: list[float]) -> None:
    norm, gradients = clipped_gradients(max_grad_norm)
    assert norm == 5.0, "the norm before clipping is returned"
    assert gradients == pytest.approx(seen, abs=2e-6)


def test_norm_of_a_large_gradient_is_exact_to_ten_digits() -> None:
    """A float32 accumulation is off by 1e-5 and more at this size."""
    gradient = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(gradient))
    model.weight.grad = gradient
    assert grad_norm(dict(model.named_parameters())) == pytest.approx(math.sqrt(gradient.double().square().sum().item()), rel=1e-10)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # 4 warm-up steps, then 8 of decay: factors 1/4 .. 1, then 1, 7/8, ... or (1 + cos(pi k / 8)) / 2
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.9619398, 0.8535534, 0.6913417, 0.5, 0.3086583, 0.1464466, 0.0380602]),
    ],
)
def test_schedule(schedule: str, expected: list[float]) -> None:
    rates = [learning_rate(v, peak=2.0, schedule=schedule, warmup_steps=4, total_steps=12) for v in range(12)]
    assert rates == pytest.approx([2.0 * factor for factor in expected], abs=1e-6)


def test_schedule_edges() -> None:
    assert learning_rate(0, peak=1.0, schedule="cosine", warmup_steps=0, total_steps=1) == 1.0
    assert learning_rate(3, peak=1.0, schedule="linear", warmup_steps=8, total_steps=4) == 0.5, "a run shorter than its warm-up"
    assert learning_rate(20, peak=1.0, schedule="linear", warmup_steps=0, total_steps=10) == 0.0, "beyond the planned end"


def test_the_schedule_is_what_the_step_uses() -> None:
    """The first AdamW step moves a value by the learning rate: 0.1 * 1 / 4, wherever a resumed run starts."""
    for version, factor in ((0, 0.25), (2, 0.75), (7, 1.0)):
        model = model_with(value=[3.0])
        optimizer = Optimizer(model, **{**PLAIN, "warmup_steps": 4})
        optimizer.step(version)
        assert 1.0 - model.value.item() == pytest.approx(0.1 * factor, rel=1e-5)
        assert optimizer.learning_rate(version) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_run_and_changes_nothing(bad: float) -> None:
    model = model_with(fine=[1.0], broken=[[1.0, bad]])
    optimizer = Optimizer(model, **{**PLAIN, "max_grad_norm": 1.0})
    with pytest.raises(RuntimeError, match=f"step 8: the gradient norm is {bad}; not finite on this rank: broken$"):
        optimizer.step(7)
    assert model.fine.tolist() == [1.0] and model.broken.tolist() == [[1.0, 1.0]]
    assert not optimizer.adamw.state


def test_a_parameter_without_gradient_is_named() -> None:
    model = model_with(used=[1.0], forgotten=[1.0])
    model.forgotten.grad = None
    with pytest.raises(AssertionError, match="forgotten got no gradient"):
        Optimizer(model, **PLAIN).step(0)
