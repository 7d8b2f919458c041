"""The machinery behind train.py and rollout.py."""
