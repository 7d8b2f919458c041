"""Made-up trajectories for tests of everything that comes after the engine."""

from __future__ import annotations

import numpy as np

from miles_core.schema import Trajectory


def trajectory(
    prompt: int, answer: int, *, group: int = 0, sample: int = 0, vocabulary: int = 50, seed: int = 0, **fields: object
) -> Trajectory:
    """One turn: `prompt` tokens, then `answer` sampled ones, all at version 0. Contents depend on (seed, group, sample) only."""
    random = np.random.default_rng([seed, group, sample])
    loss_mask = np.r_[np.zeros(prompt, np.uint8), np.ones(answer, np.uint8)]
    made = {
        "tokens": random.integers(0, vocabulary, prompt + answer).astype(np.int32),
        "loss_mask": loss_mask,
        "logp_roll": np.where(loss_mask, random.uniform(-3.0, -0.1, prompt + answer), 0.0).astype(np.float32),
        "version": np.array([[0, answer]], np.int32),
        "turns": np.array([prompt, answer], np.int32),
        "finish": 0,
    }
    return Trajectory(group=group, sample=sample, **{**made, **fields})


def step_of(num_groups: int, num_samples: int, seed: int = 0, **fields: object) -> list[Trajectory]:
    """The trajectories of one optimizer step: lengths vary, about one sample in six has the verdict `infra_error`."""
    random = np.random.default_rng([seed, 999])
    step = []
    for group in range(num_groups):
        for sample in range(num_samples):
            prompt, answer = (int(n) for n in random.integers((2, 1), (9, 24)))
            verdict = 2 if random.random() < 1 / 6 else 0
            values = {"verdict": verdict, "reward": float(random.integers(0, 2)), "advantage": 0.0 if verdict else float(random.normal())}
            step.append(trajectory(prompt, answer, group=group, sample=sample, seed=seed, **{**values, **fields}))
    return step
