"""Typed metrics, their reduction and the log files. Run: python -m pytest tests/core/test_metrics.py"""

import json
import math

import torch

from miles_core.metrics import Logger, Max, Mean, Quantile, Sum, merge


def test_merge_adds_totals_before_it_divides():
    parts = [
        {"a": Mean(1.0, 1), "b": Max(3.0), "c": Sum(torch.tensor(2.0))},
        {"a": Mean(0.0, 3), "b": Max(-1.0), "c": Sum(5.0)},
        {"b": Max(7)},
    ]
    values = {name: metric.value() for name, metric in merge(parts).items()}
    assert values == {"a": 0.25, "b": 7.0, "c": 7.0}


def test_mean_of_nothing_is_nan_not_zero():
    assert math.isnan(Mean(0.0, 0).value())


def test_a_quantile_does_not_depend_on_how_a_batch_is_cut():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(10_000, generator=generator) * 10.0 ** torch.randint(-8, 3, (10_000,), generator=generator)
    exact = float(values.sort().values[9_899])
    for cuts in ([], [1], [5_000], [1, 17, 9_999]):
        parts = [{"x": Quantile.of(part, 0.99)} for part in values.tensor_split(cuts)]
        assert exact * 7 / 8 < merge(parts)["x"].value() <= exact
    assert merge([{"x": Quantile.of(values, 0.99)}, {"x": Quantile.of(values * 0, 0.99)}])["x"].value() > 0
    assert Quantile.of(torch.zeros(5), 0.99).value() == 0.0
    one_in_fifty = torch.zeros(50).index_fill(0, torch.tensor([3]), 2.0)
    assert (Quantile.of(one_in_fifty, 0.99).value(), Quantile.of(one_in_fifty, 0.98).value()) == (2.0, 0.0)
    assert math.isnan(Quantile.of(torch.tensor([0.0, math.nan]), 0.99).value())


def test_log_file_is_json_and_a_resumed_run_cuts_the_erased_steps(tmp_path):
    logger = Logger(tmp_path)
    for step in (1, 2, 3):
        logger.log(step, {"x": step * 1.0, "y": math.nan})
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x": 4')  # killed in mid-write
    logger = Logger(tmp_path, resume_step=2)
    logger.log(3, {"x": 30.0})
    assert logger.history("x") == [1.0, 2.0, 30.0]
    assert logger.history("y") == []
    logger.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["y"] is None
    assert list((tmp_path / "tensorboard").glob("events.*"))
