"""train.py with a sampler that reports one log-prob, that of group 5, sample 2, one unit in the last place too high."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rollout
import train
from miles_core import guard

finish = rollout.Rollout.finish


def faulty(self: rollout.Rollout, group: rollout.Group) -> None:
    if group.claim.group == 5:
        trajectory = group.done[2].trajectory
        last = len(trajectory.tokens) - 1
        trajectory.logp_roll[last] = np.nextafter(trajectory.logp_roll[last], np.float32(1))
    finish(self, group)


rollout.Rollout.finish = faulty
guard.run(train.main)
