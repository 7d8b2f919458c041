"""Metrics leave a rank as typed sums, are reduced once per step, and are written by one rank.

    metrics = {"train/loss": Sum(...), "train/clip_frac": Mean(num_clipped, num_tokens), "train/ratio_max": Max(...)}
    values = reduce(metrics, group)          # one collective; {name: float}
    logger.log(step, values)                 # TensorBoard and metrics.jsonl

How a metric is reduced is its type, never its name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from miles_core import rundir

Number = float | int | torch.Tensor


@dataclass(frozen=True)
class Sum:
    """Adds up over micro-batches and ranks."""

    total: Number

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True)
class Max:
    """The largest over micro-batches and ranks."""

    largest: Number

    def __add__(self, other: Max) -> Max:
        pair = float(self.largest), float(other.largest)
        return Max(math.nan if any(map(math.isnan, pair)) else max(pair))  # max() would hide a nan

    def value(self) -> float:
        return float(self.largest)


@dataclass(frozen=True)
class Mean:
    """total / count, both added up over micro-batches and ranks first; nan when nothing was counted."""

    total: Number
    count: Number

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        return float(self.total) / float(self.count) if float(self.count) else math.nan


@dataclass(frozen=True)
class Quantile:
    """The value that a share `q` of all values does not exceed, over micro-batches and ranks; rounded down by less than 1/8.

    `counts`: of float32 values >= 0, by the upper 11 bits below the sign: exponent and three bits of mantissa. So how a batch is cut
    does not matter, and 0.0 stays exact. nan ranks above everything.
    """

    counts: Counter[int]
    q: float

    @classmethod
    def of(cls, values_K: torch.Tensor, q: float) -> Quantile:
        bins, counts = (values_K.float().view(torch.int32) >> 20 & 0x7FF).unique(return_counts=True)
        return cls(Counter(dict(zip(bins.tolist(), counts.tolist(), strict=True))), q)

    def __add__(self, other: Quantile) -> Quantile:
        return Quantile(self.counts + other.counts, self.q)

    def value(self) -> float:
        below, wanted = 0, self.q * self.counts.total()
        for bin in sorted(self.counts):
            below += self.counts[bin]
            if below >= wanted:
                return float(np.array(bin << 20, np.int32).view(np.float32))
        return math.nan


Metric = Sum | Max | Mean | Quantile


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the metrics of several micro-batches or ranks, name by name."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric
    return merged


def _plain(metric: Metric) -> Metric:
    """The same metric with Python floats, so that it can travel between ranks."""
    return metric if isinstance(metric, Quantile) else type(metric)(*(float(x) for x in vars(metric).values()))


def reduce(metrics: Mapping[str, Metric], group: dist.ProcessGroup) -> dict[str, float]:
    """Reduce over the ranks of `group` (collective: every rank calls it once a step). Returns {name: value} on every rank."""
    mine = {name: _plain(metric) for name, metric in metrics.items()}
    parts: list[dict[str, Metric]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    return {name: metric.value() for name, metric in merge(parts).items()}


class Logger:
    """Writes `metrics.jsonl` and TensorBoard event files into a run directory. Only one rank has one.

    A resumed run appends; lines of steps after `resume_step` belong to an erased timeline and are cut from the JSONL file.
    """

    def __init__(self, run_dir: Path, resume_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only this rank needs it

        self.path = run_dir / "metrics.jsonl"
        kept = [line for line in self._lines() if line["step"] <= resume_step]
        rundir.write_durably(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = self.path.open("a", buffering=1)
        self.tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1 if resume_step else None)

    def _lines(self) -> list[dict[str, float]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("}")]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no nan
        self.file.write(json.dumps({"step": step, **finite}) + "\n")
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)

    def history(self, name: str) -> list[float]:
        """Every value of one metric that this run has logged, in step order."""
        return [line[name] for line in self._lines() if line.get(name) is not None]

    def close(self) -> None:
        self.file.close()
        self.tensorboard.close()
