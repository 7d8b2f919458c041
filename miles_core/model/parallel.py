"""Sharding from outside the model: FSDP2 over the training ranks, the same path for one rank and for N.

    shard(model, mesh, dtype)                       # parameters become DTensors, split by rows over the mesh
    for name, tensor in full_tensors(model): ...    # every training rank takes part, in the same order
    expect_backward(model, last=...)                # before each micro-batch's forward

Each block is one unit of communication; embedding, final norm and head belong to the root. See Zhao et al., PyTorch FSDP, arXiv 2304.11277.

The optimizer always works on float32 shards; the model computes in `dtype`, to which weights are rounded when they are gathered. By default
(as ZeRO-2, Rajbhandari et al., arXiv 1910.02054, section 5) they are gathered once a step, by `full_tensors`, and stay until the last
backward, which is also when gradients are reduced: one gather and one reduce-scatter a step, however many micro-batches. With
`reshard_after_forward` (ZeRO-3) a block is gathered for each forward and each backward, and freed after both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from miles_core.model.layers import named_weights


def shard(
    model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype = torch.float32, *, reshard_after_forward: bool = False
) -> None:
    """Shard every block of `model.layers`, then the rest, in place. Gradients are summed, in float32, over the ranks of the 1-D `mesh`.

    Sums, because the loss has already divided by a count over all ranks. Every rank must hold the same weights when it calls this.
    """
    # Inputs are left as they are: rope tables and temperatures stay float32.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else a factor becomes PREMUL_SUM, which only NCCL has
    model.stays_gathered = not reshard_after_forward


def expect_backward(model: nn.Module, *, last: bool) -> None:
    """Say whether the next backward is the step's last, in which gradients are reduced over the ranks and gathered weights freed."""
    if model.stays_gathered:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def full_tensors(model: nn.Module, *, master: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every weight, in the order of `layers.named_weights`; no gradient.

    As gathered for the forward, in the dtype it computes in (float32 with `reshard_after_forward`); with `master` the optimizer's float32.

    Collective over the mesh: every training rank iterates to the end, wanting the tensors or not. What comes may be a view of the
    parameter: copy it to keep it.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.reshard()  # what a forward without backward has left gathered is from before the step
    if model.stays_gathered and not master:
        for module in modules:
            module.unshard()  # and the next forward finds it so
    for name, weight in named_weights(model):
        tensor = weight.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
