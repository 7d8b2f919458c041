"""A bounded helping of long.py: kill -9 at injected lines, in a synchronous and in an asynchronous run.

    python -m pytest tests/chaos/test_chaos.py
"""

from __future__ import annotations

from pathlib import Path

from chaos import FLAGS, Chaos
from harness import succeed


def test_synchronous_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Killed in the journal, between optimizer step and publication, in a checkpoint; another number of ranks."""
    (tmp_path / "quiet").mkdir()
    succeed(tmp_path / "quiet", *FLAGS, "--max-staleness", 0, "--rollout-ranks-per-node", 0, ranks=1)
    chaos = Chaos(tmp_path, seed=1, synchronous=True)
    points = [
        ("roll", "miles_core.journal:Journal._write", 35),
        ("train", "miles_core.weights:Publisher.publish", 700),
        ("train", "miles_core.checkpoint:Checkpointer._commit", 6),
    ]
    ended = chaos.run(points)
    assert chaos.check(ended, tmp_path / "quiet/run") >= 3, str(ended)
    assert ended.err.count("was killed by SIGKILL") == 3


def test_asynchronous_run_trains_on_every_group_once(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, seed=2, synchronous=False, rollout_ranks=2)
    points = [
        ("roll", "miles_core.ring:Ring._put", 9),
        ("train", "train:Trainer.save", 6),
        ("train", "miles_core.start:_begin", 4),
    ]
    ended = chaos.run(points)
    assert chaos.check(ended) >= 3, str(ended)
    assert ended.err.count("was killed by SIGKILL") == 3
    assert "ring/restored" in (tmp_path / "run/metrics.jsonl").read_text()
