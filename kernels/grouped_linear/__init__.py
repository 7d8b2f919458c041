"""A linear layer with a weight for each expert: row m, in the order of the experts, times the weight of the expert that it belongs to.

On a CPU a row has the bits that `kernels.linear` gives it with its expert's weight; only experts that have rows are touched, and threads
share the (expert, group of outputs) pairs. On a GPU two Triton kernels (`triton.py`). Forward invariant; backward deterministic.

Legend: R rows of x, M rows in the order of their experts, D inputs, N outputs, E experts.
"""

from __future__ import annotations

import torch

from kernels.cpu.loader import load
from kernels.dispatch import dense, on_triton
from kernels.grouped_linear import ref
from kernels.linear import PANEL, PackedWeight


def pack_experts(weight_END: torch.Tensor, into: PackedWeight | None = None) -> PackedWeight:
    """Pack a float32 [E, N, D] weight once for many calls; in the memory of `into`, an outdated pack of the same shape, if given."""
    lib, panels = None if on_triton(weight_END) else load(), None
    if lib is not None:
        weight = _checked(weight_END.detach())
        num_experts, num_out, num_in = weight.shape
        shape = (num_experts, -(-num_out // PANEL), num_in, PANEL)
        panels = into.panels if into is not None else torch.empty(shape)
        assert panels.shape == shape, (panels.shape, shape)
        lib.pack_experts(weight.data_ptr(), num_experts, num_out, num_in, panels.data_ptr(), torch.get_num_threads())
    return PackedWeight(panels, panels.data_ptr() if panels is not None else None, weight_END, weight_END._version)


def grouped_linear(
    x_RD: torch.Tensor,
    weight_END: torch.Tensor,
    offsets_E1: torch.Tensor,
    rows_M: torch.Tensor | None = None,
    packed: PackedWeight | None = None,
) -> torch.Tensor:
    """[R, D], [E, N, D], int32 [E + 1], int64 [M] -> [M, N]: y[m] = x[rows[m]] @ weight[e].T for offsets[e] <= m < offsets[e + 1].

    x and weight float32, or bfloat16 on a GPU. Without `rows_M` row m is x[m]. Offsets begin at 0, do not fall and end at M: any number of
    rows an expert, none too. Without `packed` C++ packs the weights on the way. Differentiable in x and weight; a row of x that several
    rows read gets the sum of their gradients, in the order of m. Offsets or rows that do not fit are an AssertionError on a CPU.
    """
    if packed is not None:
        packed.check(weight_END)
    if torch.is_grad_enabled() and (x_RD.requires_grad or weight_END.requires_grad):
        return _GroupedLinear.apply(x_RD, weight_END, offsets_E1, rows_M, packed)
    return _forward(x_RD, weight_END, offsets_E1, rows_M, packed)


def _forward(
    x_RD: torch.Tensor, weight_END: torch.Tensor, offsets_E1: torch.Tensor, rows_M: torch.Tensor | None, packed: PackedWeight | None
) -> torch.Tensor:
    if on_triton(x_RD):
        from kernels.grouped_linear.triton import grouped_linear as triton_grouped_linear

        return triton_grouped_linear(dense(x_RD), weight_END, offsets_E1, None if rows_M is None else dense(rows_M), False)
    (num_inputs, width), (num_experts, num_out, num_in) = x_RD.shape, weight_END.shape
    assert width == num_in and offsets_E1.shape == (num_experts + 1,), (x_RD.shape, weight_END.shape, offsets_E1.shape)
    assert offsets_E1.dtype is torch.int32 and (rows_M is None or rows_M.dtype is torch.int64), (offsets_E1.dtype, rows_M)
    lib = load()
    if lib is None:
        return ref.grouped_linear(x_RD, weight_END, offsets_E1, rows_M)
    x, offsets = _checked(x_RD), offsets_E1.contiguous()
    weight = _checked(weight_END) if packed is None else weight_END  # a name for each, so that none is freed before the call
    rows = None if rows_M is None else rows_M.contiguous()
    num_rows = num_inputs if rows is None else len(rows)
    y_MN = x.new_empty(num_rows, num_out)
    bad = lib.grouped_linear(
        x.data_ptr(),
        weight.data_ptr(),
        None if packed is None else packed.pointer,
        offsets.data_ptr(),
        None if rows is None else rows.data_ptr(),
        y_MN.data_ptr(),
        num_inputs,
        num_rows,
        num_experts,
        num_out,
        num_in,
        torch.get_num_threads(),
    )
    assert bad < 0, f"grouped_linear: row {bad} of {num_rows} has no expert or no row of x; offsets {offsets.tolist()}, x {list(x.shape)}"
    return y_MN


def _checked(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype is torch.float32 and x.is_cpu, (x.dtype, x.device)
    return x.contiguous()


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD, weight_END, offsets_E1, rows_M, packed):
        ctx.save_for_backward(x_RD, weight_END, offsets_E1, rows_M)
        return _forward(x_RD, weight_END, offsets_E1, rows_M, packed)

    @staticmethod
    def backward(ctx, grad_MN):
        x_RD, weight_END, offsets_E1, rows_M = ctx.saved_tensors
        backward = _triton_backward if on_triton(grad_MN) else _torch_backward
        return (*backward(grad_MN, x_RD, weight_END, offsets_E1, rows_M, ctx.needs_input_grad), None, None, None)


def _torch_backward(grad_MN, x_RD, weight_END, offsets_E1, rows_M, needs):
    """An expert at a time."""
    bounds = offsets_E1.tolist()
    spans = [(e, slice(*bound)) for e, bound in enumerate(zip(bounds, bounds[1:], strict=False)) if bound[0] < bound[1]]
    x_grad = weight_grad = None
    if needs[0]:
        x_grad = grad_MN.new_empty(len(grad_MN), x_RD.shape[1])
        for e, span in spans:
            torch.mm(grad_MN[span], weight_END[e], out=x_grad[span])
        if rows_M is not None:
            x_grad = torch.ops.aten.embedding_dense_backward(x_grad, rows_M, len(x_RD), -1, False)
    if needs[1]:
        weight_grad = torch.zeros_like(weight_END)
        x_MD = x_RD if rows_M is None else x_RD[rows_M]
        for e, span in spans:
            torch.mm(grad_MN[span].t(), x_MD[span], out=weight_grad[e])
    return x_grad, weight_grad


def _triton_backward(grad_MN, x_RD, weight_END, offsets_E1, rows_M, needs):
    from kernels.embedding.triton import embedding_backward
    from kernels.grouped_linear.triton import grouped_linear as triton_grouped_linear
    from kernels.grouped_linear.triton import grouped_weight_grad

    grad_MN, rows_M = dense(grad_MN), None if rows_M is None else dense(rows_M)
    x_grad = weight_grad = None
    if needs[0]:
        x_grad = triton_grouped_linear(grad_MN, weight_END, offsets_E1, None, True)
        if rows_M is not None:
            x_grad = embedding_backward(x_grad, rows_M, len(x_RD))
    if needs[1]:
        weight_grad = grouped_weight_grad(grad_MN, dense(x_RD), offsets_E1, rows_M)
    return x_grad, weight_grad
