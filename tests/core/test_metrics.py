"""Typed metrics, their reduction and the log files. Run: python -m pytest tests/core/test_metrics.py"""

import json
import math

import torch

from miles_core.metrics import Logger, Max, Mean, Sum, merge


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
