"""Replay in the trainer: recorded ids in slot order, live weights, a router that learns; its losses, whatever the packing; what is counted.

    python -m pytest tests/core/test_train_routes.py

The recorded routes here are the worst that each router could choose, so that no token is where the live router would send it.

Legend: T tokens, L MoE layers, K slots, E experts, M sampled rows, S sequences.
"""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from samples import trajectory
from tiny_models import CONFIGS, random_model

from miles_core import pack
from miles_core.metrics import merge
from miles_core.model import moe as moe_module
from miles_core.model.moe import MoEConfig, Route, live, routers
from miles_core.model.transformer import Transformer
from miles_core.routing import BalanceParams, Replay, TrainRoutes, id_dtype, load
from miles_core.schema import Batch
from train import score

FAMILIES = ["qwen3-moe", "mixtral", "glm4-moe"]
BALANCE = BalanceParams(router_balance_coef=0.3, router_z_coef=0.2, num_sequences=4, num_tokens=54)


def worst(layer: int, logits_TE: torch.Tensor, live_TK: torch.Tensor) -> torch.Tensor:
    """The experts with the lowest logits, the least likely first."""
    return logits_TE.argsort(dim=-1, stable=True)[:, : live_TK.shape[1]].contiguous()


def trajectories() -> list:
    return [trajectory(3 + i, 20 - 5 * i, group=i, vocabulary=131) for i in range(4)]


def one_batch() -> Batch:
    (batch,) = pack.pack(trajectories(), 100)
    return batch


def coefficients(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def recorded(model: Transformer, batch: Batch, route: Route = worst) -> tuple[Batch, torch.Tensor]:
    """The batch with the rows that `route` chooses, and the log-probs that they give."""
    seen: list[torch.Tensor] = []

    def recording(layer: int, logits_TE: torch.Tensor, live_TK: torch.Tensor) -> torch.Tensor:
        seen.append(route(layer, logits_TE, live_TK))
        return seen[-1]

    with torch.no_grad():
        logp_M, _ = score(model, batch, recording)
    rows_TLK = torch.stack(seen, 1).to(id_dtype(model.config.moe.num_experts))
    return replace(batch, routes_TLK=rows_TLK, routed_T=torch.ones(batch.num_tokens, dtype=torch.bool)), logp_M


def train(
    model: Transformer, batch: Batch, *, replay: bool = True, passes: int = 1, balance: BalanceParams = BALANCE
) -> tuple[torch.Tensor, TrainRoutes, dict[str, torch.Tensor]]:
    """One micro-batch as train.py runs it: log-probs, what routed, gradients."""
    model.zero_grad()
    route = TrainRoutes(batch, model.config.moe, replay=replay, passes=passes, balance=balance)
    logp_M, _ = score(model, batch, route)
    ((logp_M * coefficients(len(logp_M)) * batch.keep_M).sum() + route.loss).backward()
    route.check()
    return logp_M.detach(), route, {name: p.grad.clone() for name, p in model.named_parameters()}


# ---- replay


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_ids_are_used_in_slot_order_with_live_weights(name: str) -> None:
    model = random_model(CONFIGS[name])
    moe, (batch, _) = CONFIGS[name].moe, recorded(model, one_batch())
    batch.routed_T[[0, 5, 23]] = False
    logits, used = [], []
    for router in routers(model):
        router.register_forward_hook(lambda _, __, output: logits.append(output))
    for module in model.modules():
        if isinstance(module, moe_module.Experts):
            module.register_forward_pre_hook(lambda _, inputs: used.append(inputs[1:]))
    with torch.no_grad():
        score(model, batch, TrainRoutes(batch, moe, replay=True, passes=1, balance=BalanceParams()))
    assert len(used) == len(moe.layers)
    for layer, ((logits_TE, live_TK), (ids_TK, weights_TK)) in enumerate(zip(logits, used, strict=True)):
        expected_TK = torch.where(batch.routed_T[:, None], batch.routes_TLK[:, layer].long(), live_TK)
        assert torch.equal(ids_TK, expected_TK) and (ids_TK[batch.routed_T] != live_TK[batch.routed_T]).any(1).all()
        wide_TE = logits_TE.double()
        score_TK = (wide_TE.softmax(-1) if moe.scoring == "softmax" else wide_TE.sigmoid()).gather(1, expected_TK)
        score_TK = score_TK / score_TK.sum(1, keepdim=True) if moe.normalise else score_TK
        torch.testing.assert_close(weights_TK.double(), score_TK * moe.scale, rtol=1e-5, atol=1e-7)


def router_gradients(model: Transformer, batch: Batch) -> list[torch.Tensor]:
    _, _, gradients = train(model, batch, balance=BalanceParams())
    return [gradient for name, gradient in gradients.items() if name.endswith("gate.weight")]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_of_a_replayed_router_is_its_finite_difference(name: str) -> None:
    model = random_model(CONFIGS[name])
    batch, _ = recorded(model, one_batch())

    def value() -> float:
        with torch.no_grad():
            logp_M, _ = score(model, batch, Replay(batch.routes_TLK, batch.routed_T))
        return float((logp_M.double() * coefficients(len(logp_M))).sum())

    generator = torch.Generator().manual_seed(0)
    for router, gradient in zip(routers(model), router_gradients(model, batch), strict=True):
        weight, norm = router.weight.data, float(gradient.norm())
        assert norm > 0.01
        for direction in (gradient, torch.randn(weight.shape, generator=generator)):
            step = 0.01 * direction / direction.norm()
            before = weight.clone()
            weight.add_(step)
            above = value()
            weight.copy_(before - step)
            below = value()
            weight.copy_(before)
            assert (above - below) / 0.02 == pytest.approx(float((gradient * step).sum()) / 0.01, abs=2e-3 * norm)


def test_mutant_weights_from_zeros_after_the_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of experts that the live router did not choose are gathered as 0: no router gradient."""
    model = random_model(CONFIGS["qwen3-moe"])
    batch, _ = recorded(model, one_batch())
    assert all(gradient.abs().max() > 1e-3 for gradient in router_gradients(model, batch))

    def from_zeros(logits_TE: torch.Tensor, ids_TK: torch.Tensor, *, scoring: str, normalise: bool, scale: float) -> torch.Tensor:
        assert (scoring, normalise, scale) == ("softmax", False, 1.0)
        top = logits_TE.softmax(-1).topk(ids_TK.shape[1])
        return torch.zeros_like(logits_TE).scatter(1, top.indices, top.values).gather(1, ids_TK)

    monkeypatch.setattr(moe_module, "weigh", from_zeros)
    assert not any(gradient.any() for gradient in router_gradients(model, batch))


@pytest.mark.parametrize("name", FAMILIES)
def test_replay_gives_the_bits_of_the_recorded_forward(name: str) -> None:
    model = random_model(CONFIGS[name])
    for route, differs in ((worst, 1.0), (live, 0.0)):
        batch, expected_M = recorded(model, one_batch(), route)
        logp_M, trained, _ = train(model, batch)
        assert torch.equal(logp_M, expected_M) and trained.metrics()["train/route_diff_frac"].value() == differs
        trainer_M, trained, _ = train(model, batch, replay=False)
        assert torch.equal(trainer_M, expected_M) == (route is live), "only recorded, the rows decide nothing"


def shifted(self: Replay, layer: int, logits_TE: torch.Tensor, live_TK: torch.Tensor) -> torch.Tensor:
    return self.rows_TLK.roll(1, 0)[:, layer].long()


def unordered(self: Replay, layer: int, logits_TE: torch.Tensor, live_TK: torch.Tensor) -> torch.Tensor:
    return self.rows_TLK[:, layer].long().sort(1).values


@pytest.mark.parametrize("mutant", [shifted, unordered])
@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe"])
def test_mutants_of_replay_change_log_probs(name: str, mutant: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the token before; and the right experts, added in another order than they were in rollout (which takes three slots)."""
    assert CONFIGS[name].moe.top_k >= 3
    model = random_model(CONFIGS[name])
    for route in (worst, live):
        batch, expected_M = recorded(model, one_batch(), route)
        assert torch.equal(train(model, batch)[0], expected_M)
        with monkeypatch.context() as patch:
            patch.setattr(Replay, "__call__", mutant)
            assert not torch.equal(train(model, batch)[0], expected_M)


# ---- activation checkpointing, and counting


@pytest.mark.parametrize("balance", [BalanceParams(), BALANCE], ids=["alone", "with router losses"])
@pytest.mark.parametrize("name", FAMILIES)
def test_activation_checkpointing_replays_the_same_rows(name: str, balance: BalanceParams) -> None:
    model = random_model(CONFIGS[name])
    batch, _ = recorded(model, one_batch())
    for replay in (True, False):
        model.activation_checkpointing = False
        logp_M, once, expected = train(model, batch, replay=replay, balance=balance)
        model.activation_checkpointing = True
        again_M, twice, found = train(model, batch, replay=replay, balance=balance, passes=2)
        assert torch.equal(again_M, logp_M) and all(torch.equal(found[name], expected[name]) for name in expected)
        assert once.calls == [1] * len(once.moe.layers) and twice.calls == [2] * len(once.moe.layers)
        assert torch.equal(load([once]), load([twice])) and torch.equal(once.loss, twice.loss)
        assert {n: m.value() for n, m in once.metrics().items()} == {n: m.value() for n, m in twice.metrics().items()}


def test_a_layer_that_ran_too_often_or_too_rarely_is_an_error() -> None:
    model = random_model(CONFIGS["qwen3-moe"])
    batch, _ = recorded(model, one_batch())
    _, route, _ = train(model, batch)
    route(1, torch.zeros(batch.num_tokens, 7), batch.routes_TLK[:, 1].long())
    with pytest.raises(AssertionError, match=r"routes were used \[1, 2\] times, not 1 in every MoE layer"):
        route.check()
    with pytest.raises(AssertionError, match=r"\[1, 1\] times, not 2"):
        train(model, batch, passes=2)
    model.activation_checkpointing = True
    with pytest.raises(AssertionError, match=r"\[2, 2\] times, not 1"):
        train(model, batch, passes=1)


def test_rows_of_another_batch_are_an_error() -> None:
    model = random_model(CONFIGS["qwen3-moe"])
    batch, _ = recorded(model, one_batch())
    with pytest.raises(AssertionError):
        train(model, replace(batch, routes_TLK=batch.routes_TLK[:-1], routed_T=batch.routed_T[:-1]))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dummy_batch_is_inert(name: str) -> None:
    model = random_model(CONFIGS[name])
    _, route, gradients = train(model, pack.dummy())
    assert float(route.loss.detach()) == 0.0 and not load([route]).any() and not any(g.any() for g in gradients.values())
    batch, _ = recorded(model, one_batch())
    _, real, _ = train(model, batch)
    assert torch.equal(load([real, route]), load([real]))
    assert load([real]).sum(1).tolist() == [batch.num_tokens * real.moe.top_k] * len(real.moe.layers)
    alone, padded = merge([real.metrics()]), merge([real.metrics(), route.metrics()])
    assert {n: m.value() for n, m in alone.items()} == {n: m.value() for n, m in padded.items()}


# ---- losses of the router: driven without a model, logits by sequence


def logits_of(moe: MoEConfig) -> dict[tuple[int, int], torch.Tensor]:
    """(group, sample) -> logits [T, E] of each sequence, the same in all layers but for a factor."""
    generator = torch.Generator().manual_seed(2)
    return {
        (t.group, t.sample): (2 * torch.randn(len(t.tokens), moe.num_experts, generator=generator)).requires_grad_() for t in trajectories()
    }


def drive(batches: list[Batch], moe: MoEConfig, logits: dict, balance: BalanceParams) -> tuple[float, list[torch.Tensor]]:
    """Sum of the losses of all micro-batches, and the gradient of every sequence's logits."""
    total = 0.0
    for batch in batches:
        route = TrainRoutes(batch, moe, replay=True, passes=1, balance=balance)
        ids = [tuple(pair) for pair in batch.ids_S3[:, :2].tolist()]
        logits_TE = torch.cat([logits.get(pair, torch.full((1, moe.num_experts), 7.0)) for pair in ids])
        for layer in range(len(moe.layers)):
            x_TE = logits_TE * (1 + layer)
            route(layer, x_TE, x_TE.detach().topk(moe.top_k).indices)
        total = total + route.loss
    gradients = torch.autograd.grad(total, list(logits.values()))
    return float(total.detach()), list(gradients)


def naive(moe: MoEConfig, logits: dict, balance: BalanceParams) -> torch.Tensor:
    """DeepSeek-V3's equations 17 to 20, and the mean squared log-sum-exp, loop by loop in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in range(len(moe.layers)):
        for x_TE in logits.values():
            x_TE = x_TE.double() * (1 + layer)
            chosen = [set(row.topk(moe.top_k).indices.tolist()) for row in x_TE.detach()]
            for expert in range(moe.num_experts):
                share = 0.0
                for row_E in x_TE:
                    s_E = row_E.softmax(0) if moe.scoring == "softmax" else row_E.sigmoid()
                    share = share + s_E[expert] / s_E.sum()
                fraction = moe.num_experts / moe.top_k * sum(expert in ids for ids in chosen) / len(x_TE)
                total = total + balance.router_balance_coef / balance.num_sequences * fraction * share / len(x_TE)
            for row_E in x_TE:
                total = total + balance.router_z_coef / balance.num_tokens * row_E.exp().sum().log() ** 2
    return total


@pytest.mark.parametrize("coefs", [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_router_losses_are_their_formulas_however_a_step_is_packed(scoring: str, coefs: tuple[float, float]) -> None:
    moe = MoEConfig(7, 3, 20, (0, 1), scoring=scoring)
    balance, logits = BalanceParams(*coefs, num_sequences=4, num_tokens=54), logits_of(moe)
    expected = naive(moe, logits, balance)
    wanted = torch.autograd.grad(expected, list(logits.values()))
    packings = [pack.pack(trajectories(), max_tokens) for max_tokens in (100, 30, 23)]
    assert [len(batches) for batches in packings] == [1, 3, 4]
    packings.append(pack.pad(packings[0], 3))
    for batches in packings:
        total, gradients = drive(batches, moe, logits, balance)
        assert total == pytest.approx(float(expected.detach()), rel=1e-5)
        for found, gradient in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(found, gradient.float(), rtol=1e-4, atol=1e-7)


def test_the_balance_loss_is_1_when_even_and_grows_with_the_imbalance() -> None:
    moe = MoEConfig(4, 2, 20, (0,))
    batch, balance = one_batch(), BalanceParams(1.0, 0.0, num_sequences=4)
    for num_used, expected in ((4, 1.0), (2, 2.0)):
        route = TrainRoutes(batch, moe, replay=False, passes=1, balance=balance)
        logits_TE = torch.full((batch.num_tokens, 4), -40.0)
        logits_TE[:, :num_used] = 0.0
        ids_TK = torch.arange(2).expand(batch.num_tokens, 2)
        route(0, logits_TE, ids_TK)
        assert float(route.loss) == pytest.approx(expected, rel=1e-6)


# ---- the share of routes that differ


def test_route_diff_frac_compares_sets_of_recorded_tokens_only() -> None:
    moe, batch = MoEConfig(7, 3, 20, (0, 1)), one_batch()
    num_tokens = batch.num_tokens
    orders = torch.tensor([order for order in permutations((1, 4, 6))])
    rows_TLK = orders[torch.arange(num_tokens) % 6][:, None].expand(-1, 2, -1).to(torch.uint8).contiguous()
    routed_T = torch.ones(num_tokens, dtype=torch.bool)
    routed_T[[2, 9]] = False
    batch = replace(batch, routes_TLK=rows_TLK, routed_T=routed_T)
    live_TK = torch.tensor([6, 1, 4]).expand(num_tokens, 3)
    differs = {0: [1, 2], 1: [2, 9, 11, 30]}  # layer -> tokens
    for replay in (True, False):
        route = TrainRoutes(batch, moe, replay=replay, passes=1, balance=BalanceParams())
        same = TrainRoutes(batch, moe, replay=replay, passes=1, balance=BalanceParams())
        for layer, tokens in differs.items():
            changed_TK = live_TK.clone()
            changed_TK[tokens, 2] = 5
            route(layer, torch.zeros(num_tokens, 7), changed_TK)
            same(layer, torch.zeros(num_tokens, 7), live_TK)
        found = {name: metric.value() for name, metric in route.metrics().items()}
        count = num_tokens - 2
        assert found == {
            "train/route_diff_frac": 3 / (2 * count),
            "train/route_diff_frac/layer_0": 1 / count,
            "train/route_diff_frac/layer_1": 2 / count,
        }
        assert set(metric.value() for metric in same.metrics().values()) == {0.0} and same.first_difference() is None
        group, sample, _ = batch.ids_S3[0].tolist()
        assert route.first_difference().startswith(f"group {group} sample {sample}, position 1, layer 0: recorded experts [")
