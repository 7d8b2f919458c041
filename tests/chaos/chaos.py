"""Jobs that are killed on purpose, and what has to be true of them afterwards. Used by test_chaos.py (a few, in CI) and long.py (many).

    killed = Chaos(cwd, seed, synchronous=True).run(points, kills)

Every job trains 12 steps of 2 groups. Whatever happens to it, in the end each group has been trained on exactly once; a synchronous one has
the metrics and the weights of a run that nothing happened to, to the bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "e2e")]

from harness import TASK, Ended, Job, consumed_groups, steps  # noqa: E402

STEPS, PROMPTS = 9, 2
FLAGS = (
    *("--task", TASK, "--steps", STEPS, "--save-every", 3, "--prompts-per-step", PROMPTS, "--samples-per-prompt", 4),
    *("--eval-prompts", 0, "--run-dir", "run", "--timeout", 60),
)
NAMES = ("step", "train/loss", "train/grad_norm", "train/lr", "rollout/reward_mean", "train/entropy", "train/ratio_max")
# Where a process is killed, and after how many lines of that function at most. "roll" and "train" are the ranks that run it.
POINTS = (
    ("roll", "miles_core.journal:Journal.append", 40),
    ("roll", "miles_core.journal:Journal._write", 60),
    ("roll", "miles_core.journal:Journal._open", 8),
    ("roll", "miles_core.journal:Journal._sync_now_and_then", 30),
    ("roll", "miles_core.ring:Ring.claim", 400),
    ("roll", "miles_core.ring:Ring._put", 30),
    ("roll", "miles_core.journal_file:encode_record", 40),
    ("roll", "rollout:Rollout.restore", 20),
    ("roll", "miles_core.schema:write_group", 300),
    ("roll", "rollout:Rollout.finish", 60),
    ("roll", "rollout:Rollout.refresh", 60),
    ("roll", "miles_core.weights:Receiver._load", 300),
    ("roll", "miles_core.route_transport:RouteStore.serve", 100),
    ("train", "miles_core.ring:Ring.take", 200),
    ("train", "miles_core.ring:Ring.release", 30),
    ("train", "miles_core.weights:Publisher.publish", 400),
    ("train", "miles_core.optim:Optimizer.step", 60),
    ("train", "train:train", 200),
    ("train", "train:Trainer.save", 12),
    ("train", "train:Trainer.log", 60),
    ("train", "miles_core.checkpoint:Checkpointer.save", 10),
    ("train", "miles_core.checkpoint:Checkpointer._write", 8),
    ("train", "miles_core.checkpoint:Checkpointer._commit", 30),
    ("train", "miles_core.checkpoint:_point_latest_at", 4),
    ("train", "miles_core.records:Records.log", 8),
    ("train", "miles_core.records:Records.checkpointed", 5),
    ("train", "miles_core.start:open_run", 17),
    ("train", "miles_core.start:_begin", 7),
    ("train", "miles_core.rundir:open_run", 14),
    ("train", "miles_core.rundir:write_durably", 10),
)


@dataclass
class Chaos:
    """One job. `rollout_ranks` generate and one rank trains."""

    cwd: Path
    seed: int
    synchronous: bool
    rollout_ranks: int = 1
    deadline_s: float = 300.0
    lives: list[str] = field(default_factory=list)  # what ended each life

    @property
    def run_dir(self) -> Path:
        return self.cwd / "run"

    def flags(self) -> tuple:
        return (*FLAGS, "--max-staleness", 0 if self.synchronous else 3, "--rollout-ranks-per-node", self.rollout_ranks)

    def run(self, points: list[tuple[str, str, int]], num_kills: int = 0) -> Ended:
        """Start the job; in the lives after those of `points` kill a rank, or all at once, `num_kills` times at random moments."""
        rng = random.Random(self.seed)
        trainer = self.rollout_ranks
        entries = [f"{trainer if role == 'train' else rng.randrange(self.rollout_ranks)} {name} {lines}" for role, name, lines in points]
        restarts = len(points) + num_kills
        environment = {"MAX_RESTARTS": str(restarts), "CHAOS": "; ".join(entries), "E2E_REWARD_S": "0.02"}
        job = Job(self.cwd, *self.flags(), ranks=trainer + 1, script="tests/chaos/die_here.py", deadline_s=self.deadline_s, **environment)
        for kill in range(num_kills):
            life = len(points) + kill
            job.wait_until(lambda life=life: job.out.count("run directory:") > life or job.process.poll() is not None, f"life {life + 1}")
            time.sleep(rng.uniform(0.0, 3.0))
            victims = rng.choice([[trainer], [rng.randrange(self.rollout_ranks)], range(trainer + 1)])
            self._kill(job, list(victims))
        return job.end()

    def _kill(self, job: Job, ranks: list[int]) -> None:
        killed = []
        for rank in ranks:
            try:
                pid = job.rank_pid(rank)
                os.kill(pid, signal.SIGKILL)
                killed.append(rank)
            except (StopIteration, ProcessLookupError):  # it has ended already: the job is done, or between two lives
                continue
        self.lives.append(f"SIGKILL of ranks {killed}")

    def check(self, ended: Ended, quiet: Path | None = None) -> int:
        """Assert what has to be true; returns how many lives it took. `quiet`: the directory of a run that nothing happened to."""
        assert ended.code == 0, f"{self}: {ended}"
        found = steps(self.run_dir)
        assert [step["step"] for step in found] == list(range(1, STEPS + 1)), (self, [step["step"] for step in found])
        groups = sorted(g for step in found for g in consumed_groups(step, PROMPTS))
        assert groups == list(range(STEPS * PROMPTS)), f"{self}: trained on {groups}"
        recorded = [json.loads(line) for line in (self.run_dir / "steps.jsonl").read_text().splitlines()]
        assert [line["groups"] for line in recorded] == [sorted(consumed_groups(step, PROMPTS)) for step in found]
        for step in found:
            assert step.get("train/logp_diff_max", 0.0) == 0.0 and 0 <= step["train/staleness_max"] <= (0 if self.synchronous else 3), step
        names = sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())
        assert "latest" in names and f"step_{STEPS:06d}" in names and not [name for name in names if name.startswith(".tmp")], names
        if quiet is not None:
            assert figures(self.run_dir) == figures(quiet), self
            assert weights(self.run_dir) == weights(quiet), self
        return len((self.run_dir / "incarnations.jsonl").read_text().splitlines())


def figures(run_dir: Path) -> list[list[float]]:
    return [[step[name] for name in NAMES] for step in steps(run_dir)]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints/latest/model.safetensors").read_bytes()
