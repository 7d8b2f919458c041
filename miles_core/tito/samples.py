"""The tree of a session -> what is trained on: one Trajectory for each leaf that counts, with the ids of the moment they were sampled.

    for sample in samples.collect(session):
        sample.trajectory, sample.routes, sample.drift

Legend: T tokens of a trajectory, M sampled tokens that it trains, R runs of equal version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.schema import FINISH_REASONS, VERDICTS, Trajectory
from miles_core.tito.drift import Drift, measure
from miles_core.tito.errors import SessionError
from miles_core.tito.tree import Node, SessionTree

if TYPE_CHECKING:
    from miles_core.tito.render import Renderer
    from miles_core.tito.session import Session

Picker = Callable[[SessionTree], list[Node]]


@dataclass(frozen=True)
class Sample:
    """A trajectory; the last of its turns; what was recorded of that turn's routes, its prompt's included; and its drift."""

    trajectory: Trajectory
    leaf: Node
    routes: Any
    drift: Drift


def last_attempts(tree: SessionTree) -> list[Node]:
    """The leaves, without those below an answer that was asked for again. Of the answers to one request the one stays that went on last."""
    latest = [node.number for node in tree.nodes]  # of the node and all below it; a child has a higher number than its parent
    for node in reversed(tree.nodes[1:]):
        assert node.parent is not None
        latest[node.parent.number] = max(latest[node.parent.number], latest[node.number])
    kept, leaves = [tree.root], []
    for node in kept:  # grows
        last: dict[bytes, Node] = {}
        for child in node.children:
            rival = last.get(child.asked)
            if rival is None or latest[child.number] > latest[rival.number]:
                last[child.asked] = child
        kept += last.values()
        if not last and node is not tree.root:
            leaves.append(node)
    return sorted(leaves, key=lambda node: node.number)


def collect(session: Session, picker: Picker = last_attempts, max_branches: int | None = None) -> list[Sample]:
    """One sample for each leaf that `picker` keeps, the latest `max_branches` of them; the session's reward and verdict in each.

    Tokens that several leaves share are trained in the first of them, and masked in the others. Turns that were sampled from another
    distribution (temperature, top_p, top_k) than the leaf's last one become a sample of their own: a trajectory has one distribution.
    """
    leaves = picker(session.tree)
    dropped = 0 if max_branches is None else max(len(leaves) - max_branches, 0)
    samples, trained = [], set()
    for leaf in leaves[dropped:]:
        branch = leaf.branch()
        new = [node for node in branch if node.number not in trained]
        for distribution in dict.fromkeys(_distribution(node) for node in reversed(new)):
            mine = {node.number for node in new if _distribution(node) == distribution}
            end = max(i for i, node in enumerate(branch) if node.number in mine)
            samples.append(_sample(session, branch[: end + 1], mine))
        trained |= {node.number for node in new}
    episode_tokens = sum(sample.trajectory.num_trained for sample in samples)
    for sibling, sample in enumerate(samples):
        t = sample.trajectory
        t.sibling, t.episode_tokens, t.branches_dropped = sibling, episode_tokens, dropped
    return samples


def _distribution(node: Node) -> tuple[float, float, int]:
    assert node.params is not None, node.number
    return node.params.temperature, node.params.top_p, node.params.top_k


def _sample(session: Session, branch: list[Node], trained: set[int]) -> Sample:
    last = branch[-1]
    lengths = [length for node in branch for length in (len(node.prompt), len(node.sampled))]
    tokens = np.concatenate([part for node in branch for part in (node.prompt, node.sampled)])
    mask_T, logp_T, at = np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.float32), 0
    for node in branch:
        at += len(node.prompt)
        if node.number in trained:
            mask_T[at : at + len(node.sampled)], logp_T[at : at + len(node.sampled)] = 1, node.logp
        at += len(node.sampled)
    version_M = np.concatenate([node.version for node in branch if node.number in trained])
    cached = [node.cached if node.number in trained else 0 for node in branch]
    drift = drift_of(session.renderer, branch, tokens)
    temperature, top_p, top_k = _distribution(last)
    trajectory = Trajectory(
        group=session.group,
        sample=session.sample,
        tokens=tokens,
        loss_mask=mask_T,
        logp_roll=logp_T,
        version=run_lengths(version_M),
        turns=np.array(lengths, np.int32),
        finish=FINISH_REASONS.index("length" if last is session.overflowed else last.finish),
        cached=sum(cached),
        cached_later=sum(cached[1:]),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        reward=session.reward or 0.0,
        verdict=VERDICTS.index(session.verdict or "no_verdict"),
        drift=drift.counts,
    )
    trajectory.check()
    return Sample(trajectory, last, last.routes, drift)


def run_lengths(version_M: np.ndarray) -> np.ndarray:
    """Versions int32 [M] -> rows (version, count) int32 [R, 2]."""
    starts = np.flatnonzero(np.append(True, version_M[1:] != version_M[:-1]))
    return np.stack((version_M[starts], np.diff(np.append(starts, len(version_M)))), axis=1).astype(np.int32)


def drift_of(renderer: Renderer, branch: list[Node], tokens_T: np.ndarray) -> Drift:
    """Drift of a branch's ids from a fresh rendering of its messages. The end of the last turn is left out on both sides."""
    last = branch[-1]
    assert last.head is not None
    messages = [message for node in branch for message in node.messages]
    try:
        fresh_T = renderer.whole(messages, last.head.tools, last.head.template_kwargs, generate=False)
    except SessionError as error:
        return Drift(refused=1, first=error.message)
    sampled_T = np.concatenate([np.repeat((False, True), (len(node.prompt), len(node.sampled))) for node in branch])
    kept = len(tokens_T) - (int(tokens_T[-1]) in renderer.ends)
    ends = np.flatnonzero(np.isin(fresh_T, list(renderer.ends)))
    if len(ends) and not renderer.encoder.decode(fresh_T[ends[-1] + 1 :]).strip():
        fresh_T = fresh_T[: ends[-1]]
    return measure(renderer, tokens_T[:kept], sampled_T[:kept], fresh_T)
