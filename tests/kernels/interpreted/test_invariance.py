"""The start-up test over the Triton kernels: it passes, and would find a Triton that breaks one of them.

python -m pytest tests/kernels/interpreted/test_invariance.py
"""

import re
from importlib import import_module

import pytest
import torch
import triton

from kernels import invariance
from kernels.dispatch import triton_on_cpu
from kernels.invariance import self_test

SHAPES = {"linear_shapes": [(24, 24)], "head_dim": 16, "num_heads": 2, "num_kv_heads": 1, "vocab": 30, "dtype": torch.bfloat16}
FAULTY = {  # folder and function of the kernel -> what the error names
    ("linear", "linear"): "linear 24 x 24: 37 rows together and 7 at a time",
    ("rmsnorm", "rmsnorm"): "rmsnorm 24: 37 rows together and 7 at a time",
    ("rmsnorm", "rmsnorm_residual"): "rmsnorm_residual 24: 37 rows together and 7 at a time",
    ("swiglu", "swiglu"): "swiglu 24: 37 rows together and 7 at a time",
    ("rope", "rope"): "rope 16: 37 rows together and 7 at a time",
    ("attention", "paged_attention"): "attention packed and in chunks of 7",
    ("logprob", "token_rows"): "log-probs over 30: 12 rows together and 7 at a time",
}


def test_it_passes() -> None:
    with triton_on_cpu():
        self_test(**SHAPES)


@pytest.mark.parametrize("kernel", FAULTY, ids=lambda kernel: kernel[1])
def test_a_kernel_that_depends_on_the_batch_is_named_with_the_version_of_triton(
    kernel: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, function = kernel
    module = import_module(f"kernels.{folder}.triton")
    sound = getattr(module, function)

    def faulty(x: torch.Tensor, *args: object):
        """Another result where there are seven rows, as another tile would give."""
        y, scale = sound(x, *args), 1.0 + (len(x) == 7)
        return tuple(part * scale if part.is_floating_point() else part for part in y) if isinstance(y, tuple) else y * scale

    monkeypatch.setattr(module, function, faulty)
    monkeypatch.setattr(invariance, "_passed", set())  # what has passed is not tested again
    begin = f"the triton kernels depend on the batch on this machine: {FAULTY[kernel]} differ by "
    with triton_on_cpu(), pytest.raises(ValueError, match=f"^{re.escape(begin)}") as error:
        self_test(**SHAPES)
    assert f"or of triton {triton.__version__}: try another version, or --device cpu" in str(error.value)
