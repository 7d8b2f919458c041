"""The rollout engine: requests in, finished answers out, many at once, each as if it were alone.

    engine = Engine(model, tokenizer, seed=0, num_pages=256, max_batch_tokens=1024, max_sequences=64)
    engine.add(Request(group=0, sample=0, tokens=prompt, params=SamplingParams(1.0, 1.0, 0, 16, (eos,))))
    while engine.num_unfinished:
        for completion in engine.step():
            ...

A step is one forward that mixes decode and prefill rows. Tokens and log-probs do not depend on what else is in the batch, on chunking,
cache hits or preemption: the ops are batch-invariant, and the noise is a function of (seed, group, sample, position).

Legend: S sequences in a forward, T tokens in it, B pages of a sequence, M sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kernels.attention import PAGE, allocate_cache
from miles_core.engine.cache import PagePool
from miles_core.engine.sampler import StopStrings, sample
from miles_core.engine.scheduler import Copy, Plan, Scheduler
from miles_core.engine.sequence import Completion, Counters, Request, Rows, SamplingParams, Sequence, Table
from miles_core.model.attend import PagedAttend
from miles_core.model.hf import Tokenizer
from miles_core.model.transformer import Transformer
from miles_core.routing import RoutePages
from miles_core.schema import FINISH_REASONS, Trajectory

__all__ = ["Completion", "Engine", "Request", "SamplingParams"]
Watcher = Callable[[int, float, list[tuple[int, float]]], None]
STOP, LENGTH = FINISH_REASONS.index("stop"), FINISH_REASONS.index("length")


class Engine:
    """Continuous batching over a paged KV cache of `num_pages` x PAGE tokens.

    max_batch_tokens: tokens of one forward. max_sequences: sequences that run at once; any number may wait. The tokenizer is needed for
    stop strings and `Completion.text` only. `version` is that of the weights in `model` now. routing_replay, for a mixture of experts: "on"
    records which experts each token visits, and lets a token that is computed again visit the same; "record" only records; "off" neither.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        *,
        seed: int,
        num_pages: int,
        max_batch_tokens: int,
        max_sequences: int,
        version: int = 0,
        routing_replay: str = "off",
    ):
        for name, value in (("num_pages", num_pages), ("max_batch_tokens", max_batch_tokens), ("max_sequences", max_sequences)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        config = model.config
        self.model, self.tokenizer, self.seed = model, tokenizer, seed
        weight = model.embed_tokens.weight
        self.device = weight.device
        self.scale = config.head_dim**-0.5
        self.max_context = config.max_position
        self.counters = Counters()
        # the last sampled token needs no page
        self.table = Table(max_sequences, min(self.max_context, num_pages * PAGE + 1))
        self.pool = PagePool(num_pages)
        assert routing_replay in ("on", "record", "off"), routing_replay
        recorded = config.moe is not None and routing_replay != "off"
        self.routes = RoutePages(num_pages, config.moe, self.device) if recorded else None
        self.scheduler = Scheduler(
            self.table, self.pool, max_batch_tokens, self.counters, version,
            keep_rows=recorded, replay_rows=recorded and routing_replay == "on",
        )  # fmt: skip
        self.cache = allocate_cache(config.num_layers, num_pages, config.num_kv_heads, config.head_dim, self.device, weight.dtype)
        self._added = 0
        self._watchers: dict[int, Watcher] = {}
        model.pack_weights()

    @property
    def version(self) -> int:
        return self.scheduler.version

    @property
    def num_unfinished(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    def add(self, request: Request) -> int:
        """Queue a request. Returns its number, which its Completion carries. ValueError when it can never be served."""
        self._check(request)
        number, strings = self._added, request.params.stop_strings
        self._added += 1
        sequence = Sequence.of(request, number)
        sequence.stop_strings = StopStrings(self.tokenizer, strings) if strings else None
        self.scheduler.add(sequence)
        return number

    def _check(self, request: Request) -> None:
        params, length, capacity = request.params, len(request.tokens), self.pool.num_pages * PAGE
        longest, name = length + params.max_new_tokens, f"group {request.group}"
        if length == 0:
            raise ValueError(f"{name}: the prompt is empty")
        if length + 1 > self.max_context:
            raise ValueError(f"{name}: a prompt of {length} tokens leaves no room in a context of {self.max_context}; shorten it")
        if longest > self.max_context:
            raise ValueError(
                f"{name}: --max-new-tokens {params.max_new_tokens} after a prompt of {length} tokens exceeds the context of "
                f"{self.max_context}; lower it to at most {self.max_context - length}"
            )
        if longest - 1 > capacity:
            raise ValueError(
                f"{name}: {longest} tokens (prompt and --max-new-tokens) exceed a KV cache of {capacity}; raise --kv-tokens to {longest}"
            )
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"{name}: stop strings need a tokenizer")
        low, high, vocabulary = int(request.tokens.min()), int(request.tokens.max()), self.model.config.vocab_size
        if low < 0 or high >= vocabulary:
            raise ValueError(f"{name}: token ids {low}..{high} of the prompt are outside the model's vocabulary of {vocabulary}")

    def watch(self, number: int, watcher: Watcher) -> None:
        """Call `watcher(token, log-prob, top)` for every token of a request as it is sampled; see Request.top_logprobs."""
        self._watchers[number] = watcher

    def cancel(self, number: int) -> bool:
        """Drop a request, between steps. False if it is not there: it has ended."""
        self._watchers.pop(number, None)
        sequence = self.scheduler.drop(number)
        if sequence is not None and self.routes is not None:
            self.routes.flush()  # its pages may be given out again
        return sequence is not None

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One forward. Returns the answers that ended in it, none when nothing is unfinished."""
        plan = self.scheduler.schedule()
        self._save_rows()
        if not len(plan.lanes):
            return []
        self._prepare_pages(plan)
        lanes_M, logits_MV = self._forward(plan)
        self._copy([fork.tail for fork in plan.forks if fork.tail])
        self.scheduler.complete()
        if plan.recycled and self.routes is not None:
            self.routes.flush()
        self.counters.steps += 1
        if not len(lanes_M):
            return []
        tokens_M, logp_M = sample(logits_MV, self.table, lanes_M, self.seed)
        if self._watchers:
            self._tell(lanes_M, tokens_M, logp_M, logits_MV)
        return self._append(lanes_M, tokens_M, logp_M)

    def _tell(self, lanes_M: np.ndarray, tokens_M: np.ndarray, logp_M: np.ndarray, logits_MV: torch.Tensor) -> None:
        """Tell the watchers what was sampled."""
        for i, lane in enumerate(lanes_M.tolist()):
            sequence = self.table.sequences[lane]
            if (watcher := self._watchers.get(sequence.number)) is not None:
                top, count = [], min(sequence.request.top_logprobs, logits_MV.shape[1])
                if count:
                    temperature = sequence.request.params.temperature or 1.0
                    best = torch.log_softmax(logits_MV[i].float() / temperature, -1).topk(count)
                    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
                watcher(int(tokens_M[i]), float(logp_M[i]), top)

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Serve these requests and nothing else. Completions come in the order of the requests."""
        assert self.num_unfinished == 0, f"{self.num_unfinished} other requests are unfinished"
        numbers = [self.add(request) for request in requests]
        done: dict[int, Completion] = {}
        while self.num_unfinished:
            done.update((completion.number, completion) for completion in self.step())
        return [done[number] for number in numbers]

    def set_version(self, version: int, mode: str) -> None:
        """The weights in `model` have been changed in place and are now `version`. Call it between steps.

        mode "recompute": sequences in flight are prefilled again before their next token; what they have sampled stays as sampled.
        mode "keep": those that have sampled go on with the KV they have. Either way no later request is served from the KV of earlier
        weights.
        """
        if mode not in ("recompute", "keep"):
            raise ValueError(f"--on-update must be recompute or keep, got {mode!r}")
        self.model.pack_weights()
        self.scheduler.set_version(version, recompute=mode == "recompute")

    def _prepare_pages(self, plan: Plan) -> None:
        """Clear the pages that changed hands: a masked slot counts 0 times its content, which must not be a former owner's NaN."""
        if plan.new_pages:
            pages = self._tensor(np.array(plan.new_pages, np.int64))
            self.cache.k.index_fill_(1, pages, 0)
            self.cache.v.index_fill_(1, pages, 0)
        self._copy(plan.copies)
        for sequence, lane, start in plan.restores:
            slots = self._slots(self.table.pages[lane], np.arange(start, sequence.reached))
            self.routes.write(slots, sequence.rows_RLK[start:])

    def _slots(self, pages: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Where these positions of a sequence with these pages stand in the cache."""
        return self._tensor(pages[positions // PAGE].astype(np.int64) * PAGE + positions % PAGE)

    def _save_rows(self) -> None:
        """Take the routes of sequences that lost their pages out of them, before these are written to."""
        for sequence, pages, reached in self.scheduler.saves:
            sequence.rows_RLK = self._rows(sequence, pages, reached)
        self.scheduler.saves.clear()

    def _rows(self, sequence: Sequence, pages: np.ndarray, reached: int) -> torch.Tensor:
        """The routes of its first `reached` tokens: as first decided, if they were saved once; else from its pages."""
        saved = sequence.rows_RLK
        start = 0 if saved is None else len(saved)
        rows_RLK = self.routes.read(self._slots(pages, np.arange(start, reached)))
        return rows_RLK if saved is None else torch.cat([saved, rows_RLK])

    def _copy(self, copies: list[Copy]) -> None:
        """Copy the tails of prompts, all copies of one page at once."""
        targets: dict[tuple[int, int], list[int]] = {}
        for source, target, count in copies:
            targets.setdefault((source, count), []).append(target)
        for (source, count), pages in targets.items():
            self.cache.k[:, pages, :, :, :count] = self.cache.k[:, source, None, :, :, :count]
            self.cache.v[:, pages, :, :count] = self.cache.v[:, source, None, :, :count]
            if self.routes is not None:
                self.routes.copy(source, pages, count)

    def _forward(self, plan: Plan) -> tuple[np.ndarray, torch.Tensor]:
        """Compute the plan's tokens. Returns the lanes that get a token now [M], and their logits [M, V]."""
        table, lanes_S, counts_S = self.table, plan.lanes, plan.counts
        start_S, cu_S1 = table.computed[lanes_S], np.zeros(len(lanes_S) + 1, np.int64)
        np.cumsum(counts_S, out=cu_S1[1:])
        context_S = start_S + counts_S
        lanes_T = np.repeat(lanes_S, counts_S)
        positions_T = np.arange(cu_S1[-1]) + np.repeat(start_S - cu_S1[:-1], counts_S)
        slots_T = table.pages[lanes_T, positions_T // PAGE].astype(np.int64) * PAGE + positions_T % PAGE
        ends = context_S == table.length[lanes_S]
        lanes_M, rows_M = lanes_S[ends], cu_S1[1:][ends] - 1
        if plan.forks:
            index = {lane: i for i, lane in enumerate(lanes_S.tolist())}
            leaders = [index[fork.leader] for fork in plan.forks]
            lanes_M = np.concatenate([lanes_M, [fork.lane for fork in plan.forks]])
            rows_M = np.concatenate([rows_M, cu_S1[leaders] + table.prompt[lanes_S[leaders]] - 1 - start_S[leaders]])
        attend = PagedAttend(
            self.cache,
            self._tensor(table.pages[lanes_S, : -(-int(context_S.max()) // PAGE)]),
            self._tensor(cu_S1.astype(np.int32)),
            self._tensor(context_S.astype(np.int32)),
            self._tensor(slots_T),
            self.scale,
        )
        forced = None
        if self.scheduler.replay_rows and not plan.decodes:
            forced_T = positions_T < table.reached[lanes_T]
            forced = self._tensor(forced_T) if forced_T.any() else None
        tokens_T, positions_T, rows_M = (self._tensor(x) for x in (table.tokens[lanes_T, positions_T], positions_T, rows_M))
        if self.routes is None:
            return lanes_M, self.model(tokens_T, positions_T, attend, rows_M)
        return lanes_M, self.model(tokens_T, positions_T, attend, rows_M, route=self.routes.recorder(attend.slots_T, forced))

    def _append(self, lanes_M: np.ndarray, tokens_M: np.ndarray, logp_M: np.ndarray) -> list[Completion]:
        table = self.table
        stopped_M = table.append(lanes_M, tokens_M, logp_M, self.version)
        self.counters.tokens_sampled += len(lanes_M)
        for i in np.flatnonzero(table.has_stop_strings[lanes_M]):
            stopped_M[i] |= table.sequences[lanes_M[i]].stop_strings.push(int(tokens_M[i]))
        ended_M = stopped_M | (table.length[lanes_M] == table.limit[lanes_M])
        return [self._finish(int(lanes_M[i]), STOP if stopped_M[i] else LENGTH) for i in np.flatnonzero(ended_M)]

    def _finish(self, lane: int, reason: int) -> Completion:
        sequence = self.scheduler.leave(lane)
        self._watchers.pop(sequence.number, None)
        request, params, prompt = sequence.request, sequence.request.params, sequence.prompt
        mask, version_M = np.ones(len(sequence.tokens), np.uint8), sequence.version[prompt:]
        mask[:prompt] = 0
        runs = [(version_M[0], len(version_M))]
        if version_M[-1] != version_M[0]:  # versions only go up
            runs = list(zip(*np.unique(version_M, return_counts=True), strict=True))
        trajectory = Trajectory(
            group=request.group,
            sample=request.sample,
            tokens=sequence.tokens.astype(np.int32),
            loss_mask=mask,
            logp_roll=sequence.logp,
            version=np.array(runs, np.int32),
            turns=np.array([prompt, len(version_M)], np.int32),
            finish=reason,
            cached=sequence.cached,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
        )
        rows = None
        if self.routes is not None:
            rows = Rows(self._rows(sequence, self.table.pages[lane], sequence.reached), sequence.row_version[: sequence.reached])
        text = self.tokenizer.decode(sequence.tokens[prompt:].tolist(), skip_special_tokens=True) if self.tokenizer else ""
        text = sequence.stop_strings.cut(text) if sequence.stop_strings else text
        return Completion(sequence.number, trajectory, text, rows)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
