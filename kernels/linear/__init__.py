"""Linear layer whose every output is the same bits whatever the batch.

On a GPU one Triton kernel with fixed tiles (`triton.py`). C++: each output is one chain of fused multiply-adds over k in order, restarted
every 192 terms, the partial sums added in order, and owned by one thread. How many rows and columns share a tile decides the speed only.
Forward invariant; backward is plain torch.

Legend: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.cpu.loader import load
from kernels.dispatch import dense, fast, on_triton
from kernels.linear import ref

PANEL = 16  # output columns of one packed panel


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the order the C++ kernel reads it: float32 [ceil(N / 16), K, 16], or None where another one reads it as it is.

    Valid until the weight changes. Changes that torch counts in `_version` are caught; writes through `.data` or numpy are not.
    """

    panels: torch.Tensor | None
    pointer: int | None
    weight: torch.Tensor
    version: int

    def check(self, weight_NK: torch.Tensor) -> None:
        """Assert that this is the pack of `weight_NK` as it is now."""
        assert self.weight is weight_NK and self.version == weight_NK._version, "the weight changed after pack(): pack it again"


def pack(weight_NK: torch.Tensor, into: PackedWeight | None = None) -> PackedWeight:
    """Pack a float32 [N, K] weight once for many calls; in the memory of `into`, an outdated pack of the same shape, if given."""
    lib, panels = None if on_triton(weight_NK) else load(), None
    if lib is not None:
        weight = _checked(weight_NK.detach())
        num_out, num_in = weight.shape
        shape = (-(-num_out // PANEL), num_in, PANEL)
        panels = into.panels if into is not None else torch.empty(shape)
        assert panels.shape == shape, (panels.shape, shape)
        lib.pack(weight.data_ptr(), num_out, num_in, panels.data_ptr(), torch.get_num_threads())
    return PackedWeight(panels, panels.data_ptr() if panels is not None else None, weight_NK, weight_NK._version)


def linear(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, packed: PackedWeight | None = None, wide: bool = False
) -> torch.Tensor:
    """[..., K], [N, K], [N] -> [..., N], all of one dtype: float32, or bfloat16 on a GPU. Without `packed` C++ packs the weight on the way.

    `wide`: float32 sums as they are, not rounded to the dtype (for logits).
    """
    if packed is not None:
        packed.check(weight_NK)
    if torch.is_grad_enabled() and (x_MK.requires_grad or weight_NK.requires_grad or (bias_N is not None and bias_N.requires_grad)):
        return _Linear.apply(x_MK, weight_NK, bias_N, packed, wide)
    return forward(x_MK, weight_NK, bias_N, packed, wide)


def forward(
    x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, packed: PackedWeight | None, wide: bool = False
) -> torch.Tensor:
    """`linear` without autograd."""
    num_out, num_in = weight_NK.shape
    *leading, width = x.shape
    assert width == num_in, (x.shape, weight_NK.shape)
    if fast() and (packed is None or packed.panels is None):
        if wide and x.dtype is not torch.float32:
            assert bias_N is None, "wide sums of float32 have no bias"
            return torch.mm(x.reshape(-1, num_in), weight_NK.t(), out_dtype=torch.float32).view(*leading, num_out)
        return F.linear(x, weight_NK, bias_N)
    if on_triton(x):
        from kernels.linear.triton import linear as triton_linear

        return triton_linear(dense(x.reshape(-1, num_in)), weight_NK, bias_N, wide).view(*leading, num_out)
    lib = load()
    if lib is None:
        return ref.linear(x.reshape(-1, num_in), weight_NK, bias_N).view(*leading, num_out)
    x = _checked(x)
    weight = _checked(weight_NK) if packed is None else weight_NK  # a name for each, so that none is freed before the call
    bias = None if bias_N is None else _checked(bias_N)
    assert bias is None or len(bias) == num_out, (bias.shape, weight_NK.shape)
    y = x.new_empty((*leading, num_out))
    lib.linear(
        x.data_ptr(),
        weight.data_ptr(),
        None if packed is None else packed.pointer,
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // num_in,
        num_out,
        num_in,
        torch.get_num_threads(),
    )
    return y


def _checked(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype is torch.float32 and x.is_cpu, (x.dtype, x.device)
    return x.contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_NK, bias_N, packed, wide):
        ctx.save_for_backward(x, weight_NK)
        return forward(x, weight_NK, bias_N, packed, wide)

    @staticmethod
    def backward(ctx, grad):
        x, weight_NK = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad = grad.to(x.dtype)
        grad_MN = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight_NK if need_x else None,
            grad_MN.t() @ x.reshape(-1, x.shape[-1]) if need_weight else None,
            grad_MN.sum(0) if need_bias else None,
            None,
            None,
        )
