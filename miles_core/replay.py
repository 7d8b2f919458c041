"""The training rank's side of a mixture of experts, step by step. For a dense model all of it does nothing.

    routes = ExpertRoutes(...)
    routes.begin(shares, groups, counts)          # once a step: ask the rollout ranks for the rows, and begin to receive them
    batch, route = routes.of(batch)               # each micro-batch: with its rows; what the model is to be routed by
    (loss + route.loss).backward(); route.check()
    metrics = routes.end(model, train_sum)        # after the optimizer step (collective over the training ranks): load, biases, metrics
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from miles_core.metrics import Max, Metric
from miles_core.model.moe import MoEConfig, routers
from miles_core.pack import Counts
from miles_core.route_transport import Fetch, Mailbox, RouteStore, plan
from miles_core.routing import BalanceParams, TrainRoutes, load, load_metrics
from miles_core.schema import Batch, Trajectory


class ExpertRoutes:
    """mode: "on" replays the recorded rows, "record" compares them with the live ones, "off" fetches none.

    `passes`: how often a layer runs for one backward. `trainers`: the training ranks of this node, `rank` among them. `mailbox`: only on
    the node's leader, if other ranks roll out. `store`: only on a rank that rolls out itself.
    """

    def __init__(
        self, moe: MoEConfig | None, mode: str, balance_coef: float, z_coef: float, bias_rate: float, *, passes: int, rank: int,
        trainers: Sequence[int], group: dist.ProcessGroup, device: torch.device, timeout_s: float,
        mailbox: Mailbox | None, store: RouteStore | None,
    ):  # fmt: skip
        self.moe, self.mode, self.bias_rate, self.passes = moe, mode, bias_rate, passes
        self.balance = BalanceParams(balance_coef, z_coef)
        self.rank, self.trainers, self.group, self.device, self.timeout_s = rank, trainers, group, device, timeout_s
        self.mailbox, self.store = mailbox, store
        self.fetches = moe is not None and mode != "off"

    def begin(self, shares: Sequence[Sequence[Trajectory]], groups: Sequence[Sequence[Trajectory]], counts: Counts) -> None:
        """`shares[i]` is what training rank `trainers[i]` packs of the node's `groups`; `counts` those of the whole step."""
        self.step_balance = replace(self.balance, num_sequences=max(counts.sequences, 1), num_tokens=max(counts.tokens, 1))
        self.used: list[TrainRoutes] = []
        if self.fetches:
            kept = {t.key for share in shares for t in share}
            wanted = plan(shares, self.trainers, [t for group in groups for t in group if t.key not in kept])
            if self.store is not None:
                self.store.serve(wanted)
            elif self.mailbox is not None:
                self.mailbox.post(wanted, self.timeout_s)
        mine = shares[self.trainers.index(self.rank)] if self.fetches else []
        self.fetch = Fetch(mine, self.store, self.group, self.moe, self.device, self.timeout_s)

    def of(self, batch: Batch) -> tuple[Batch, TrainRoutes]:
        batch = self.fetch.attach(batch)
        self.used.append(TrainRoutes(batch, self.moe, replay=self.mode == "on", passes=self.passes, balance=self.step_balance))
        return batch, self.used[-1]

    def abandon(self) -> None:
        """The step ends here: receive what is under way, so that no rank is left with a message that nobody takes."""
        self.fetch.drop()

    def end(self, model: nn.Module, train_sum: Callable[..., list[float]], *, log: bool) -> dict[str, Metric]:
        """`train_sum` adds up over the training ranks; `log` on the one of them whose metrics of the sums count.

        The bias of an expert goes up when its load is below the mean, else down: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
        """
        if self.moe is None:
            return {}
        load_LE = load(self.used)
        load_LE = torch.tensor(train_sum(*load_LE.flatten().tolist()), dtype=torch.float64).view_as(load_LE)
        if self.bias_rate:
            step_LE = self.bias_rate * (load_LE.mean(1, keepdim=True) - load_LE).sign().float()
            for router, step_E in zip(routers(model), step_LE, strict=True):
                router.e_score_correction_bias += step_E.to(self.device)
        metrics: dict[str, Metric] = {"perf/r3_fetch_s": Max(self.fetch.waited_s)} if self.fetches else {}
        return metrics | (load_metrics(load_LE, self.moe) if log else {})
