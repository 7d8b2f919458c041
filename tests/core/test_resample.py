"""Samples that got no reward are drawn again, where they are more than half of a group: with other noise, a bounded number of times.

    python -m pytest tests/core/test_resample.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rollout_kit import rolled_out

from miles_core.config import Config
from rollout import load_inputs

# Rewards fail as often as FAILURES says for each group; the file counts how often each was asked.
TASK = """
from pathlib import Path
from miles_core.tasks import Task, sort

FAILURES = {0: 3, 1: 2, 2: 100}

def task(seed, data):
    plain = sort.task(seed, data, "")
    def prompt(group, split="train"):
        messages, answer, text = plain.prompt(group, split)
        return messages, [group, answer], text
    def reward(answer, text):
        log = Path(__file__).with_name(f"asked{answer[0]}")
        asked = log.read_text().splitlines() if log.exists() else []
        log.write_text("".join(f"{line}\\n" for line in [*asked, text]))
        if len(asked) < FAILURES.get(answer[0], 0):
            raise OSError("a service is down")
        return 1.0
    return Task("flaky", prompt, reward, plain.num_eval)
"""
N = 4


def asked(directory: Path, group: int) -> list[str]:
    return (directory / f"asked{group}").read_text().splitlines()


@pytest.mark.parametrize("resample", [0, 1, 2])
def test_resample(tmp_path: Path, resample: int) -> None:
    (tmp_path / "flaky.py").write_text(TASK)
    config = Config(
        task=str(tmp_path / "flaky.py"), device="cpu", rollout_ranks_per_node=0, prompts_per_step=4, samples_per_prompt=N, steps=1,
        max_staleness=0, resample=resample,
    )  # fmt: skip
    inputs = load_inputs(config, torch.device("cpu"), torch.float32)
    with rolled_out(config, inputs, tmp_path) as (groups, _, ring):
        for group in groups:
            assert [t.sample for t in group] == list(range(N)) and len({t.key for t in group}) == N
        failed = [[t.verdict != 0 for t in group] for group in groups]
        again = 3 if resample else 0  # of group 0
        assert sum(failed[0]) == 3 - again and sum(failed[1]) == 2, "half of a group is not too many"
        assert all(failed[2]) and not any(failed[3])
        assert [len(asked(tmp_path, g)) for g in range(4)] == [N + again, N, N + N * resample, N]
        assert ring.status().resampled == again + N * resample
        first, second = asked(tmp_path, 2)[:N], asked(tmp_path, 2)[N : 2 * N]
        assert not second or first != second, "drawn again, not judged again"
        assert all(t.advantage == 0 for t in groups[2])
