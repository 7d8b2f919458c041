"""One step of a real rollout rank, in this process: engine, rewards, journal and ring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import train
from miles_core.config import Config
from miles_core.earlier import Earlier
from miles_core.journal import Journal, files
from miles_core.journal_file import load, scan
from miles_core.model import hf
from miles_core.model.layers import named_weights
from miles_core.ring import Ring
from miles_core.route_transport import RouteStore
from miles_core.schema import Trajectory
from miles_core.topology import Layout
from miles_core.weights import Board, Plan, Publisher, Receiver
from rollout import Inputs, Rollout, recipe_of

CPU, LAYOUT = torch.device("cpu"), Layout(1, 1, 0)


@contextlib.contextmanager
def rolled_out(config: Config, inputs: Inputs, directory: Path) -> Iterator[tuple[list[list[Trajectory]], RouteStore, Ring]]:
    """The groups of one step, as views of their slots, the routes that the rank has kept, and the ring. `directory`: for the journal."""
    ring = Ring.create(**train.ring_shape(config, LAYOUT, inputs), num_rollout_ranks=1)
    board = Board.create(Plan.of(hf.build(inputs.model_config, "meta"), torch.float32), [0], "shm")
    Publisher(board, 10.0).publish(0, named_weights(hf.load(inputs.model_dir)))
    store, model = RouteStore(0, None), hf.build(inputs.model_config, CPU, torch.float32)
    journal = Journal(directory, 1, 0, recipe_of(config, model))
    earlier = Earlier(directory, 1, {}, lambda *_: True, lambda _: 0, 0)
    with contextlib.closing(Rollout(config, inputs, model, ring, Receiver(board, 0, 10.0), 0, store, None, journal, earlier)) as rollout:
        rollout.refresh(min_version=0)
        for _ in range(100_000):
            if ring.ready(config.prompts_per_step):
                break
            rollout.tick()
        groups = [ring.read(ref) for ref in ring.take(config.prompts_per_step)]
        entries = sorted((entry for path in files(directory) for entry in scan(path).entries), key=lambda entry: entry.group)
        assert [e.group for e in entries] == [g[0].group for g in groups], "every group is in the journal before the ring, whole"
        for entry, group in zip(entries, groups, strict=True):
            same, routes = load(entry)
            assert [t.key for t in same] == [t.key for t in group] and all(
                np.array_equal(a.logp_roll, b.logp_roll) for a, b in zip(same, group, strict=True)
            )
            assert all(np.array_equal(r, store.rows[t.key].numpy()) for t, r in zip(group, routes, strict=True))
        yield groups, store, ring
