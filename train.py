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
from miles_core import checkpoint, guard, loss, numerics, pacing, pack, parity, report
from miles_core.advantage import WHITENED, whiten, whitening_sums
from miles_core.config import Config, parse_args
from miles_core.metrics import Logger, Mean, Metric, merge, reduce
from miles_core.model import hf, parallel
from miles_core.model.attend import PackedAttend
from miles_core.model.moe import Route, live, routers
from miles_core.model.transformer import Transformer
from miles_core.optim import Optimizer
from miles_core.records import Records
from miles_core.replay import ExpertRoutes
from miles_core.rerun import Recording, Rerun
from miles_core.ring import BOARD_AT, Ref, Ring
from miles_core.route_transport import Mailbox, RouteStore
from miles_core.schema import Batch, Trajectory, trajectory_nbytes
from miles_core.start import Start, open_run
from miles_core.status import announce
from miles_core.topology import Layout, Topology, layout_from_env
from miles_core.weights import Board, Plan, Publisher, Receiver
from rollout import Inputs, Rollout, load_inputs, make_rollout


def train(run: Trainer, rollout: Rollout | Rerun | None) -> None:
    """All optimizer steps of one training rank. `rollout` is this rank's own rollout half when it is colocated."""
    config, topo = run.config, run.topo
    while run.version < config.steps:
        clock = report.Clock()

        # Take the P lowest-numbered ready groups. All training ranks of a node read them in place, in shared memory.
        refs = run.take(rollout)
        if not refs:
            break  # asked to stop
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
            if run.told_to_leave(refs):
                return run.save()
            parallel.expect_backward(run.model, last=number == len(batches))
            batch, route = run.routes.of(batch.to(topo.device))
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
        run.log(parts, refs, counts, grad_norm, clock)
        if config.save_every and run.version % config.save_every == 0:
            run.save()
    run.save()  # what has no checkpoint yet


def score(model: Transformer, batch: Batch, route: Route = live) -> tuple[torch.Tensor, torch.Tensor]:
    """log-prob and entropy of every sampled token of a packed batch: (logp_M, entropy_M), float32."""
    attend = PackedAttend(batch.cu_seqlens_S1, model.config.head_dim**-0.5)
    sampling = (batch.temperature_M, batch.top_p_M, batch.top_k_M)
    return model(batch.tokens_T, batch.positions_T, attend, batch.rows_M, batch.targets_M, sampling, route)


# ---- the machinery behind the page above -----------------------------------------------------------------------------------------


def resolve(config: Config, layout: Layout, recording: Recording | None) -> Config:
    """Fill in what -1 stands for, and refuse what does not fit this world."""
    layout.check(config.prompts_per_step, config.expert_parallel, config.weight_transport)
    if recording is not None:
        recording.check(config.first_step, config.steps)
        return dataclasses.replace(config, rollout_ranks_per_node=0, max_staleness=recording.staleness(config.first_step, config.steps))
    max_staleness = (0 if layout.colocated else 1) if config.max_staleness == -1 else config.max_staleness
    return dataclasses.replace(config, rollout_ranks_per_node=layout.rollout_ranks_per_node, max_staleness=max_staleness)


def ring_shape(config: Config, layout: Layout, inputs: Inputs, recording: Recording | None = None) -> dict[str, int]:
    """Arguments of Ring.create that follow from the config, or from what is replayed: one node's share."""
    groups_per_step = config.prompts_per_step // layout.num_nodes
    num_slots, window = pacing.derive(groups_per_step, config.max_staleness)
    # Versions only grow while a sample is made, and it spans at most max_staleness + 1 of them.
    longest = trajectory_nbytes(inputs.max_context, config.max_staleness + 2, 2 * inputs.max_turns)
    slot_bytes = 8 + config.samples_per_prompt * inputs.max_branches * longest  # pages that nobody writes take no memory
    shape = {"num_slots": num_slots, "slot_bytes": slot_bytes, "window": window, "num_groups": groups_per_step * config.steps}
    return shape if recording is None else shape | recording.shape(config.first_step, config.steps, layout.num_nodes)


def describe(config: Config, layout: Layout, inputs: Inputs, recording: Recording | None = None) -> str:
    """Who does what, and the staleness that follows: printed at start-up and by --dry-run."""
    shape = ring_shape(config, layout, inputs, recording)
    bound = pacing.staleness_bound(shape["num_slots"], shape["window"], config.prompts_per_step // layout.num_nodes)
    return report.plan(layout.describe(), config.prompts_per_step, config.samples_per_prompt, inputs.max_context, inputs.max_branches,
                       shape["num_slots"], shape["slot_bytes"], shape["window"], bound)  # fmt: skip


class Trainer:
    """State and machinery of one training rank: model, optimizer, ring, weights, checkpoints and logs."""

    def __init__(
        self, config: Config, inputs: Inputs, topo: Topology, start: Start, node_ring: Ring, publisher: Publisher,
        mailbox: Mailbox | None, store: RouteStore | None,
    ):  # fmt: skip
        self.config, self.inputs, self.topo, self.start, self.ring, self.publisher = config, inputs, topo, start, node_ring, publisher
        self.version = self.saved = start.version
        self.row = topo.node_trainers.index(topo.rank) + node_ring.num_rollout_ranks  # of the status board
        node_ring.board.join(self.row, topo.rank, trains=True)
        self.model = self._load(start.checkpoint or inputs.model_dir)
        self.model.activation_checkpointing = config.activation_checkpointing
        self.reference = self._load(inputs.model_dir).requires_grad_(False) if config.kl_coef else None
        self.optimizer = Optimizer(
            self.model, lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm, schedule=config.lr_schedule, warmup_steps=config.warmup_steps,
            total_steps=config.schedule_steps or config.steps,
        )  # fmt: skip
        flags = {f.name: getattr(config, f.name) for f in dataclasses.fields(loss.LossParams)}
        self.loss_params = loss.LossParams(**flags | {"max_new_tokens": config.max_new_tokens * inputs.max_turns})
        self.gate = parity.Gate(config.parity, config.on_update, synchronous=config.max_staleness == 0)
        self.routes = ExpertRoutes(
            inputs.model_config.moe, config.routing_replay, config.router_balance_coef, config.router_z_coef, config.router_bias_rate,
            passes=1 + config.activation_checkpointing, rank=topo.rank, trainers=topo.node_trainers, group=topo.route_group,
            device=topo.device, timeout_s=config.timeout, mailbox=mailbox, store=store,
        )  # fmt: skip
        directory = start.run_dir / "checkpoints"
        self.checkpoints = checkpoint.Checkpointer(directory, config.keep_checkpoints, topo.checkpoint_group, config.timeout)
        if start.checkpoint:
            checkpoint.load_optimizer(start.checkpoint, self.optimizer.parameters, self.optimizer.adamw, topo.control_group)
        self.logger = Logger(start.run_dir, start.version) if topo.is_logger else None
        self.records = Records(start.run_dir, start.incarnation, start.version, config.journal_keep) if topo.is_logger else None
        self.started, self.blocked_s = time.perf_counter(), 0.0

    def _load(self, model_dir: Path) -> Transformer:
        topo, model = self.topo, hf.load(model_dir, self.topo.device)
        for router in routers(model):
            router.weight.requires_grad_(not self.config.freeze_router)
        parallel.shard(model, topo.train_mesh, topo.dtype, topo.expert_mesh, reshard_after_forward=self.config.reshard_after_forward)
        return model

    def beat(self, phase: str) -> None:
        """To the status board: what this rank does, for the step that comes. Rollout ranks that wait for a slot look at it."""
        self.ring.board.beat(self.row, phase, self.version + 1)

    def take(self, rollout: Rollout | Rerun | None) -> list[Ref]:
        """P references, the same on every training rank of the node; none when the run is asked to stop (collective over training ranks).

        A colocated rank rolls out until P groups are ready.
        """
        count = self.config.prompts_per_step // self.topo.layout.num_nodes
        self.beat("waiting for groups")
        if rollout is not None:
            rollout.refresh()  # also where the groups are ready already: slots are freed when every rank has the new weights
            check = self.ring.deadline(count)
            while not (self.ring.ready(count) or self.ring.asked):
                check(busy := rollout.tick())
                if not busy:
                    time.sleep(0.0005)
            self.topo.node_broadcast(None)  # every rank has seen the groups ready before the leader takes them away
        refs = self.ring.take(count) if self.topo.is_node_leader else []
        if self.topo.train_max(self.ring.asked):  # no step begins that not every rank would finish
            self.ring.give_back(refs)
            refs = []
        return self.topo.node_broadcast(refs)

    def assert_fresh(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """The staleness that the user asked for holds for every trajectory (DESIGN 4.2)."""
        for t in (t for group in groups for t in group):
            stale = self.version - t.oldest_version
            assert 0 <= stale <= self.config.max_staleness, f"{t.name}: {stale} versions old at step {self.version}"

    def told_to_leave(self, refs: list[Ref]) -> bool:
        """Whether to leave this step unfinished, for SIGTERM: then its groups are given back (collective over the training ranks)."""
        self.beat("training")
        if told := self.topo.train_max(self.ring.asked) > 1:
            self.routes.abandon()
            self.ring.give_back(refs if self.topo.is_node_leader else [])
        return told

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the frozen reference's log-probs, if the loss has a KL term."""
        if self.reference is None:
            return batch
        with torch.no_grad():
            return dataclasses.replace(batch, logp_ref_M=score(self.reference, batch)[0])

    def publish(self) -> None:
        """The weights of `self.version` to every rollout rank (collective over the training ranks)."""
        self.beat("publishing weights")
        self.publisher.publish(self.version, parallel.full_tensors(self.model))

    def release(self, refs: list[Ref]) -> None:
        """Free the slots once this version is live. `publish` was collective, so every training rank has read them by now."""
        if self.topo.is_node_leader:
            self.ring.release(refs, self.version)

    def log(self, parts: list[dict[str, Metric]], refs: list[Ref], counts: pack.Counts, grad_norm: float, clock: report.Clock) -> None:
        """Reduce and write the metrics of a step and which groups it had, and print its line."""
        groups = self.topo.train_gather([ref.group for ref in refs] if self.topo.is_node_leader else [])
        metrics = merge([{"train/staleness_mean": Mean(0, 0)}, *parts])  # nan, not absent, in a step without any kept sample
        if self.topo.is_node_leader:
            status = self.ring.status()
            metrics |= report.ring_metrics(status, status.blocked_s - self.blocked_s, clock, self.ring.num_rollout_ranks)
            self.blocked_s = status.blocked_s
        metrics |= report.step_metrics(clock, counts.tokens)
        values = reduce(metrics, self.topo.control_group)
        values["perf/gen_tokens_per_s"] = values["rollout/tokens"] / values["perf/step_time"]
        learning_rate = self.optimizer.learning_rate(self.version - 1)
        values |= {"train/lr": learning_rate, "train/grad_norm": grad_norm, "train/tokens": counts.loss_tokens}
        if self.logger is not None:
            self.records.log(self.version, itertools.chain(*groups))
            self.logger.log(self.version, values)
            mean_step_s = (time.perf_counter() - self.started) / (self.version - self.start.version)
            print(report.step_line(self.version, self.config.steps, values, mean_step_s), flush=True)

    def save(self) -> None:
        """Checkpoint in the background, if this version has none yet (collective over the training ranks)."""
        if self.version == self.saved:
            return
        self.beat("saving a checkpoint")
        self.saved = self.version
        mine = [self.ring.number(index) for index in self.ring.consumed()] if self.topo.is_node_leader else []
        consumed = itertools.chain(*self.topo.train_gather(mine))
        meta = {"version": self.version, "incarnation": self.start.incarnation, "prompts_per_step": self.config.prompts_per_step}

        def write_model(path: Path, tensors: checkpoint.Tensors) -> None:
            hf.save(path, self.inputs.model_config, tensors, self.inputs.model_dir, self.inputs.stop_token_ids)

        tensors = parallel.full_tensors(self.model, master=True)
        self.checkpoints.save(self.version, self.optimizer.parameters, self.optimizer.adamw, tensors, meta, consumed, write_model)
        if self.records is not None:
            self.records.checkpointed()

    def log_evaluation(self, metrics: dict[str, Metric]) -> None:
        """A line of its own in the metrics file."""
        if self.logger is not None and metrics:
            self.logger.log(self.version, {name: metric.value() for name, metric in metrics.items()})

    def close(self, after: dict[str, Metric]) -> None:
        """Wait for the last checkpoint and print the summary."""
        self.checkpoints.finish()
        self.beat("done")
        self.log_evaluation(after)
        if self.logger is None:
            return
        asked = guard.asked() or "a signal to another rank"
        print(report.ending(self.logger, after, self.config.steps, self.version, self.start.version, time.perf_counter() - self.started,
                            self.topo.layout.colocated, asked, str(self.start.run_dir)), flush=True)  # fmt: skip
        self.records.close()
        self.logger.close()


def main() -> None:
    config = parse_args(sys.argv[1:], "train.py", __doc__)
    numerics.setup()
    recording = Recording(Path(config.replay)) if config.replay else None
    layout = layout_from_env(0 if recording else config.rollout_ranks_per_node)
    config = resolve(config, layout, recording)
    device, dtype = numerics.choose(config.device, config.dtype, layout.local_rank)
    inputs = load_inputs(config, device, dtype)
    if config.dry_run:
        if int(os.environ.get("RANK", 0)) == 0:
            print(describe(config, layout, inputs, recording))
        return
    topo = Topology(layout, device, dtype, config.timeout, config.expert_parallel)
    start = next(s for s in topo.gather(begin(config, topo) if topo.is_logger else None) if s is not None)
    if topo.is_logger:
        print(describe(config, layout, inputs, recording))
        ops = describe_kernels(device, dtype, inputs.model_config.head_dim, experts=inputs.model_config.moe is not None)
        print(f"parity: {config.parity} ({ops})")
        print(start, flush=True)

    node_ring, board, mailbox = share(config, inputs, topo, start, recording)
    trainer, rollout = None, None
    store = RouteStore(topo.rank, topo.route_group) if topo.rolls_out else None
    group = topo.weights_group if config.weight_transport == "broadcast" else None
    if topo.trains:
        publisher = Publisher(board if topo.is_node_leader else None, config.timeout, group if topo.is_logger else None)
        trainer = Trainer(config, inputs, topo, start, node_ring, publisher, mailbox if topo.is_node_leader else None, store)
        trainer.publish()  # before the first rollout, so that a broken path fails in the first minute
    if recording is not None:
        rollout = Rerun(recording, node_ring, topo.rollout_index, store, lambda: trainer.version)
    elif topo.rolls_out:
        receiver = Receiver(board, topo.rank, config.timeout, group, topo.first_trainer)
        rollout = make_rollout(config, inputs, start, topo, node_ring, receiver, store, mailbox)
    with contextlib.closing(rollout) if rollout is not None else contextlib.nullcontext():
        if rollout is not None:
            rollout.refresh(min_version=start.version)
        topo.gather(None)  # every rank has attached, and has loaded the first weights
        guard.explain_failures(lambda: f"what the ranks of node {topo.node} did last:\n{node_ring.board.table()}")
        guard.stop_on_signals(node_ring.board.dead, node_ring.ask_to_stop)
        before = evaluate_everywhere(topo, rollout) if start.checkpoint is None else {}
        if trainer is None:
            rollout.run()
        else:
            trainer.log_evaluation(before)
            train(trainer, rollout)
            node_ring.stop(trainer.version)
        if rollout is not None:
            rollout.refresh(min_version=node_ring.stopped_at)
        topo.gather(None)  # every rank knows now where the run has stopped
        after = evaluate_everywhere(topo, rollout) if node_ring.stopped_at == config.steps else {}
        if trainer is not None:
            trainer.close(after)
        topo.gather(None)  # the leader's shared memory outlives every use of it
        topo.close()


def begin(config: Config, topo: Topology) -> Start:
    """The run directory, and what to begin with (one rank)."""
    num_trainers, resume = len(topo.layout.ranks(train=True)), config.resume
    if config.replay:
        recording = Recording(Path(config.replay))
        recording.compare(num_trainers)
        resume = str(recording.checkpoint_before(config.first_step) or "none")
    return open_run(config.run_dir, resume, config.steps, config.prompts_per_step, num_trainers, config.to_json(), topo.restarted)


def share(config: Config, inputs: Inputs, topo: Topology, start: Start, recording: Recording | None) -> tuple[Ring, Board, Mailbox | None]:
    """The node's shared memory: the node leader makes it and owns it, the others attach to it (collective over the world).

    There is a mailbox for routes where other ranks than the training ranks roll out.
    """
    layout = topo.layout
    if topo.is_node_leader:
        shape = ring_shape(config, layout, inputs, recording)
        node_rollout_ranks = layout.ranks(train=False, node=topo.node)
        done = [number // layout.num_nodes for number in start.consumed if number % layout.num_nodes == topo.node]
        node_ring = Ring.create(
            **shape, num_rollout_ranks=len(node_rollout_ranks), num_trainers=len(topo.node_trainers), done=done,
            stride=layout.num_nodes, offset=topo.node, timeout_s=config.timeout,
        )  # fmt: skip
        announce(start.run_dir, topo.node, node_ring.board, node_ring.segment, BOARD_AT)
        readers = [] if recording is not None else node_rollout_ranks
        board = Board.create(Plan.of(hf.build(inputs.model_config, "meta"), topo.dtype), readers, config.weight_transport)
        step_size = config.prompts_per_step // layout.num_nodes * config.samples_per_prompt * inputs.max_branches
        made = node_ring, board, None if layout.colocated else Mailbox.create(node_rollout_ranks, step_size)
    paths = topo.gather([x and x.segment.path for x in made] if topo.is_node_leader else None)[topo.node_leader]
    if topo.is_node_leader:
        return made
    return Ring.attach(paths[0]), Board.attach(paths[1]), paths[2] and Mailbox.attach(paths[2])


def evaluate_everywhere(topo: Topology, rollout: Rollout | Rerun | None) -> dict[str, Metric]:
    """Held-out metrics, the prompts shared among all rollout ranks of the world (collective over the world)."""
    rollout_ranks = topo.layout.ranks(train=False)
    mine = rollout.evaluate(rollout_ranks.index(topo.rank), len(rollout_ranks)) if rollout is not None else {}
    return merge(topo.gather(mine))


if __name__ == "__main__":
    guard.run(main)
