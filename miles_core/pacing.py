"""How many slots and how wide a window: the closed form behind the staleness bound (DESIGN 4.2). ring.py enforces it.

P groups a step, B slots, a window of W groups, S the staleness that was asked for, in versions.
"""

from __future__ import annotations


def derive(groups_per_step: int, max_staleness: int) -> tuple[int, int]:
    """(B slots, W window) for P groups a step and the staleness that was asked for.

    S = 0: strict order, B = P. S >= 1: B is at least 2 P, so that a step's worth of groups is made while another is trained on; of the
    slack beyond that half goes into the window, so that a slow group does not hold up finished ones.
    """
    window = 1 + groups_per_step * max(0, max_staleness - 1) // 2
    return groups_per_step * (max_staleness + 1) + 1 - window, window


def staleness_bound(num_slots: int, window: int, groups_per_step: int) -> int:
    """How many versions old a sample can at most be when it is trained on. Some order of completion attains it (if B > P or W = 1)."""
    return (num_slots + window - 2) // groups_per_step


def last_version(index: int, window: int, groups_per_step: int) -> int:
    """The latest version that can be trained on group `index` of a node: all lower ones and W - 1 higher ones are consumed before it."""
    return (index + window - 1) // groups_per_step
