"""Clients of sessions at random, on the real engine, and what must hold of every session afterwards. For tests and for tests/bench.

    engine, backend = ..., EngineBackend(engine)
    clients = [Client(Session("0", renderer, Ear(backend), ...), seed=0) ...]
    play(engine, backend, clients, turns=20)
    prefix_violations(client), mask_errors(client, samples), differing(model, samples, version), Hits.of(clients)

Legend: T tokens of a prompt, P of these new, M sampled tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from miles_core import pack
from miles_core.engine.engine import Engine, SamplingParams
from miles_core.model.attend import PackedAttend
from miles_core.model.transformer import Transformer
from miles_core.parity import Gate
from miles_core.route_transport import Fetch, RouteStore
from miles_core.routing import BalanceParams, TrainRoutes, encode
from miles_core.tito.backend import TurnRequest, TurnResult
from miles_core.tito.engine_backend import EngineBackend, EngineTurn
from miles_core.tito.samples import Sample
from miles_core.tito.session import Session
from miles_core.tito.tree import Node

SYMBOLS = "0123456789+ "


@dataclass(frozen=True)
class Traffic:
    """What a client does. Characters of messages: `system` (of all clients the same), `first` and `later` at most. Chances a request."""

    params: SamplingParams
    system: int = 0
    first: int = 12
    later: int = 12
    back: float = 0.3  # it goes on from any earlier answer
    retry: float = 0.2  # it asks twice
    cancel: float = 0.1  # it goes away before the answer is there

    def text(self, rng: random.Random, characters: int) -> str:
        return "".join(rng.choices(SYMBOLS, k=characters))

    def beginning(self) -> list[dict]:
        return [{"role": "system", "content": self.text(random.Random(0), self.system)}] if self.system else []


def agents(stop_ids: tuple[int, ...], vocabulary: int) -> Traffic:
    """Of agents: a long first prompt whose beginning they share, answers of up to 40 tokens, short tool messages.

    Beside `stop_ids` every 25th id ends an answer, or most would be cut by length and end their branch.
    """
    params = SamplingParams(1.0, 1.0, 0, 40, (*stop_ids, *range(0, vocabulary, 25)))
    return Traffic(params, system=800, first=40, later=8, back=0.05, retry=0.1, cancel=0.05)


class Ear:
    """The engine for one session; hears what that asks and is told."""

    def __init__(self, backend: EngineBackend) -> None:
        self.backend, self.max_context = backend, backend.max_context
        self.last: EngineTurn | None = None

    def submit(self, request: TurnRequest) -> EngineTurn:
        self.last = self.backend.submit(request)
        return self.last

    @property
    def load(self) -> int:
        return self.backend.load


@dataclass(frozen=True)
class Turn:
    """A turn as the session has it, and as the engine was asked for it and answered."""

    node: Node
    request: TurnRequest
    result: TurnResult


class Client:
    """Goes on, asks again, goes back and goes away, at random."""

    def __init__(self, session: Session, seed: int, traffic: Traffic) -> None:
        self.session, self.rng, self.traffic = session, random.Random(seed), traffic
        self.turns: list[Turn] = []
        self.cancelled = 0
        self.branches: list[list[dict]] = [traffic.beginning()]

    async def play(self, turns: int) -> None:
        for _ in range(turns):
            await self._ask()

    async def _ask(self) -> None:
        rng, traffic = self.rng, self.traffic
        messages = rng.choice(self.branches) if rng.random() < traffic.back else self.branches[-1]
        begins = not messages or messages[-1]["role"] == "system"
        text = traffic.text(rng, rng.randint(1, traffic.first if begins else traffic.later))
        asked = [*messages, {"role": "user" if begins else "tool", "content": text}]
        for _ in range(2 if rng.random() < traffic.retry else 1):
            task = asyncio.ensure_future(self.session.chat(asked, params=traffic.params))
            if rng.random() < traffic.cancel:
                for _ in range(rng.randint(0, 12)):
                    await asyncio.sleep(0)
                task.cancel()
            try:
                reply = await task
            except asyncio.CancelledError:
                self.cancelled += 1
                continue
            turn = self.session.backend.last
            self.turns.append(Turn(reply.node, turn.request, await turn.result()))
            if reply.finish != "length":
                self.branches.append([*asked, reply.message])


async def drive(
    engine: Engine, backend: EngineBackend, work: asyncio.Future, before_step: Callable[[int], None] = lambda step: None
) -> None:
    """Step the engine on the loop of the sessions until the work is done."""
    for step in range(100_000):
        if work.done():
            return
        for _ in range(4):
            await asyncio.sleep(0)
        backend.pump()
        before_step(step)
        for completion in engine.step():
            assert backend.finish(completion)
    raise AssertionError("the sessions did not end")


def play(
    engine: Engine, backend: EngineBackend, clients: list[Client], turns: int, before_step: Callable[[int], None] = lambda step: None
) -> None:
    """All clients at once, `turns` requests each."""

    async def main() -> None:
        work = asyncio.gather(*(client.play(turns) for client in clients))
        await drive(engine, backend, work, before_step)
        await work

    asyncio.run(main())
    assert engine.num_unfinished == 0 and backend.load == 0 and engine.pool.available == engine.pool.num_pages


def new_weights(model: Transformer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)


def change(engine: Engine, on_update: str) -> None:
    """New weights, between two steps."""
    new_weights(engine.model)
    engine.set_version(engine.version + 1, on_update)


# ---- what must hold


def prefix_violations(client: Client) -> int:
    """Turns that the engine was not asked to continue from exactly what it had been asked and had said on the way there."""
    stored = {turn.node.number: np.concatenate((turn.request.tokens, turn.result.tokens)) for turn in client.turns}
    return sum(
        not np.array_equal(
            turn.request.tokens, np.concatenate((stored.get(turn.node.parent.number, turn.node.prompt[:0]), turn.node.prompt))
        )
        for turn in client.turns
    )


def mask_errors(client: Client, samples: list[Sample]) -> int:
    """Positions at which samples are not what the engine heard and said: ids, mask, log-probs; each sampled token trained once."""
    heard, trained, wrong = {turn.node.number: turn for turn in client.turns}, set(), 0
    for sample in samples:
        t, way, node = sample.trajectory, [], sample.leaf
        while node.number:
            way.append(heard[node.number])
            node = node.parent
        tokens_T = np.concatenate((way[0].request.tokens, way[0].result.tokens))
        mask_T, logp_T = np.zeros(len(tokens_T), np.uint8), np.zeros(len(tokens_T), np.float32)
        for turn in way:
            if turn.node.number not in trained:
                begin = len(turn.request.tokens)
                mask_T[begin : begin + len(turn.result.tokens)], logp_T[begin : begin + len(turn.result.tokens)] = 1, turn.result.logp
        trained |= {turn.node.number for turn in way}
        assert len(tokens_T) == len(t.tokens), (len(tokens_T), len(t.tokens))
        wrong += int(((tokens_T != t.tokens) | (mask_T != t.loss_mask) | (logp_T != t.logp_roll)).sum())
    return wrong


def differing(model: Transformer, samples: list[Sample], version: int, on_update: str = "recompute") -> tuple[int, int]:
    """(tokens compared with the trainer, those that differ), of tokens sampled from the weights of `version`, which `model` has.

    Recorded routes are replayed.
    """
    store, moe, compared, wrong = RouteStore(0, None), model.config.moe, 0, 0
    for number, sample in enumerate(samples):
        t = sample.trajectory
        t.group, t.verdict = number, 0
        if moe:
            store.keep(t, encode(sample.routes.rows_RLK, np.arange(len(t.tokens)) < len(sample.routes.version_R)))
    trajectories = [sample.trajectory for sample in samples]
    fetch = Fetch(trajectories if moe else [], store, None, moe, torch.device("cpu"), 1.0)
    gate = Gate("report", on_update, synchronous=False)
    for batch in map(fetch.attach, pack.pack(trajectories, 4096)):
        route = TrainRoutes(batch, moe, replay=True, passes=1, balance=BalanceParams())
        sampling = (batch.temperature_M, batch.top_p_M, batch.top_k_M)
        attend = PackedAttend(batch.cu_seqlens_S1, model.config.head_dim**-0.5)
        with torch.no_grad():
            logp_M, _ = model(batch.tokens_T, batch.positions_T, attend, batch.rows_M, batch.targets_M, sampling, route)
        seen = gate.watch(logp_M, batch, version, route)
        count = int(seen["train/logp_diff_tokens"].value())
        compared += count
        wrong += round(float(seen["train/logp_diff_frac"].value()) * count) if count else 0
    return compared, wrong


@dataclass(frozen=True)
class Hits:
    """Prompt tokens of some turns: how many in all, how many came from the cache, and how many were new, so that no cache can have them.

    `excess`: computed beyond the new ones, by the turn that computed most.
    """

    tokens: int
    cached: int
    new: int
    turns: int
    excess: int

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> Hits:
        each = [(len(turn.request.tokens), turn.result.cached, len(turn.node.prompt)) for turn in turns]
        tokens, cached, new = (sum(column) for column in zip(*each, strict=True))
        return cls(tokens, cached, new, len(each), max(tokens - cached - new for tokens, cached, new in each))

    @property
    def rate(self) -> float:
        return self.cached / self.tokens


def later(clients: Iterable[Client]) -> list[Turn]:
    """The turns of these clients beyond the first ones of their conversations."""
    return [turn for client in clients for turn in client.turns if turn.node.depth > 1]
