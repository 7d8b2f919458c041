"""What a row of routes is: its bytes, the pages that hold it, what a replay forces, what is measured of the load.

    python -m pytest tests/core/test_routing.py

Legend: T tokens, R recorded tokens, L MoE layers, K slots, E experts.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, random_model

from kernels.attention import PAGE
from miles_core import routing
from miles_core.metrics import merge
from miles_core.model.moe import MoEConfig, routers
from miles_core.pack import Counts, dummy
from miles_core.replay import ExpertRoutes
from miles_core.routing import BalanceParams, Replay, RoutePages, TrainRoutes, decode, encode, id_dtype, load, load_metrics, to_ids

SIZES = [7, 256, 257, 65536]


def moe_of(num_experts: int, top_k: int = 3, num_layers: int = 2) -> MoEConfig:
    return MoEConfig(num_experts, top_k, 8, tuple(range(num_layers)))


def random_ids(num_tokens: int, moe: MoEConfig, seed: int = 0) -> torch.Tensor:
    """int64 [T, L, K], distinct in a row."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, len(moe.layers), moe.num_experts, generator=generator).argsort(-1)[..., : moe.top_k].contiguous()


def recorded_of(num_tokens: int, holes: list[int]) -> np.ndarray:
    recorded_T = np.ones(num_tokens, bool)
    recorded_T[holes] = False
    return recorded_T


# ---- bytes


@pytest.mark.parametrize(("num_tokens", "holes"), [(11, [10]), (11, [0, 3, 4, 10]), (16, []), (8, list(range(8))), (1, []), (0, [])])
@pytest.mark.parametrize("num_experts", SIZES)
def test_rows_come_back_and_take_the_bytes_they_must(num_experts: int, num_tokens: int, holes: list[int]) -> None:
    moe, recorded_T = moe_of(num_experts), recorded_of(num_tokens, holes)
    ids_RLK = random_ids(num_tokens, moe)[torch.from_numpy(recorded_T)]
    if len(ids_RLK):
        ids_RLK[-1, -1, -1] = num_experts - 1
    payload = encode(ids_RLK.to(id_dtype(num_experts)), recorded_T)
    itemsize = 1 if num_experts <= 256 else 2
    assert payload.dtype == torch.uint8 and routing.row_nbytes(moe) == 2 * 3 * itemsize
    assert len(payload) == math.ceil(num_tokens / 8) + len(ids_RLK) * 2 * 3 * itemsize
    rows_TLK, found_T = decode(payload, num_tokens, moe)
    assert rows_TLK.dtype == id_dtype(num_experts) and np.array_equal(found_T.numpy(), recorded_T)
    assert torch.equal(to_ids(rows_TLK)[found_T], ids_RLK) and not rows_TLK[~found_T].any()


@pytest.mark.parametrize("num_experts", SIZES[1:])
def test_every_expert_has_its_own_id(num_experts: int) -> None:
    """256 experts need all 256 values of a byte: none is left to mean that a row is missing."""
    moe = MoEConfig(num_experts, 1, 8, (0,))
    ids_RLK = torch.arange(num_experts).view(-1, 1, 1)
    rows_TLK, recorded_T = decode(encode(ids_RLK.to(id_dtype(num_experts)), np.ones(num_experts, bool)), num_experts, moe)
    assert torch.equal(to_ids(rows_TLK), ids_RLK) and recorded_T.all()


def test_bytes_of_a_long_trajectory() -> None:
    """32,768 tokens x 60 MoE layers x top-8: 15.7 MB where the paper's int32 takes 62.9 MB."""
    num_tokens, sizes = 32768, {}
    for num_experts in (256, 257):
        rows_RLK = torch.zeros(num_tokens, 60, 8, dtype=id_dtype(num_experts))
        sizes[num_experts] = len(encode(rows_RLK, np.ones(num_tokens, bool)))
    mask = 4096
    assert sizes == {256: 15_728_640 + mask, 257: 2 * 15_728_640 + mask}
    assert 4 * (sizes[256] - mask) == 32768 * 60 * 8 * 4 == 62_914_560


@pytest.mark.parametrize("num_experts", [7, 257])
def test_bytes_that_are_not_these_rows_are_refused(num_experts: int) -> None:
    moe, recorded_T = moe_of(num_experts), recorded_of(11, [2, 10])
    payload = encode(random_ids(9, moe).to(id_dtype(num_experts)), recorded_T)
    bad = [(payload[:-1], 11), (payload[:1], 11), (payload[:0], 11), (torch.cat([payload, payload[:1]]), 11), (payload, 3), (payload, 17)]
    for found, num_tokens in bad:
        with pytest.raises(ValueError, match=rf"{len(found)} bytes of routes for {num_tokens} tokens") as error:
            decode(found, num_tokens, moe)
        assert "\n" not in str(error.value)
    other = moe_of(num_experts, top_k=2)
    with pytest.raises(ValueError, match="bytes of routes"):
        decode(payload, 11, other)
    rows_RLK = random_ids(9, moe)
    rows_RLK[4, 1, 2] = num_experts
    with pytest.raises(ValueError, match=rf"^routes name expert {num_experts} of {num_experts}$"):
        decode(encode(rows_RLK.to(id_dtype(num_experts)), recorded_T), 11, moe)


def test_no_dtype_for_more_than_65536_experts() -> None:
    with pytest.raises(AssertionError, match="65537"):
        id_dtype(65537)


# ---- the engine's side


@pytest.mark.parametrize("num_experts", SIZES)
def test_forced_tokens_keep_their_rows_and_others_get_live_ones(num_experts: int) -> None:
    moe = moe_of(num_experts)
    pages = RoutePages(3, moe, torch.device("cpu"))
    before_TLK, live_TLK = random_ids(5, moe, seed=1), random_ids(5, moe, seed=2)
    slots_T = torch.tensor([2 * PAGE, 2 * PAGE + 1, 5, 6, PAGE - 1])
    pages.rows_PLK[slots_T] = before_TLK.to(pages.rows_PLK.dtype)
    forced_T = torch.tensor([True, False, True, False, True])
    for forced, expected_TLK in ((None, live_TLK), (forced_T, torch.where(forced_T[:, None, None], before_TLK, live_TLK))):
        pages.rows_PLK.zero_()
        pages.rows_PLK[slots_T] = before_TLK.to(pages.rows_PLK.dtype)
        recorder = pages.recorder(slots_T, forced)
        used = [recorder(layer, torch.zeros(5, num_experts), live_TLK[:, layer]) for layer in range(2)]
        assert torch.equal(torch.stack(used, 1), expected_TLK) and used[0].dtype == torch.int64
        assert torch.equal(to_ids(pages.rows_PLK[slots_T]), before_TLK), "nothing is stored at once"
        pages.flush()
        assert torch.equal(to_ids(pages.rows_PLK[slots_T]), expected_TLK)
        others_P = torch.ones(len(pages.rows_PLK), dtype=torch.bool)
        others_P[slots_T] = False
        assert not pages.rows_PLK[others_P].any(), "no other slot is written"


def test_a_recorder_refuses_layers_out_of_order() -> None:
    moe = moe_of(7)
    recorder, live_TK = RoutePages(1, moe, torch.device("cpu")).recorder(torch.tensor([0]), None), torch.tensor([[0, 1, 2]])
    recorder(0, torch.zeros(1, 7), live_TK)
    for layer in (0, 2):
        with pytest.raises(AssertionError):
            recorder(layer, torch.zeros(1, 7), live_TK)


def test_a_page_copy_brings_its_rows() -> None:
    moe = moe_of(257)
    pages = RoutePages(4, moe, torch.device("cpu"))
    pages.rows_PLK[:] = random_ids(4 * PAGE, moe).to(torch.int16)
    before = pages.rows_PLK.clone().view(4, PAGE, 2, 3)
    pages.copy(2, [0, 3], 17)
    after = pages.rows_PLK.view(4, PAGE, 2, 3)
    for target in (0, 3):
        assert torch.equal(after[target, :17], before[2, :17]) and torch.equal(after[target, 17:], before[target, 17:])
    assert torch.equal(after[1:3], before[1:3])


def test_replay_needs_a_row_for_every_token() -> None:
    replay = Replay(torch.zeros(4, 2, 3, dtype=torch.uint8), torch.ones(4, dtype=torch.bool))
    with pytest.raises(AssertionError):
        replay(0, torch.zeros(5, 7), torch.zeros(5, 3, dtype=torch.int64))


# ---- the load of the experts


def test_load_metrics_of_known_loads() -> None:
    moe = moe_of(4, num_layers=3)
    load_LE = torch.tensor([[5.0, 5, 5, 5], [0, 12, 0, 0], [3, 3, 0, 0]], dtype=torch.float64)
    found = {name: metric.value() for name, metric in load_metrics(load_LE, moe).items()}
    entropy, peak = [1.0, 0.0, 0.5], [1.0, 4.0, 2.0]
    expected = {f"train/expert_entropy/layer_{i}": x for i, x in enumerate(entropy)}
    expected |= {f"train/expert_peak/layer_{i}": x for i, x in enumerate(peak)}
    assert found == pytest.approx(expected | {"train/expert_entropy": 0.5, "train/expert_peak": 4.0}, abs=1e-12)


def test_load_metrics_where_nothing_was_routed() -> None:
    found = load_metrics(torch.zeros(2, 4, dtype=torch.float64), moe_of(4))
    assert all(math.isfinite(metric.value()) for metric in found.values())


def routes_of(moe: MoEConfig | None, bias_rate: float, loads: list) -> ExpertRoutes:
    """A training rank's routes after micro-batches with these loads, one of each layer."""
    routes = ExpertRoutes(
        moe, "off", 0.0, 0.0, bias_rate, passes=1, rank=0, trainers=[0], group=None, device=torch.device("cpu"), timeout_s=1.0,
        mailbox=None, store=None,
    )  # fmt: skip
    routes.begin([[]], [], Counts(0, 0, 0, 0))
    routes.used = [SimpleNamespace(load_LE=load_LE) for load_LE in loads]
    return routes


def test_the_bias_of_an_overloaded_expert_goes_down_and_of_an_idle_one_up() -> None:
    config = CONFIGS["glm4-moe"]
    model = random_model(config)
    load_LE = torch.tensor([[9, 3, 3, 3, 3, 3, 0, 0], [3] * 8])
    loads = [[row_E // 3 for row_E in load_LE]] * 3
    before = [router.e_score_correction_bias.clone() for router in routers(model)]
    weights = [router.weight.clone() for router in routers(model)]
    sums: list = []

    def train_sum(*counts: float) -> list[float]:
        sums.append(counts)
        return [2 * count for count in counts]  # as if another rank had the same load

    routes = routes_of(config.moe, 0.25, loads)
    assert torch.equal(load(routes.used), load_LE.double())
    metrics = routes.end(model, train_sum, log=True)
    assert sums == [tuple(map(float, load_LE.flatten()))], "one sum over the training ranks"
    steps = [router.e_score_correction_bias - b for router, b in zip(routers(model), before, strict=True)]
    torch.testing.assert_close(torch.stack(steps), 0.25 * torch.tensor([[-1.0, 0, 0, 0, 0, 0, 1, 1], [0] * 8]), rtol=0, atol=1e-6)
    assert all(torch.equal(router.weight, w) for router, w in zip(routers(model), weights, strict=True))
    assert metrics["train/expert_peak"].value() == pytest.approx(3.0)


def test_a_moved_bias_moves_the_choice_and_not_the_weights() -> None:
    model = random_model(CONFIGS["glm4-moe-biases-norms"])
    router, x_TD = routers(model)[0], torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits_TE, ids_TK = router(x_TD)
        favourite = int(ids_TK.flatten().mode().values)
        router.e_score_correction_bias[favourite] -= 10.0
        same_TE, moved_TK = router(x_TD)
    assert torch.equal(logits_TE, same_TE) and (ids_TK == favourite).any() and not (moved_TK == favourite).any()


def test_no_bias_moves_without_a_rate_and_a_dense_model_has_no_load() -> None:
    config = CONFIGS["glm4-moe"]
    model = random_model(config)
    before = [router.e_score_correction_bias.clone() for router in routers(model)]
    routes_of(config.moe, 0.0, [[torch.tensor([8] + [0] * 7)] * 2]).end(model, lambda *counts: list(counts), log=False)
    assert all(torch.equal(router.e_score_correction_bias, b) for router, b in zip(routers(model), before, strict=True))
    assert routes_of(None, 0.0, []).end(model, lambda *counts: list(counts), log=True) == {}


def test_a_dense_model_has_nothing_to_route() -> None:
    route = TrainRoutes(dummy(), None, replay=True, passes=1, balance=BalanceParams())
    route.check()
    assert route.metrics() == {} and float(route.loss) == 0.0 and route.first_difference() is None and merge([route.metrics()]) == {}
