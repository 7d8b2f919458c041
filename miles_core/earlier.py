"""What earlier incarnations of a run have left: the groups in its journal, given back when their number is claimed again.

    earlier = Earlier(run_dir / "journal", incarnation, recipe, still_valid, last_version, max_staleness)    # each rollout rank
    found = earlier.find(claim.group)            # (trajectories, routes), or None: it has to be made

A group that no checkpoint had consumed is claimed again after a resume, like any other, with a slot and in its order: so pacing and its
bound need no exception. If the journal has it, it is put instead of made. It is made again, and counted, when it was sampled from erased
weights, when it could be older than the staleness bound by the time it is trained on, when other flags shaped it, or when its bytes are
damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from miles_core import journal
from miles_core.journal_file import FIELDS_HERE, Damaged, Entry, load
from miles_core.schema import Trajectory


class Found(NamedTuple):
    """One group as it was journalled: `routes` of each trajectory, uint8, empty where none were recorded."""

    group: list[Trajectory]
    routes: list[np.ndarray]


class Earlier:
    """`still_valid(incarnation, version)`: see start.py. `last_version(group)`: the latest version that can be trained on it (pacing.py).

    `num_made_again` counts the groups that `find` knew and did not give.
    """

    def __init__(
        self, directory: Path, incarnation: int, recipe: dict[str, Any], still_valid: Callable[[int, int], bool],
        last_version: Callable[[int], int], max_staleness: int,
    ):  # fmt: skip
        self.still_valid, self.last_version, self.max_staleness = still_valid, last_version, max_staleness
        self.num_made_again = 0
        self.entries: dict[int, list[tuple[Entry, bool]]] = {}  # group -> where it stands, and whether the same flags shaped it
        found, unreadable = journal.read(directory)
        for sentence in unreadable:
            _say(sentence)
        for contents in found:
            if contents.num_damaged:
                _say(f"{contents.path} has {contents.num_damaged} damaged places; groups that stood there are made again")
            same = contents.header["recipe"] == recipe and contents.header["fields"] == FIELDS_HERE
            for entry in contents.entries:
                if entry.incarnation < incarnation:
                    self.entries.setdefault(entry.group, []).append((entry, same))

    def find(self, group: int) -> Found | None:
        """The group, once; None when it is not there, or may not be used."""
        known = self.entries.pop(group, [])
        for entry, same_recipe in reversed(known):  # the newest first
            if not (same_recipe and self.still_valid(entry.incarnation, entry.newest)):
                continue
            if self.last_version(group) - entry.oldest > self.max_staleness:
                continue
            try:
                return Found(*load(entry))
            except Damaged as error:
                _say(f"{error}; it is made again")
        self.num_made_again += bool(known)
        return None


def _say(sentence: str) -> None:
    print(f"WARNING: {sentence}", file=sys.stderr, flush=True)
