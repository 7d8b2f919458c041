"""The rollout rank's loop on one page: claim -> generate -> reward -> advantage -> ring.

train.py starts it on the rollout ranks of a torchrun. Alone it evaluates or tries a checkpoint:

    python rollout.py --model runs/X/checkpoints/latest --task sort --eval --eval-samples 4
    python rollout.py --model DIR --generate "What is 3 + 4?"
    python rollout.py --model DIR --serve                                           # sessions over HTTP, as the OpenAI API
    torchrun --nproc-per-node 2 rollout.py --model DIR --task arithmetic --eval     # ranks share the prompts
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from miles_core import guard, numerics, pacing, tasks
from miles_core.advantage import ADVANTAGES
from miles_core.assets import TINY
from miles_core.config import Config, parse_args
from miles_core.digest import file_digest
from miles_core.earlier import Earlier
from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.evaluation import EVAL_GROUP, IDLE_S, evaluate
from miles_core.journal import Journal
from miles_core.metrics import Metric, merge
from miles_core.model import hf
from miles_core.model.layers import named_weights
from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import ModelConfig, Transformer
from miles_core.parity import choose_kernels
from miles_core.ring import Claim, Ring
from miles_core.route_transport import Mailbox, RouteStore
from miles_core.schema import VERDICTS, Prompt
from miles_core.start import Start
from miles_core.tasks.rewards import RewardPool
from miles_core.tito.agents import HTTP, load_agent
from miles_core.tito.alone import serve_alone
from miles_core.tito.player import Answer, Player
from miles_core.tito.verify import renderer_for
from miles_core.topology import Topology, layout_from_env
from miles_core.weights import Receiver

OK = VERDICTS.index("ok")
NO_ROUTES = np.zeros(0, np.uint8)
TOKEN = "MILES_SERVE_TOKEN"  # environment variable: never on a command line, which everybody can read


@dataclass
class Group:
    """A group in flight on this rank."""

    claim: Claim
    prompt: Prompt
    done: dict[int, Answer] = field(default_factory=dict)
    num_rewarded: int = 0
    num_resampled: int = 0  # times that its bad samples were drawn again


class Rollout:
    """One rollout rank. `tick()` does a little of everything and never waits, so that a colocated rank can alternate it with training.

    `routes` holds what the engine has recorded of a mixture of experts, until the training ranks ask for it in the mailbox. A finished
    group goes to the `journal` before anyone can train on it; what `earlier` has of it need not be made.
    """

    def __init__(
        self, config: Config, inputs: Inputs, model: Transformer, ring: Ring, weights: Receiver, index: int,
        routes: RouteStore, mailbox: Mailbox | None, journal: Journal, earlier: Earlier,
    ):  # fmt: skip
        self.config, self.inputs, self.ring, self.weights, self.index = config, inputs, ring, weights, index
        self.routes, self.mailbox, self.journal, self.earlier = routes, mailbox, journal, earlier
        # A fair share of the slots: the first rank to look must not admit every group of a step while the others idle.
        self.max_open = math.ceil(ring.num_slots / ring.num_rollout_ranks)
        self.engine = make_engine(config, inputs, model, self.max_open)
        self.player = make_player(config, inputs, self.engine)
        if self.player.offers is not None:
            self.player.offers.share(ring, index)
        self.rewards = make_rewards(config)
        self.open: dict[int, Group] = {}

    def tick(self) -> bool:
        """Take new weights, admit, decode one token of every sequence, hand finished groups over. False when there was nothing to do."""
        self.refresh()
        self.serve_routes()
        admitted = self.admit()
        answers = self.player.step()
        if self.ring.asked > 1:
            return False  # SIGTERM meets sandboxes and reward processes, too: how they end says nothing about a sample
        for answer in answers:
            number, sample = answer.trajectory.group, answer.trajectory.sample
            self.open[number].done[sample] = answer
            if answer.reward is None and answer.verdict == "ok":
                self.rewards.submit((number, sample), self.open[number].prompt.answer, answer.text)
            else:
                self.judge(number, sample, answer.reward or 0.0, answer.verdict)
        for (number, sample), reward, verdict, _ in self.rewards.poll():
            self.judge(number, sample, reward, verdict)
        return admitted or self.engine.num_unfinished > 0

    def judge(self, number: int, sample: int, reward: float, verdict: str) -> None:
        """The reward of one sample; the last one of its group finishes it."""
        group, size = self.open[number], self.config.samples_per_prompt
        for trajectory in group.done[sample].trajectories:
            trajectory.reward, trajectory.verdict = reward, VERDICTS.index(verdict)
        group.num_rewarded += 1
        if group.num_rewarded < size:
            return
        bad = [s for s, answer in group.done.items() if answer.trajectory.verdict != OK]
        if 2 * len(bad) > size and group.num_resampled < self.config.resample:
            group.num_resampled += 1
            self.ring.count(self.index, resampled=len(bad))
            for sample in bad:
                del group.done[sample]
                group.num_rewarded -= 1
                self.player.add(group.prompt, sample, attempt=group.num_resampled)
        else:
            self.finish(self.open.pop(number))

    def refresh(self, min_version: int | None = None) -> None:
        """Load the newest published weights if they are new; with `min_version`, wait until at least that version is there."""
        version = self.weights.receive(named_weights(self.engine.model), min_version)
        if version is not None:
            self.engine.set_version(version, self.config.on_update)
            self.ring.set_live(self.index, version)
            if self.config.save_every and version % self.config.save_every == 0:
                self.journal.rotate()  # a checkpoint is being written: what it does not hold must be on disk, too

    def serve_routes(self) -> None:
        """Send the routes that training ranks have asked for since the last look."""
        if self.mailbox is not None:
            self.routes.serve(self.mailbox.poll(self.routes.rank))

    def admit(self) -> bool:
        """Claim group numbers while pacing and this rank's share allow it, and queue their samples."""
        admitted = False
        while len(self.open) < self.max_open and (claim := self.ring.claim(self.index)) is not None:
            admitted = True
            if self.restore(claim):
                continue
            prompt = make_prompt(self.config, self.inputs, claim.group, "train")
            self.open[claim.group] = Group(claim, prompt)
            for sample in range(self.config.samples_per_prompt):
                self.player.add(prompt, sample)
        return admitted

    def restore(self, claim: Claim) -> bool:
        """Put the group as an earlier incarnation has journalled it. False when it has to be made."""
        before = self.earlier.num_made_again
        found = self.earlier.find(claim.group)
        self.ring.count(self.index, restored=found is not None, made_again=self.earlier.num_made_again - before)
        if found is None:
            return False
        for trajectory, payload in zip(found.group, found.routes, strict=True):
            if len(payload):
                self.routes.keep(trajectory, torch.from_numpy(payload).to(self.engine.device))
        self.ring.put(claim, found.group)
        return True

    def finish(self, group: Group) -> None:
        """Rewards of a whole group -> advantages -> journal -> ring. From here on the trajectories are frozen."""
        answers = [group.done[sample] for sample in range(self.config.samples_per_prompt)]
        rewards = np.array([answer.trajectory.reward for answer in answers])
        ok = np.array([answer.trajectory.verdict == OK for answer in answers])
        for answer, advantage in zip(answers, ADVANTAGES[self.config.advantage](rewards, ok), strict=True):
            for trajectory, routes in zip(answer.trajectories, answer.routes, strict=True):
                trajectory.advantage = float(advantage)
                if routes is not None:
                    self.routes.keep(trajectory, routes)
        trajectories = [trajectory for answer in answers for trajectory in answer.trajectories]
        routes = [NO_ROUTES if rows is None else rows.cpu().numpy() for answer in answers for rows in answer.routes]
        data = self.journal.append(trajectories, routes)  # first the journal: what is trained on can be had again
        self.ring.put_bytes(group.claim, data)

    def evaluate(self, shard: int, num_shards: int) -> dict[str, Metric]:
        self.ring.board.beat(self.index, "evaluating")
        metrics = held_out(self.config, self.inputs, self.player, self.rewards, shard, num_shards)
        if (offers := self.player.offers) is not None:
            offers.end_evaluation()
            deadline = time.monotonic() + self.config.timeout
            while offers.evaluating():  # answering harnesses meanwhile
                self.player.step()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {self.config.timeout:g} s for the other rollout ranks of this node to end their evaluation")
                time.sleep(IDLE_S)
        return metrics

    def close(self) -> None:
        self.player.close()
        self.rewards.close()
        self.journal.close(self.config.timeout)

    def run(self) -> None:
        """The life of a dedicated rollout rank: until the trainer says stop."""
        blocked_since = None
        while self.ring.stopped_at is None:
            if self.tick():
                blocked_since = None
                continue
            now = time.monotonic()
            if blocked_since is not None:
                self.ring.add_blocked(self.index, now - blocked_since)
                self.ring.board.expect_trainer(self.config.timeout)
            blocked_since = None if self.open else now  # nothing in flight and no free slot: the trainer is the bottleneck
            time.sleep(IDLE_S)


def make_rollout(
    config: Config, inputs: Inputs, start: Start, topo: Topology, ring: Ring, weights: Receiver, routes: RouteStore, mailbox: Mailbox | None
) -> Rollout:
    """The rollout half of a rank, with its journal and what earlier incarnations have left in theirs."""
    ring.board.join(topo.rollout_index, topo.rank, trains=False)
    model = hf.build(inputs.model_config, topo.device, topo.dtype)
    directory, recipe, num_nodes = start.run_dir / "journal", recipe_of(config, model), topo.layout.num_nodes
    earlier = Earlier(
        directory, start.incarnation, recipe, start.still_valid,
        lambda group: pacing.last_version(group // num_nodes, ring.window, config.prompts_per_step // num_nodes), config.max_staleness,
    )  # fmt: skip
    journal = Journal(directory, start.incarnation, topo.rank, recipe, config.journal_fsync)
    return Rollout(config, inputs, model, ring, weights, topo.rollout_index, routes, mailbox, journal, earlier)


def recipe_of(config: Config, model: Transformer) -> dict[str, object]:
    """What shapes a group, beside the weights: one that was journalled under another recipe is made again."""
    names = (
        "model task data seed agent samples_per_prompt max_new_tokens max_context max_turns max_branches temperature top_p top_k advantage "
        "parity routing_replay"
    )
    weight = model.embed_tokens.weight
    scripts = [name for name in (config.task, config.agent.rpartition(":")[0]) if name.endswith(".py")]
    made = {"computed": f"{weight.device.type} {weight.dtype}", "scripts": [file_digest(Path(script)) for script in scripts]}
    return {name: getattr(config, name) for name in names.split()} | made


@dataclass(frozen=True)
class Inputs:
    """What every rank reads from disk, and checks, before any process group exists."""

    model_dir: Path
    model_config: ModelConfig
    tokenizer: hf.Tokenizer
    stop_token_ids: tuple[int, ...]
    task: tasks.Task
    max_context: int  # prompt + answer, tokens; of an episode each branch, all its turns
    max_turns: int  # answers in it
    max_branches: int  # trajectories that it may become


def load_inputs(config: Config, device: torch.device, dtype: torch.dtype) -> Inputs:
    model_dir = TINY if config.model == "tiny" else hf.resolve(config.model)
    model_config = hf.load_config(model_dir)
    hf.check_weights(model_dir, model_config)
    max_context = min(config.max_context, model_config.max_position)
    if config.max_new_tokens >= max_context:
        raise ValueError(
            f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt: --model {config.model} takes {max_context}"
        )
    task = tasks.load(config.task, config.seed, config.data, config.eval_data)
    choose_kernels(model_config, device, dtype, config.parity)
    check_router(config, model_config.moe)
    max_turns = max_branches = 1
    if agent := agent_name(config, task):
        if agent != HTTP:
            load_agent(agent)
        max_turns, max_branches = config.max_turns, min(config.max_branches, config.max_turns)  # each has a turn of its own
    elif config.serve_port and not config.serve:
        raise ValueError(f"--serve-port: --task {config.task} has no agent, so there are no sessions to serve; give one with --agent")
    if config.micro_batch_tokens < max_context:
        raise ValueError(f"--micro-batch-tokens {config.micro_batch_tokens} cannot hold one sample of --max-context {max_context}")
    tokenizer = hf.load_tokenizer(model_dir)
    stop_ids = hf.load_stop_ids(model_dir, tokenizer)
    return Inputs(model_dir, model_config, tokenizer, stop_ids, task, max_context, max_turns, max_branches)


def check_router(config: Config, moe: MoEConfig | None) -> None:
    """Refuse flags of the router that this model has no use for."""
    flags = ["router_balance_coef", "router_z_coef", "router_bias_rate", "freeze_router"]
    for flag in (f for f in flags if moe is None and getattr(config, f)):
        raise ValueError(f"--{flag.replace('_', '-')} is for a mixture of experts, and --model {config.model} is dense: leave it out")
    num_experts = 0 if moe is None else moe.num_experts
    if config.expert_parallel > 1 and (not num_experts or num_experts % config.expert_parallel):
        size = config.expert_parallel
        raise ValueError(f"--expert-parallel {size} does not divide the {num_experts} experts of --model {config.model}")
    if config.router_bias_rate and not moe.correction_bias:
        raise ValueError(
            f"--router-bias-rate: the routers of --model {config.model} have no correction bias; use --router-balance-coef instead"
        )


def make_prompt(config: Config, inputs: Inputs, group: int, split: str) -> Prompt:
    """Prompt number `group` of a split; a ValueError when it leaves no room for an answer."""
    prompt = tasks.make_prompt(inputs.task, inputs.tokenizer, group, split)
    room = inputs.max_context - config.max_new_tokens
    if len(prompt.tokens) > room:
        raise ValueError(
            f"--task {config.task}: {split} prompt {group} has {len(prompt.tokens)} tokens, but --max-context {inputs.max_context} less "
            f"--max-new-tokens {config.max_new_tokens} leaves {room}"
        )
    return prompt


def sampling_params(config: Config, inputs: Inputs) -> SamplingParams:
    return SamplingParams(config.temperature, config.top_p, config.top_k, config.max_new_tokens, inputs.stop_token_ids)


def make_engine(config: Config, inputs: Inputs, model: Transformer, num_groups: int) -> Engine:
    """An engine with room for `num_groups` groups at their longest, or for what --kv-tokens says."""
    num_sequences = min(config.max_sequences, num_groups * config.samples_per_prompt)
    kv_tokens = config.kv_tokens or min(65536, num_sequences * inputs.max_context)
    return Engine(
        model, inputs.tokenizer, seed=numerics.derive_seed(config.seed, "sampling"), num_pages=max(1, kv_tokens // 64),
        max_batch_tokens=config.prefill_tokens, max_sequences=num_sequences, routing_replay=config.routing_replay,
    )  # fmt: skip


def agent_name(config: Config, task: tasks.Task) -> str:
    """Which agent plays: the one that was asked for, else the task's own; "" where an answer is one turn."""
    return config.agent or getattr(task, "agent", "")


def make_player(config: Config, inputs: Inputs, engine: Engine) -> Player:
    """With --serve-port it serves its sessions already."""
    params = sampling_params(config, inputs)
    if not (name := agent_name(config, inputs.task)):
        return Player(engine, params)
    renderer = renderer_for(inputs.tokenizer, ends=inputs.stop_token_ids)
    player = Player(
        engine, params, HTTP if name == HTTP else load_agent(name), renderer,
        max_context=inputs.max_context, max_turns=inputs.max_turns, max_branches=inputs.max_branches, timeout_s=config.episode_timeout,
        nobody_s=0.9 * config.timeout, strict=config.parity == "strict",  # sooner than the trainer, who knows less about the reason
    )  # fmt: skip
    if config.serve_port:
        rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
        url = player.serve(config.serve_host, config.serve_port + local_rank, model=config.model, token=os.environ.get(TOKEN))
        start = f": python -m miles_core.tito.harness --url {url} --agent module:function" * (name == HTTP)
        print(f"rank {rank} serves its sessions at {url}{start}", flush=True)
    return player


def make_rewards(config: Config) -> RewardPool:
    return RewardPool(
        config.task, config.seed, config.data, config.eval_data, config.reward_workers, config.reward_timeout, config.reward_memory
    )  # fmt: skip


def held_out(config: Config, inputs: Inputs, player: Player, rewards: RewardPool, shard: int, num_shards: int) -> dict[str, Metric]:
    """`evaluate` over this rank's share of the held-out prompts; nothing with --eval-prompts 0."""
    if not config.eval_prompts:
        return {}
    numbers = range(shard, min(config.eval_prompts, inputs.task.num_eval), num_shards)
    prompts = [make_prompt(config, inputs, number, "eval") for number in numbers]
    return evaluate(player, rewards, prompts, config.eval_samples, inputs.task.name)


def serve_sessions(config: Config, inputs: Inputs, engine: Engine) -> None:
    """Sessions over HTTP, for any harness that speaks the OpenAI chat API; see miles_core/tito/server.py."""
    renderer, params = renderer_for(inputs.tokenizer, ends=inputs.stop_token_ids), sampling_params(config, inputs)
    where = config.serve_host, config.serve_port
    serve_alone(engine, renderer, params, *where, inputs.max_context, model=config.model, token=os.environ.get(TOKEN))


def main() -> None:
    """Alone: evaluate a checkpoint, answer one message, or serve."""
    config = parse_args(sys.argv[1:], "rollout.py", __doc__)
    numerics.setup()
    if config.eval + config.serve + bool(config.generate) != 1:
        raise ValueError("say --eval to evaluate, --generate TEXT to answer one message, or --serve to serve sessions")
    layout = layout_from_env(0)
    device, dtype = numerics.choose(config.device, config.dtype, layout.local_rank)
    topo = Topology(layout, device, dtype, config.timeout)
    inputs = load_inputs(config, device, dtype)
    num_groups = config.max_sequences if config.serve else max(1, config.eval_prompts)
    engine = make_engine(config, inputs, hf.load(inputs.model_dir, device, dtype), num_groups)
    if config.generate:
        prompt = tasks.user_prompt(config.generate, inputs.tokenizer)
        print(engine.generate([Request(EVAL_GROUP, 0, prompt, sampling_params(config, inputs))])[0].text)
        return
    if config.serve:
        return serve_sessions(config, inputs, engine)
    player, rewards = make_player(config, inputs, engine), make_rewards(config)
    metrics = merge(topo.gather(held_out(config, inputs, player, rewards, topo.rank, topo.layout.world_size)))
    player.close()
    rewards.close()
    if topo.rank == 0:
        for name, metric in metrics.items():
            print(f"{name}  {metric.value():.4f}")
    topo.close()


if __name__ == "__main__":
    guard.run(main)
