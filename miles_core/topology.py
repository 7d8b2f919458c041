"""Who does what: torchrun's environment -> role, node, process groups. The only file that creates groups.

On every node the first R of L local ranks roll out and the rest train. R = 0 (and a world of one) is *colocated*: every
rank does both in turn, with the same code. Example, 2 nodes, L = 4, R = 1:

    rank      0        1      2      3        4        5      6      7
    node      0        0      0      0        1        1      1      1
    role   rollout   train  train  train   rollout   train  train  train
                     leader                          leader

The node leader is the first training rank of a node: it owns the node's ring and weight segment. The first of all leaders
writes logs and checkpoints.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_POLL_S = 0.01


@dataclass(frozen=True)
class Layout:
    """The arithmetic of roles for one world; no process group is needed to build it."""

    world_size: int
    local_world_size: int
    rollout_ranks_per_node: int

    def __post_init__(self) -> None:
        num_local, num_rollout = self.local_world_size, self.rollout_ranks_per_node
        if self.world_size % num_local:
            raise ValueError(
                f"--nproc-per-node {num_local} does not divide the world of {self.world_size} ranks: use the same number on every node"
            )
        if not 0 <= num_rollout < num_local:
            fix = f"use 1 to {num_local - 1}, or 0 to let every rank do both" if num_local > 1 else "use 0, or start more ranks"
            raise ValueError(f"--rollout-ranks-per-node {num_rollout} leaves no training rank among the {num_local} of a node: {fix}")

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return int(os.environ.get("RANK", 0)) % self.local_world_size

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def colocated(self) -> bool:
        return self.rollout_ranks_per_node == 0

    def node(self, rank: int) -> int:
        return rank // self.local_world_size

    def trains(self, rank: int) -> bool:
        return rank % self.local_world_size >= self.rollout_ranks_per_node

    def rolls_out(self, rank: int) -> bool:
        return self.colocated or not self.trains(rank)

    def ranks(self, *, train: bool, node: int | None = None) -> list[int]:
        """Global ranks that train (or that roll out), of one node or of all."""
        has_role = self.trains if train else self.rolls_out
        return [r for r in range(self.world_size) if has_role(r) and node in (None, self.node(r))]

    def check(self, prompts_per_step: int, expert_parallel: int, weight_transport: str) -> None:
        """ValueError for flags that do not fit this world."""
        if prompts_per_step % self.num_nodes:
            raise ValueError(f"--prompts-per-step {prompts_per_step} is not divisible by the {self.num_nodes} nodes")
        num_trainers = len(self.ranks(train=True))
        if num_trainers % expert_parallel:
            raise ValueError(f"--expert-parallel {expert_parallel} does not divide the {num_trainers} training ranks")
        if self.colocated and weight_transport == "broadcast":
            raise ValueError("--weight-transport broadcast needs ranks that only roll out: use shm, or --rollout-ranks-per-node 1 or more")

    def describe(self) -> str:
        """One line a rank: who does what."""
        leaders = {self.ranks(train=True, node=n)[0] for n in range(self.num_nodes)}
        lines = []
        for rank in range(self.world_size):
            role = "rollout + train" if self.colocated else "train" if self.trains(rank) else "rollout"
            note = "  (node leader)" if rank in leaders else ""
            lines.append(f"rank {rank:3d}  node {self.node(rank)}  local {rank % self.local_world_size}  {role}{note}")
        return "\n".join(lines)


def layout_from_env(rollout_ranks_per_node: int) -> Layout:
    """Layout of the world that torchrun describes in the environment (one rank without it). -1 = half of each node's ranks."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if rollout_ranks_per_node == -1:
        rollout_ranks_per_node = local_world_size // 2
    return Layout(world_size, local_world_size, rollout_ranks_per_node)


def name_this_start(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """A name that this start of the job has never had before, the same on every rank.

    torchrun may hand a restart the store of the start before, where ranks would find the addresses of dead ones, and hang. No number tells
    the starts apart on every node: the nodes count only the failures of their own. So rank 0 makes a name up, and each other rank asks it
    under a name of its own. What dead ranks have asked is answered too, and nobody looks. Raises TimeoutError naming who is missing.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank:
        store.set(f"miles/ask/{rank}", mine)
        try:
            name = store.get(f"miles/answer/{mine}").decode()
        except dist.DistStoreError as error:
            raise TimeoutError(f"rank {rank} waited {timeout_s:g} s for rank 0 to start") from error
        store.set(f"miles/{name}/{rank}", "knows it")
        return name
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"miles/ask/{other}"]):
                store.set(f"miles/answer/{store.get(f'miles/ask/{other}').decode()}", mine)
            if store.check([f"miles/{mine}/{other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 waited {timeout_s:g} s for ranks {', '.join(map(str, sorted(missing)))} to start")
        time.sleep(_POLL_S)
    return mine


class Topology:
    """This rank's place in the world, and the process groups it belongs to. Build it once, on every rank, before anything else.

    Groups are created by all ranks in one order, members or not: a rank that skipped one would pair its next collective with
    somebody else's. Each is used by one thread only; gloo mixes up collectives of two threads on one group without an error.
    """

    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype, timeout_s: float, expert_parallel: int = 1):
        self.layout, self.device, self.dtype = layout, device, dtype
        self.rank = int(os.environ.get("RANK", 0))
        self.node = layout.node(self.rank)
        self.trains, self.rolls_out = layout.trains(self.rank), layout.rolls_out(self.rank)
        timeout = timedelta(seconds=timeout_s)
        if "MASTER_ADDR" in os.environ:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            store = dist.PrefixStore(name_this_start(store, rank, world_size, timeout_s), store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        else:  # plain `python train.py`: a world of one needs no rendezvous
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        self.restarted = any(self.gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0))  # nodes count differently
        train_ranks = layout.ranks(train=True)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.train_group = dist.new_group(train_ranks, timeout=timeout, backend=backend)  # FSDP
        self.control_group = dist.new_group(train_ranks, timeout=timeout, backend="gloo")  # counts and metrics of the training ranks
        self.checkpoint_group = dist.new_group(train_ranks, timeout=timeout, backend="gloo")  # used by the checkpoint thread alone
        self.weights_group = dist.new_group(self.weights_ranks, timeout=timeout, backend="gloo")  # staged on the CPU
        node_groups = [dist.new_group(layout.ranks(train=True, node=n), timeout=timeout, backend="gloo") for n in range(layout.num_nodes)]
        self.node_group = node_groups[self.node]  # training ranks of this node share a ring
        # routes go from rank to rank: CPU tensors by gloo, CUDA tensors by NCCL
        node_groups = [dist.new_group(self._node_ranks(n), timeout=timeout, backend=backend) for n in range(layout.num_nodes)]
        self.route_group = node_groups[self.node]
        self.expert_mesh = self._make_expert_mesh(train_ranks, expert_parallel, timeout, backend) if expert_parallel > 1 else None
        self.train_mesh = DeviceMesh.from_group(self.train_group, device.type, mesh_dim_names=("fsdp",)) if self.trains else None

    def _make_expert_mesh(self, train_ranks: list[int], size: int, timeout: timedelta, backend: str) -> DeviceMesh | None:
        """2-D mesh of the training ranks: "expert" over `size` neighbours, which share the experts of a layer, "fsdp" over the others.

        None on ranks that do not train. Neighbours, because they exchange every token of every layer.
        """
        mesh, mine = torch.tensor(train_ranks).view(-1, size), []
        for lines in (mesh.t().tolist(), mesh.tolist()):
            for ranks in lines:
                group = dist.new_group(ranks, timeout=timeout, backend=backend)
                if self.rank in ranks:
                    mine.append(group)
        return DeviceMesh.from_group(mine, self.device.type, mesh, mesh_dim_names=("fsdp", "expert")) if self.trains else None

    def _node_ranks(self, node: int) -> list[int]:
        return [rank for rank in range(self.layout.world_size) if self.layout.node(rank) == node]

    @property
    def weights_ranks(self) -> list[int]:
        """The first training rank (source of a broadcast) and every rollout rank."""
        return sorted({self.first_trainer, *self.layout.ranks(train=False)})

    @property
    def first_trainer(self) -> int:
        """Global rank that prints, logs, writes checkpoints and is the source of a broadcast."""
        return self.layout.ranks(train=True)[0]

    @cached_property
    def node_leader(self) -> int:
        """Global rank of the first training rank of this node."""
        return self.layout.ranks(train=True, node=self.node)[0]

    @property
    def is_node_leader(self) -> bool:
        return self.rank == self.node_leader

    @property
    def is_logger(self) -> bool:
        """True on the first training rank of all."""
        return self.rank == self.first_trainer

    @property
    def rollout_index(self) -> int:
        """Index of this rank among the rollout ranks of its node."""
        return self.layout.ranks(train=False, node=self.node).index(self.rank)

    def gather(self, value: object) -> list:
        """`value` of every rank of the world, in rank order (collective over the world)."""
        values = [None] * self.layout.world_size
        dist.all_gather_object(values, value)
        return values

    def node_broadcast(self, value: object) -> object:
        """The node leader's `value` on every training rank of the node (collective over them)."""
        box = [value]
        dist.broadcast_object_list(box, src=self.node_leader, group=self.node_group)
        return box[0]

    @property
    def node_trainers(self) -> list[int]:
        """Global ranks that share this node's ring and train."""
        return self.layout.ranks(train=True, node=self.node)

    def train_gather(self, value: object) -> list:
        """`value` of every training rank (collective over them)."""
        values = [None] * len(self.layout.ranks(train=True))
        dist.all_gather_object(values, value, group=self.control_group)
        return values

    def train_sum(self, *counts: float) -> list[float]:
        """Sum each count over all training ranks (collective over them)."""
        total = torch.tensor(counts, dtype=torch.float64)
        dist.all_reduce(total, group=self.control_group)
        return total.tolist()

    def train_max(self, count: int) -> int:
        """The largest count of any training rank (collective over them)."""
        largest = torch.tensor(count)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control_group)
        return int(largest)

    def close(self) -> None:
        dist.destroy_process_group()
