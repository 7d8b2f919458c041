"""THE model: one definition for rollout and training, its attention for either role, sharding from outside, checkpoints in and out."""
