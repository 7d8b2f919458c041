"""Sharding from outside the model: FSDP2 over the training ranks, the same path for one rank and for N.

    shard(model, mesh, dtype, expert_mesh)          # parameters become DTensors, split by rows over the mesh
    for name, tensor in full_tensors(model): ...    # every training rank takes part, in the same order
    expect_backward(model, last=...)                # before each micro-batch's forward

Each block is one unit of communication; embedding, final norm and head belong to the root. See Zhao et al., PyTorch FSDP, arXiv 2304.11277.

The optimizer always works on float32 shards; the model computes in `dtype`, to which weights are rounded when they are gathered. By default
(as ZeRO-2, Rajbhandari et al., arXiv 1910.02054, section 5) they are gathered once a step, by `full_tensors`, and stay until the last
backward, which is also when gradients are reduced: one gather and one reduce-scatter a step, however many micro-batches. With
`reshard_after_forward` (ZeRO-3) a block is gathered for each forward and each backward, and freed after both.

With an expert mesh (fsdp x expert) the experts of a layer are dealt to the ranks of its second axis, and what remains is sharded over the
first. Tokens travel to their experts and back (`ExpertExchange`; GShard, arXiv 2006.16668, section 3.2), so every row still goes through
the same op with the same weights, and the slots of a token are added where it came from: log-probs are the bits of one rank alone.

Legend: E experts, M rows sent (one for each slot of each token, sorted by expert), R rows received, D model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from kernels.expert_order import expert_order
from miles_core.model.layers import named_weights
from miles_core.model.moe import Experts, RunExperts


def shard(
    model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype = torch.float32, expert_mesh: DeviceMesh | None = None,
    *, reshard_after_forward: bool = False,
) -> None:  # fmt: skip
    """Shard every block of `model.layers`, then the rest, in place. Gradients are summed, in float32, over the ranks of the 1-D `mesh`.

    Sums, because the loss has already divided by a count over all ranks. Every rank must hold the same weights when it calls this. With
    `expert_mesh`, a 2-D mesh of the same ranks, experts are dealt over its axis "expert" first.
    """
    # Inputs are left as they are: rope tables and temperatures stay float32.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    experts = [module for module in model.modules() if isinstance(module, Experts)] if expert_mesh is not None else []
    for module in experts:
        _deal(module, expert_mesh["expert"])
    for module in (*experts, *model.layers, model):
        axis = expert_mesh["fsdp"] if module in experts else mesh
        fully_shard(module, mesh=axis, mp_policy=precision, reshard_after_forward=reshard_after_forward)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else a factor becomes PREMUL_SUM, which only NCCL has
    model.stays_gathered = not reshard_after_forward


def _deal(experts: Experts, mesh: DeviceMesh) -> None:
    """Leave each rank of the 1-D mesh its share of the experts, the first E / ranks to the first."""
    for name, parameter in list(experts.named_parameters()):
        mine = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        setattr(experts, name, nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)])))
    experts.exchange = ExpertExchange(mesh.get_group())


class ExpertExchange:
    """Rows to the ranks that hold their experts, and the results back. A collective of the group's ranks, forward and backward."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size = group, group.size()

    def __call__(self, run: RunExperts, x_MD: torch.Tensor, offsets_E1: torch.Tensor) -> torch.Tensor:
        """x and the result [M, D], rows sorted by expert. `run` takes rows sorted by the experts that are here."""
        sent_E = offsets_E1.diff().contiguous()
        received_E = torch.empty_like(sent_E)  # rank by rank, for each expert that is here
        dist.all_to_all_single(received_E, sent_E, group=self.group)
        to, back = (counts.view(self.size, -1).sum(1).tolist() for counts in (sent_E, received_E))
        x_RD = _AllToAll.apply(x_MD, back, to, self.group)
        num_here = len(sent_E) // self.size
        expert_R = torch.arange(num_here, device=x_MD.device).repeat(self.size).repeat_interleave(received_E, output_size=sum(back))
        order_R, place_R1, offsets = expert_order(expert_R[:, None], num_here)
        return _AllToAll.apply(run(x_RD, offsets, order_R)[place_R1[:, 0]], to, back, self.group)


class _AllToAll(torch.autograd.Function):
    """Rows [sum(source), D] -> [sum(target), D]: source[i] rows to rank i of the group, target[i] from it. Backward goes the other way."""

    @staticmethod
    def forward(ctx, x, target, source, group):
        ctx.target, ctx.source, ctx.group = target, source, group
        y = x.new_empty(sum(target), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), target, source, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.source), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), ctx.source, ctx.target, group=ctx.group)
        return back, None, None, None


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
        if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 2:  # first over "fsdp", or torch warns of two gathers at once
            tensor = tensor.redistribute(placements=[Replicate(), Shard(0)])
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
