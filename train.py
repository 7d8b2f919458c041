"""The training rank's loop on one page: take a batch -> loss -> step -> publish weights -> log. Also the entry point of a run.

    torchrun --nproc-per-node 2 train.py                                 one rank rolls out, one trains, at the same time
    torchrun --nproc-per-node 1 train.py                                 colocated: one rank does both in turn (synchronous)
    torchrun --nproc-per-node 2 train.py --rollout-ranks-per-node 0      colocated, data-parallel
    torchrun --nproc-per-node 8 train.py --dry-run                       who would do what

The system follows Miles v0.1 (arXiv 2609.08368) without its Ray, SGLang and Megatron. Departures: one model and one set of invariant
kernels for both roles, so the sampler's and the trainer's log-probs are equal bits; admission is paced, so no group is ever discarded
for being stale; one optimizer step per batch, so the proximal policy of the decoupled loss is the live one at step start.
"""

from __future__ import annotations

import sys
import time

import torch

from miles_core import guard, loss, numerics, pack, report
from miles_core.config import Config, parse_args
from miles_core.metrics import Logger, Max, Mean, Sum, merge, reduce
from rollout import Rollout


def train(job, rollout: Rollout | None) -> None:
    """All optimizer steps of a run on one training rank. `rollout` is this rank's own rollout half when colocated."""
    config, topo, ring, model, optimizer = job.config, job.topo, job.ring, job.model, job.optimizer
    version = job.version
    while version < config.steps:
        started = time.perf_counter()

        # Take: the P lowest-numbered ready groups. Every training rank of the node reads them in place, from shared memory.
        refs = take(job, rollout)
        groups = [ring.read(ref) for ref in refs]
        waited = time.perf_counter() - started
        staleness = pack.assert_staleness(groups, version, config.max_staleness)

        # Pack: this rank's share, cut into micro-batches. Every count the loss divides by is global and known before any backward.
        kept = [g for g in groups if not (config.skip_zero_std and pack.zero_std(g))]
        mine = pack.balance(kept, topo.num_node_trainers)[topo.node_train_index]
        batches = pack.pack(mine, config.micro_batch_tokens)
        num_tokens, num_sequences = topo.train_sum(*pack.counts(batches))
        batches += [pack.empty()] * (topo.train_max(len(batches)) - len(batches))  # FSDP: every rank runs as many backwards

        # Loss: sum over tokens / global count, micro-batch by micro-batch.
        parts = []
        for batch in batches:
            logp_train_M, entropy_M = job.forward(batch)
            value, metrics = job.policy_loss(logp_train_M, entropy_M, batch, num_tokens, num_sequences, version)
            value.backward()
            parts.append(metrics)

        # Step, publish, and only then free the slots: a slot is free when the weights trained on it are live (DESIGN 4.2).
        grad_norm = optimizer.step(version)
        version += 1
        job.publish(version)
        ring.release(refs, version)

        job.log(version, parts, groups)
        if version == config.steps or (config.save_every and version % config.save_every == 0):
            job.save(version)
