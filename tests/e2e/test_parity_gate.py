"""A run whose sampler and trainer differ in the last bit of one token stops there, unless it was told not to look.

    python -m pytest tests/e2e/test_parity_gate.py
"""

from __future__ import annotations

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
