"""Runs the Triton kernels in Triton's interpreter, on the CPU, one process a file: tests/kernels/test_interpreted.py starts them.

The interpreter has three faults (in triton 3.6 and 3.8; test_canary.py keeps them in view). Its dot multiplies the raw 16-bit integers of
bfloat16 operands; its float32 dot is np.matmul of the tile, where a row depends on its neighbours; its cast to bfloat16 cuts the number
off and does not round. `exact_dot` (rank-1 updates in order of k, in float32, from the accumulator on) and `rounding_cast` stand in.
Outputs are full of NaN beforehand (nan_in_new_memory of the parent folder).
"""

import os
import sys
from collections.abc import Callable

# The mode is read when a kernel is decorated, so it has to be set before triton is imported.
assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "each file needs a process of its own"
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

assert triton.knobs.runtime.interpret

DTYPES = [torch.float32, torch.bfloat16]
CHUNKS = (1, 3, 7, 16, 20)
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # half the distance from 1 to the next number: one rounding
stock_dot, stock_cast = interpreter.InterpreterBuilder.create_dot, interpreter.InterpreterBuilder.cast_impl


def widen(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The interpreter's array as float32: it keeps bfloat16 as uint16, the upper half of a float32."""
    if dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def exact_dot(builder, a, b, d, *precision):
    """a @ b + d over k in order, each output by itself: the same bits wherever a row stands in its tile."""
    assert d.data.dtype == np.float32 and a.dtype.is_floating() and b.dtype.is_floating(), (a.dtype, b.dtype, d.dtype)
    left, right, total = widen(a.data, a.dtype), widen(b.data, b.dtype), d.data.copy()
    product = np.empty_like(total)
    with np.errstate(invalid="ignore", over="ignore"):  # infinity and NaN go through, as on a GPU
        for k in range(left.shape[-1]):
            total += np.multiply(left[..., :, k, None], right[..., k, None, :], out=product)
    return interpreter.TensorHandle(total, d.dtype.scalar)


def rounding_cast(builder, x, dtype):
    """The stock cast, but for float32 to bfloat16: torch's rounding (to nearest, ties to even), as on a GPU."""
    if x.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
        rounded = torch.tensor(x.data).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)
    return stock_cast(builder, x, dtype)


if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
    # numpy 2.4 no longer makes a number of an array of one element, as the older interpreters do for the bounds of a range.
    stock_patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        stock_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index

# Checking every integer sum for overflow, which compiled code does not do either, is a quarter of the interpreter's time.
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
interpreter.InterpreterBuilder.create_dot = exact_dot
interpreter.InterpreterBuilder.cast_impl = rounding_cast


def assert_same_bits(actual, expected, message: str = "") -> None:
    """Equal as bits, so that -0 is not 0; and no NaN, which would be memory that nobody wrote. Takes a tensor or a tuple of them."""
    if isinstance(actual, tuple):
        assert len(actual) == len(expected)
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(one, other, f"{message} (output {i})")
        return
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (actual.shape, expected.shape, actual.dtype, expected.dtype)
    assert not actual.isnan().any() and not expected.isnan().any(), f"{message}: NaN"
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    assert torch.equal(actual.contiguous().view(integer), expected.contiguous().view(integer)), message


def assert_row_invariant(op: Callable, *inputs: torch.Tensor, chunks: tuple[int, ...] = CHUNKS) -> None:
    """op gives a row the same bits in the whole batch, in chunks of any size (1: alone), and at another place of the batch.

    Pieces are copied, because the kernels take pointers that are multiples of 16 bytes only.
    """
    rows = len(inputs[0])
    together = op(*inputs)
    for size in chunks:
        pieces = [op(*(x[start : start + size].clone() for x in inputs)) for start in range(0, rows, size)]
        assert_same_bits(_join(pieces), together, f"chunks of {size}")
    rolled = op(*(x.roll(5, 0) for x in inputs))
    back = tuple(y.roll(-5, 0) for y in rolled) if isinstance(rolled, tuple) else rolled.roll(-5, 0)
    assert_same_bits(back, together, "rolled by 5 rows")


def _join(pieces: list):
    return tuple(torch.cat(column) for column in zip(*pieces, strict=True)) if isinstance(pieces[0], tuple) else torch.cat(pieces)


def assert_near(actual: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor | float) -> None:
    """Every element within its own bound of the float64 reference; NaN is outside of every bound."""
    assert reference.dtype is torch.float64 and actual.shape == reference.shape, (reference.dtype, actual.shape, reference.shape)
    error = (actual.double() - reference).abs()
    assert (error <= bound).all(), f"off by {(error - bound).max():.3g} more than allowed, {error.max():.3g} at most"
