"""Sharding from outside the model: FSDP2 over the training ranks, the same path for one rank and for N.

    shard(model, mesh)                              # parameters become DTensors, split by rows over the mesh
    for name, tensor in full_tensors(model): ...    # every training rank takes part, in the same order

Each block is one unit of communication; embedding, final norm and head belong to the root. See Zhao et al., PyTorch FSDP, arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every block of `model.layers`, then the rest, in place. Gradients are summed over the ranks of the 1-D `mesh`.

    Sums, because the loss has already divided by a count over all ranks. Every rank must hold the same weights when it calls this.
    """
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else a factor becomes PREMUL_SUM, which only NCCL has


def full_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole float32 tensor) of every parameter, one at a time, in the order of `named_parameters`; no gradient.

    A collective over the mesh for each: every training rank iterates to the end, wanting the tensors or not. What comes may be a view
    of the parameter: copy it to keep it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without backward the root still shows gathered copies, which a step leaves behind
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
