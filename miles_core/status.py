"""Who is doing what: one row of shared words for every rank of a node, in the segment of its ring. Printed when a rank fails, and live:

    python -m miles_core.status RUN_DIR              # once a second, until Ctrl-C; on each node of a run
    python -m miles_core.status RUN_DIR --once

A rank only ever writes its own row, so nothing here takes a lock. Times are CLOCK_MONOTONIC, which all processes of a machine share.
The training leader says in RUN_DIR/status/ where the board of its node is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from miles_core import guard
from miles_core.shm import Segment, process_start

# words of a row
HEARTBEAT, PHASE, STEP, PID, PID_STARTED, RANK, TRAINS = range(7)
LIVE, BLOCKED_NS, WAITING, PLAYED, EVALUATIONS, RESTORED, MADE_AGAIN, RESAMPLED = range(7, 15)  # of rollout ranks alone, see ring.py
ROW = 16
PHASES = (
    "starting", "loading weights", "evaluating", "generating", "waiting for a free slot", "waiting for groups", "training",
    "publishing weights", "saving a checkpoint", "done",
)  # fmt: skip
TRAINER = -1  # row of the training leader, as a rollout rank and the ring call it


class StatusBoard:
    """Rows of the rollout ranks of a node, then of its training ranks, leader first. A colocated rank has one of each."""

    def __init__(self, rows: np.ndarray, num_rollout_ranks: int):
        self.rows, self.num_rollout_ranks = rows, num_rollout_ranks

    def _row(self, rank: int) -> np.ndarray:
        return self.rows[self.num_rollout_ranks if rank == TRAINER else rank]

    def join(self, row: int, rank: int, *, trains: bool) -> None:
        """This process is global rank `rank`, and `row` is its own."""
        mine = self._row(row)
        mine[[RANK, TRAINS, PID, PID_STARTED]] = rank, trains, os.getpid(), process_start(os.getpid())
        self.beat(row, "starting")

    def beat(self, row: int, phase: str, step: int | None = None) -> None:
        """A sign of life: what this rank does from now on, and for which step."""
        mine = self._row(row)
        mine[HEARTBEAT], mine[PHASE] = time.monotonic_ns(), PHASES.index(phase)
        if step is not None:
            mine[STEP] = step

    @property
    def rollout(self) -> np.ndarray:
        """Rows of the rollout ranks."""
        return self.rows[: self.num_rollout_ranks]

    def silence_s(self, row: int) -> float:
        """Seconds since the last sign of life."""
        return (time.monotonic_ns() - int(self._row(row)[HEARTBEAT])) / 1e9

    def ended(self, row: int) -> bool:
        """Whether the process of a row that has joined is gone."""
        mine = self._row(row)
        return bool(mine[PID]) and process_start(int(mine[PID])) != mine[PID_STARTED]

    def dead(self) -> list[int]:
        """Global ranks of this node whose process has ended."""
        return sorted({int(self.rows[row, RANK]) for row in range(len(self.rows)) if self.ended(row)})

    def expect_trainer(self, timeout_s: float) -> None:
        """For ranks that wait for a free slot of the ring: raise PeerLost when the training leader has ended, TimeoutError when it has not
        given a sign of life for so long."""
        if self.ended(TRAINER):
            raise guard.PeerLost(f"no slot of the ring will become free: {self.describe(TRAINER)}")
        if (since := self.silence_s(TRAINER)) > timeout_s:
            raise TimeoutError(f"no slot of the ring became free, and nothing was heard for {since:.0f} s: {self.describe(TRAINER)}")

    def describe(self, row: int) -> str:
        """One rank, for a message: who, what it did last, and when that was."""
        mine = self._row(row)
        if not mine[HEARTBEAT]:
            return f"{'the training leader' if row == TRAINER else f'rollout rank {row}'} has not started"
        role = "training leader" if row in (TRAINER, self.num_rollout_ranks) else "training" if mine[TRAINS] else "rollout"
        gone = ", which has ended" if self.ended(row) else ""
        did = f"{PHASES[mine[PHASE]]} (step {mine[STEP]})" if mine[TRAINS] else PHASES[mine[PHASE]]
        return f"rank {mine[RANK]} ({role}, pid {mine[PID]}{gone}) was {did} {self.silence_s(row):.1f} s ago"

    def table(self) -> str:
        """A line for every rank."""
        return "\n".join(f"  {self.describe(row)}" for row in range(len(self.rows)))


class Place(NamedTuple):
    """Where the board of a node is: what the files in RUN_DIR/status/ hold."""

    host: str
    pid: int
    pid_started: int
    segment: str
    offset: int
    num_rows: int
    num_rollout_ranks: int


def announce(run_dir: Path, node: int, board: StatusBoard, segment: Segment, offset: int) -> None:
    """Say where the board is (the leader of each node)."""
    place = Place(
        socket.gethostname(), os.getpid(), process_start(os.getpid()), segment.path, offset, len(board.rows), board.num_rollout_ranks
    )  # fmt: skip
    (run_dir / "status").mkdir(exist_ok=True)
    temporary = run_dir / "status" / f".node{node}"
    temporary.write_text(json.dumps(place._asdict()) + "\n")
    temporary.replace(run_dir / "status" / f"node{node}.json")


def look(run_dir: Path) -> str:
    """The boards of all nodes as text. ValueError when there is none."""
    files = sorted((run_dir / "status").glob("node*.json"))
    if not files:
        raise ValueError(f"{run_dir} has no status: it is no run directory, or its run has not come so far")
    return "\n".join(f"{file.stem}: {_look_at(Place(**json.loads(file.read_text())))}" for file in files)


def _look_at(place: Place) -> str:
    if place.host != socket.gethostname():
        return f"look on {place.host}"
    if process_start(place.pid) != place.pid_started:
        return f"its run has ended (pid {place.pid})"
    try:
        rows = Segment.attach(place.segment).words(place.offset, place.num_rows, ROW)
    except RuntimeError as error:
        return str(error)
    board = StatusBoard(rows, place.num_rollout_ranks)
    live = rows[: place.num_rollout_ranks, LIVE].tolist()
    return f"step {rows[place.num_rollout_ranks, STEP]}, live versions of its rollout ranks {live}\n{board.table()}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m miles_core.status", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--once", action="store_true", help="print once and stop")
    arguments = parser.parse_args()
    while True:
        print(look(arguments.run_dir), flush=True)
        if arguments.once:
            return
        time.sleep(1.0)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # into `head`, say
    guard.run(main)
