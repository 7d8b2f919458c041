"""The training rank's loop on one page: take a batch -> loss -> step -> publish weights -> log. Also the entry point of a run.

    torchrun --nproc-per-node 2 train.py                                 one rank rolls out, one trains, at the same time
    torchrun --nproc-per-node 1 train.py                                 colocated: one rank does both in turn (synchronous)
    torchrun --nproc-per-node 2 train.py --rollout-ranks-per-node 0      colocated, data-parallel
    python train.py --dry-run                                            print who would do what, and stop

The system follows Miles v0.1 (arXiv 2609.08368) without its Ray, SGLang and Megatron. Departures: one model and one set of invariant
kernels for both roles, so the sampler's and the trainer's log-probs are equal bits; admission is paced, so no group is ever discarded
for being stale; one optimizer step per batch, so the proximal policy of the decoupled loss is the live one at step start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from kernels.dispatch import describe as describe_kernels
from miles_core import checkpoint, guard, loss, numerics, pack, parity, report, ring, rundir
from miles_core.advantage import WHITENED, whiten, whitening_sums
from miles_core.config import Config, parse_args
from miles_core.metrics import Logger, Max, Mean, Metric, Sum, merge, reduce
from miles_core.model import hf, parallel
from miles_core.model.attend import PackedAttend
from miles_core.model.moe import Route, live, routers
from miles_core.model.transformer import Transformer
from miles_core.optim import Optimizer
from miles_core.replay import ExpertRoutes
from miles_core.ring import TRAINER, Ref, Ring
from miles_core.route_transport import Mailbox, RouteStore
from miles_core.schema import Batch, Trajectory, trajectory_nbytes
from miles_core.topology import Layout, Topology, layout_from_env
from miles_core.weights import Board, Plan, Publisher, Receiver
from rollout import Inputs, Rollout, load_inputs


def train(run: Trainer, rollout: Rollout | None) -> None:
    """All optimizer steps of one training rank. `rollout` is this rank's own rollout half when it is colocated."""
    config, topo = run.config, run.topo
    while run.version < config.steps:
        clock = report.Clock()

        # Take the P lowest-numbered ready groups. All training ranks of a node read them in place, in shared memory.
        refs = run.take(rollout)
        groups = [run.ring.read(ref) for ref in refs]
        run.assert_fresh(groups)
        parts = [report.rollout_metrics(groups)] if topo.is_node_leader else []
        clock.lap("wait")

        # Pack this rank's share. Every count that the loss divides by is global, and known before any backward.
        kept = [t for group in groups if not (config.skip_zero_std and pack.zero_std(group)) for t in group]
        shares = pack.balance(kept, len(topo.node_trainers))
        mine = shares[topo.node_trainers.index(topo.rank)]
        if config.advantage in WHITENED:
            mine = whiten(mine, topo.train_sum(*whitening_sums(mine)))
        counts = pack.Counts(*topo.train_sum(*pack.count(mine)))
        total = loss.denominator(run.loss_params, counts.loss_tokens, counts.loss_episodes)
        run.routes.begin(shares, groups, counts)  # asks which experts each token has visited; nothing for dense models
        batches = pack.pack(mine, config.micro_batch_tokens)
        batches = pack.pad(batches, topo.train_max(len(batches)))  # FSDP: every rank runs as many forwards and backwards

        # Sum over tokens / global count, micro-batch by micro-batch.
        for number, batch in enumerate(batches, 1):
            parallel.expect_backward(run.model, last=number == len(batches))
            batch, route = run.routes.of(batch.to(topo.device))
            if topo.is_node_leader:
                run.ring.beat(TRAINER, "training")  # to rollout ranks that wait for a slot
            batch = run.with_reference(batch)
            logp_train_M, entropy_M = score(run.model, batch, route)
            value, metrics = loss.policy_loss(logp_train_M, entropy_M, batch, run.loss_params, total)
            (value + route.loss).backward()
            route.check()
            parts += [metrics, loss.staleness(batch, run.version), route.metrics(), run.gate.watch(logp_train_M, batch, run.version, route)]
        run.gate.check(run.version, run.model, run.inputs.model_config, topo.train_gather)

        # Step and publish; only then are the slots released: released at take, samples would be one version older (DESIGN 4.2).
        # `groups` are views of the slots and end here.
        grad_norm = run.optimizer.step(run.version)
        parts.append(run.routes.end(run.model, topo.train_sum, log=topo.is_logger))
        run.version += 1
        clock.lap("train")
        run.publish()
        run.release(refs)
        clock.lap("sync")

        run.checkpoints.check()
        run.log(parts, counts, grad_norm, clock)
        if run.version == config.steps or (config.save_every and run.version % config.save_every == 0):
            run.save()


def score(model: Transformer, batch: Batch, route: Route = live) -> tuple[torch.Tensor, torch.Tensor]:
    """log-prob and entropy of every sampled token of a packed batch: (logp_M, entropy_M), float32."""
    attend = PackedAttend(batch.cu_seqlens_S1, model.config.head_dim**-0.5)
    sampling = (batch.temperature_M, batch.top_p_M, batch.top_k_M)
    return model(batch.tokens_T, batch.positions_T, attend, batch.rows_M, batch.targets_M, sampling, route)


# ---- the machinery behind the page above -----------------------------------------------------------------------------------------


def resolve(config: Config, layout: Layout) -> Config:
    """Fill in what -1 stands for, and refuse what does not fit this world."""
    if config.prompts_per_step % layout.num_nodes:
        raise ValueError(f"--prompts-per-step {config.prompts_per_step} is not divisible by the {layout.num_nodes} nodes")
    num_trainers = len(layout.ranks(train=True))
    if num_trainers % config.expert_parallel:
        raise ValueError(f"--expert-parallel {config.expert_parallel} does not divide the {num_trainers} training ranks")
    if layout.colocated and config.weight_transport == "broadcast":
        raise ValueError("--weight-transport broadcast needs ranks that only roll out: use shm, or --rollout-ranks-per-node 1 or more")
    max_staleness = (0 if layout.colocated else 1) if config.max_staleness == -1 else config.max_staleness
    return dataclasses.replace(config, rollout_ranks_per_node=layout.rollout_ranks_per_node, max_staleness=max_staleness)


def ring_shape(config: Config, layout: Layout, inputs: Inputs) -> dict[str, int]:
    """Arguments of Ring.create that follow from the config: one node's share."""
    groups_per_step = config.prompts_per_step // layout.num_nodes
    num_slots, window = ring.derive(groups_per_step, config.max_staleness)
    # Versions only grow while a sample is made, and it spans at most max_staleness + 1 of them.
    longest = trajectory_nbytes(inputs.max_context, config.max_staleness + 2, 2 * inputs.max_turns)
    slot_bytes = 8 + config.samples_per_prompt * inputs.max_branches * longest  # pages that nobody writes take no memory
    return {"num_slots": num_slots, "slot_bytes": slot_bytes, "window": window, "num_groups": groups_per_step * config.steps}


def describe(config: Config, layout: Layout, inputs: Inputs) -> str:
    """Who does what, and the staleness that follows: printed at start-up and by --dry-run."""
    shape = ring_shape(config, layout, inputs)
    bound = ring.staleness_bound(shape["num_slots"], shape["window"], config.prompts_per_step // layout.num_nodes)
    branches = f" in each of at most {inputs.max_branches} branches" if inputs.max_branches > 1 else ""
    return (
        f"{layout.describe()}\n"
        f"step: {config.prompts_per_step} prompts x {config.samples_per_prompt} samples of at most {inputs.max_context} tokens{branches}\n"
        f"ring: B = {shape['num_slots']} slots of {shape['slot_bytes'] / 2**20:.2f} MiB a node, window W = {shape['window']}\n"
        f"staleness: no sample is more than (B + W - 2) // P = {bound} version{'s' * (bound != 1)} old when it is trained on"
    )


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins: its directory, and the checkpoint that it goes on from, if it has one."""

    run_dir: Path
    checkpoint: Path | None = None
    version: int = 0
    consumed: tuple[int, ...] = ()  # group numbers that the weights have been trained on

    def __str__(self) -> str:
        return f"run directory: {self.run_dir}" + (f", resumed at step {self.version}" if self.checkpoint else "")


def open_run(config: Config) -> Start:
    """Create the run directory, or find the newest checkpoint in one that exists (one rank)."""
    run_dir = rundir.choose(config.run_dir)
    path = checkpoint.latest(run_dir / "checkpoints")
    start = Start(run_dir) if path is None else resumed(config, run_dir, path)
    rundir.open_run(run_dir, config.to_json())  # last: a config that is refused must not replace the recorded one
    return start


def resumed(config: Config, run_dir: Path, path: Path) -> Start:
    """Where a run goes on from a checkpoint. ValueError when it is damaged, or this config cannot."""
    meta = checkpoint.read_meta(path)
    if meta["version"] >= config.steps:
        raise ValueError(f"--run-dir {run_dir} has done its {meta['version']} steps: raise --steps above that, or give another directory")
    if meta["prompts_per_step"] != config.prompts_per_step:
        raise ValueError(
            f"--prompts-per-step {config.prompts_per_step} cannot resume a run of {meta['prompts_per_step']}: a step is another one then"
        )
    return Start(run_dir, path, meta["version"], (*range(meta["base"]), *meta["beyond"]))


class Trainer:
    """State and machinery of one training rank: model, optimizer, ring, weights, checkpoints and logs."""

    def __init__(
        self, config: Config, inputs: Inputs, topo: Topology, start: Start, node_ring: Ring, publisher: Publisher,
        mailbox: Mailbox | None, store: RouteStore | None,
    ):  # fmt: skip
        self.config, self.inputs, self.topo, self.start, self.ring, self.publisher = config, inputs, topo, start, node_ring, publisher
        self.version = start.version
        self.model = self._load(start.checkpoint or inputs.model_dir)
        self.model.activation_checkpointing = config.activation_checkpointing
        self.reference = self._load(inputs.model_dir).requires_grad_(False) if config.kl_coef else None
        self.optimizer = Optimizer(
            self.model, lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm, schedule=config.lr_schedule, warmup_steps=config.warmup_steps, total_steps=config.steps,
        )  # fmt: skip
        flags = {f.name: getattr(config, f.name) for f in dataclasses.fields(loss.LossParams)}
        self.loss_params = loss.LossParams(**flags | {"max_new_tokens": config.max_new_tokens * inputs.max_turns})
        self.gate = parity.Gate(config.parity, config.on_update, synchronous=config.max_staleness == 0)
        self.routes = ExpertRoutes(
            inputs.model_config.moe, config.routing_replay, config.router_balance_coef, config.router_z_coef, config.router_bias_rate,
            passes=1 + config.activation_checkpointing, rank=topo.rank, trainers=topo.node_trainers, group=topo.route_group,
            device=topo.device, timeout_s=config.timeout, mailbox=mailbox, store=store,
        )  # fmt: skip
        self.checkpoints = checkpoint.Checkpointer(start.run_dir / "checkpoints", config.keep_checkpoints, topo.checkpoint_group)
        if start.checkpoint:
            checkpoint.load_optimizer(start.checkpoint, self.optimizer.parameters, self.optimizer.adamw, topo.control_group)
        self.logger = Logger(start.run_dir, start.version) if topo.is_logger else None
        self.started, self.blocked_s = time.perf_counter(), 0.0

    def _load(self, model_dir: Path) -> Transformer:
        topo, model = self.topo, hf.load(model_dir, self.topo.device)
        for router in routers(model):
            router.weight.requires_grad_(not self.config.freeze_router)
        parallel.shard(model, topo.train_mesh, topo.dtype, topo.expert_mesh, reshard_after_forward=self.config.reshard_after_forward)
        return model

    def take(self, rollout: Rollout | None) -> list[Ref]:
        """P references, the same on every training rank of the node. A colocated rank rolls out until P groups are ready."""
        count = self.config.prompts_per_step // self.topo.layout.num_nodes
        if rollout is not None:
            rollout.refresh()  # also where the groups are ready already: slots are freed when every rank has the new weights
            while not self.ring.ready(count):
                if not rollout.tick():
                    time.sleep(0.0005)
            self.topo.node_broadcast(None)  # every rank has seen the groups ready before the leader takes them away
        return self.topo.node_broadcast(self.ring.take(count, self.config.timeout) if self.topo.is_node_leader else None)

    def assert_fresh(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """The staleness that the user asked for holds for every trajectory (DESIGN 4.2)."""
        for t in (t for group in groups for t in group):
            stale = self.version - t.oldest_version
            assert 0 <= stale <= self.config.max_staleness, f"{t.name}: {stale} versions old at step {self.version}"

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the frozen reference's log-probs, if the loss has a KL term."""
        if self.reference is None:
            return batch
        with torch.no_grad():
            return dataclasses.replace(batch, logp_ref_M=score(self.reference, batch)[0])

    def publish(self) -> None:
        """The weights of `self.version` to every rollout rank (collective over the training ranks)."""
        self.publisher.publish(self.version, parallel.full_tensors(self.model))

    def release(self, refs: list[Ref]) -> None:
        """Free the slots once this version is live. `publish` was collective, so every training rank has read them by now."""
        if self.topo.is_node_leader:
            self.ring.release(refs, self.version)

    def log(self, parts: list[dict[str, Metric]], counts: pack.Counts, grad_norm: float, clock: report.Clock) -> None:
        """Reduce and write the metrics of a step, and print its line."""
        metrics = merge([{"train/staleness_mean": Mean(0, 0)}, *parts])  # nan, not absent, in a step without any kept sample
        if self.topo.is_node_leader:
            metrics |= self.ring_metrics(clock.total)
        metrics |= {
            "perf/step_time": Max(clock.total),
            "perf/train_tokens_per_s": Max(counts.tokens / clock.laps["train"]),
            "perf/weight_sync_s": Max(clock.laps["sync"]),
            "perf/trainer_wait_frac": Mean(clock.laps["wait"], clock.total),
        }
        values = reduce(metrics, self.topo.control_group)
        values["perf/gen_tokens_per_s"] = values["rollout/tokens"] / values["perf/step_time"]
        values["train/lr"] = self.optimizer.learning_rate(self.version - 1)
        values |= {"train/grad_norm": grad_norm, "train/tokens": counts.loss_tokens}
        if self.logger is not None:
            self.logger.log(self.version, values)
            mean_step_s = (time.perf_counter() - self.started) / (self.version - self.start.version)
            print(report.step_line(self.version, self.config.steps, values, mean_step_s), flush=True)

    def ring_metrics(self, step_s: float) -> dict[str, Metric]:
        """`ring/*`, and the share of the step in which this node's rollout ranks had no free slot."""
        status = self.ring.status()
        blocked, self.blocked_s = status.blocked_s - self.blocked_s, status.blocked_s
        return {
            "ring/ready": Sum(status.ready), "ring/in_flight": Sum(status.in_flight), "ring/reclaimed": Sum(status.reclaimed),
            "ring/bytes": Sum(status.bytes), "perf/producer_blocked_frac": Mean(blocked, step_s * self.ring.num_rollout_ranks),
        }  # fmt: skip

    def save(self) -> None:
        """Checkpoint in the background (collective over the training ranks): training goes on after the copy."""
        mine = [self.ring.number(index) for index in self.ring.consumed()] if self.topo.is_node_leader else []
        consumed = {number for numbers in self.topo.train_gather(mine) for number in numbers}
        base = next(number for number in itertools.count() if number not in consumed)
        beyond = sorted(number for number in consumed if number > base)
        meta = {"version": self.version, "base": base, "beyond": beyond, "prompts_per_step": self.config.prompts_per_step}

        def write_model(path: Path, tensors: checkpoint.Tensors) -> None:
            hf.save(path, self.inputs.model_config, tensors, self.inputs.model_dir)

        tensors = parallel.full_tensors(self.model, master=True)
        self.checkpoints.save(self.version, self.optimizer.parameters, self.optimizer.adamw, tensors, meta, write_model)

    def log_evaluation(self, metrics: dict[str, Metric]) -> None:
        """A line of its own in the metrics file."""
        if self.logger is not None and metrics:
            self.logger.log(self.version, {name: metric.value() for name, metric in metrics.items()})

    def close(self, before: dict[str, Metric], after: dict[str, Metric]) -> None:
        """Wait for the last checkpoint and print the summary."""
        self.checkpoints.finish()
        self.log_evaluation(after)
        if self.logger is None:
            return
        before, after = ({name: m.value() for name, m in metrics.items()} for metrics in (before, after))
        wait, blocked = (report.mean(self.logger.history(f"perf/{name}_frac")) for name in ("trainer_wait", "producer_blocked"))
        print(
            report.summary(
                self.logger.history("rollout/reward_mean"), before, after, report.verdict(wait, blocked, self.topo.layout.colocated),
                time.perf_counter() - self.started, self.version - self.start.version, str(self.start.run_dir),
            ),
            flush=True,
        )  # fmt: skip
        self.logger.close()


def main() -> None:
    config = parse_args(sys.argv[1:], "train.py", __doc__)
    numerics.setup()
    layout = layout_from_env(config.rollout_ranks_per_node)
    config = resolve(config, layout)
    device, dtype = numerics.choose(config.device, config.dtype, layout.local_rank)
    inputs = load_inputs(config, device, dtype)
    if config.dry_run:
        if int(os.environ.get("RANK", 0)) == 0:
            print(describe(config, layout, inputs))
        return
    topo = Topology(layout, device, dtype, config.timeout, config.expert_parallel)
    start = next(s for s in topo.gather(open_run(config) if topo.is_logger else None) if s is not None)
    if topo.is_logger:
        print(describe(config, layout, inputs))
        ops = describe_kernels(device, dtype, inputs.model_config.head_dim, experts=inputs.model_config.moe is not None)
        print(f"parity: {config.parity} ({ops})")
        print(start, flush=True)

    node_ring, board, mailbox = share(config, inputs, topo, start)
    trainer, rollout = None, None
    store = RouteStore(topo.rank, topo.route_group) if topo.rolls_out else None
    group = topo.weights_group if config.weight_transport == "broadcast" else None
    if topo.trains:
        publisher = Publisher(board if topo.is_node_leader else None, config.timeout, group if topo.is_logger else None)
        trainer = Trainer(config, inputs, topo, start, node_ring, publisher, mailbox if topo.is_node_leader else None, store)
        trainer.publish()  # before the first rollout, so that a broken path fails in the first minute
    if topo.rolls_out:
        receiver = Receiver(board, topo.rank, config.timeout, group, topo.first_trainer)
        model = hf.build(inputs.model_config, device, dtype)
        rollout = Rollout(config, inputs, model, node_ring, receiver, topo.rollout_index, store, mailbox)
        rollout.refresh(min_version=start.version)
    with contextlib.closing(rollout) if rollout is not None else contextlib.nullcontext():
        topo.gather(None)  # every rank has attached, and has loaded the first weights
        before = evaluate_everywhere(topo, rollout)
        if trainer is None:
            rollout.run()
        else:
            trainer.log_evaluation(before)
            train(trainer, rollout)
            node_ring.stop()
        if rollout is not None:
            rollout.refresh(min_version=config.steps)
        after = evaluate_everywhere(topo, rollout)
        if trainer is not None:
            trainer.close(before, after)
        topo.gather(None)  # the leader's shared memory outlives every use of it
        topo.close()


def share(config: Config, inputs: Inputs, topo: Topology, start: Start) -> tuple[Ring, Board, Mailbox | None]:
    """The node's shared memory: the node leader makes it and owns it, the others attach to it (collective over the world).

    There is a mailbox for routes where other ranks than the training ranks roll out.
    """
    layout = topo.layout
    if topo.is_node_leader:
        shape = ring_shape(config, layout, inputs)
        node_rollout_ranks = layout.ranks(train=False, node=topo.node)
        node_ring = Ring.create(
            **shape,
            num_rollout_ranks=len(node_rollout_ranks),
            done=[number // layout.num_nodes for number in start.consumed if number % layout.num_nodes == topo.node],
            stride=layout.num_nodes,
            offset=topo.node,
        )
        board = Board.create(Plan.of(hf.build(inputs.model_config, "meta"), topo.dtype), node_rollout_ranks, config.weight_transport)
        step_size = config.prompts_per_step // layout.num_nodes * config.samples_per_prompt * inputs.max_branches
        made = node_ring, board, None if layout.colocated else Mailbox.create(node_rollout_ranks, step_size)
    paths = topo.gather([x and x.segment.path for x in made] if topo.is_node_leader else None)[topo.node_leader]
    if topo.is_node_leader:
        return made
    return Ring.attach(paths[0]), Board.attach(paths[1]), paths[2] and Mailbox.attach(paths[2])


def evaluate_everywhere(topo: Topology, rollout: Rollout | None) -> dict[str, Metric]:
    """Held-out metrics, the prompts shared among all rollout ranks of the world (collective over the world)."""
    rollout_ranks = topo.layout.ranks(train=False)
    mine = rollout.evaluate(rollout_ranks.index(topo.rank), len(rollout_ranks)) if rollout is not None else {}
    return merge(topo.gather(mine))


if __name__ == "__main__":
    guard.run(main)
