"""A run whose sampler and trainer differ in the last bit of one token stops there, unless it was told not to look.

    python -m pytest tests/e2e/test_parity_gate.py
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from harness import TASK, Job, steps, succeed

SCRIPT = "tests/e2e/faulty_sampler.py"
FLAGS = ("--task", TASK, "--samples-per-prompt", 4, "--prompts-per-step", 4, "--steps", 3, "--eval-prompts", 0, "--run-dir", "run")
FLAGS += ("--rollout-ranks-per-node", 0)


@pytest.mark.parametrize("ranks", [0, 2])
def test_strict_stops_at_the_token(tmp_path: Path, ranks: int) -> None:
    """Group 5 belongs to the second step; it must not be taken, and nobody may be left behind."""
    ended = Job(tmp_path, *FLAGS, ranks=ranks, script=SCRIPT).end()
    assert ended.code == 1, str(ended)
    found = re.search(
        r"ParityError: step 2: sampler and trainer differ under the same weights \(version 1\): "
        r"group 5 sample 2, token \d+ at position \d+: sampler (\S+), trainer (\S+), (\S+)\. Run again, both paths agree in every op",
        ended.err,
    )
    assert found and 0 < abs(float(found[1]) - float(found[2])) < 1e-6, str(ended)
    assert [step["step"] for step in steps(tmp_path / "run")] == [1]


def test_report_goes_on_and_logs_it(tmp_path: Path) -> None:
    succeed(tmp_path, *FLAGS, "--parity", "report", script=SCRIPT)
    frac = [step["train/logp_diff_frac"] * step["train/logp_diff_tokens"] for step in steps(tmp_path / "run")]
    assert frac == pytest.approx([0, 1, 0]), "one token of the second step"


def test_off_does_not_look(tmp_path: Path) -> None:
    ended = succeed(tmp_path, *FLAGS, "--parity", "off", script=SCRIPT)
    assert "logp_diff not compared" in ended.out
    assert not any("logp_diff" in name for step in steps(tmp_path / "run") for name in step)


@pytest.mark.parametrize("ranks", [0, 2])
def test_off_trains_with_fast_ops_and_says_so(tmp_path: Path, ranks: int) -> None:
    flags = ("--prompts-per-step", 4, "--steps", 3, "--eval-prompts", 0, "--run-dir", "run")
    ended = succeed(tmp_path, *flags, "--parity", "off", ranks=ranks)
    (line,) = re.findall(r"^parity: (.*)$", ended.out, re.MULTILINE)
    assert line.startswith("off (linear, rmsnorm, swiglu: torch; ") and "packed attention: torch SDPA; " in line
    assert line.endswith("; fast ops, their results depend on the batch)")
    assert len(re.findall(r"^step .* logp_diff not compared ", ended.out, re.MULTILINE)) == 3
    trained = steps(tmp_path / "run")
    assert [step["step"] for step in trained] == [1, 2, 3] and not any("logp_diff" in name for step in trained for name in step)
    assert all(math.isfinite(step["train/loss"]) and step["train/grad_norm"] > 0 for step in trained)


def test_strict_names_invariant_ops(tmp_path: Path) -> None:
    ended = succeed(tmp_path, "--prompts-per-step", 4, "--steps", 1, "--eval-prompts", 0, "--run-dir", "run", "--rollout-ranks-per-node", 0)
    ops = "linear, rmsnorm, rope, swiglu, attention, logprob, sample, router, expert_order, grouped_linear, combine"
    assert f"parity: strict ({ops}: C++; embedding: a copy)\n" in ended.out
    assert steps(tmp_path / "run")[0]["train/logp_diff_max"] == 0.0
