"""The parity chain of the model alone, one link a test, equal to the bit: sequences packed = apart, chunked prefill = whole, decode =
prefill, trainer = sampler.

    python -m pytest tests/parity/test_forward.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from kernels import cpu
from kernels.attention import PAGE, allocate_cache
from kernels.invariance import self_test
from kernels.sample import sample, uniform
from miles_core.model import hf
from miles_core.model.attend import PackedAttend, PagedAttend
from miles_core.model.transformer import Linear, ModelConfig, Transformer

LLAMA = ModelConfig(
    family="llama", vocab_size=133, hidden_size=72, intermediate_size=200, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=24,
    rms_norm_eps=1e-5, rope_theta=1e4, max_position=1024, tie_embeddings=True,
)  # fmt: skip
QWEN2 = ModelConfig(
    family="qwen2", vocab_size=301, hidden_size=40, intermediate_size=392, num_layers=2, num_heads=7, num_kv_heads=1, head_dim=16,
    rms_norm_eps=1e-6, rope_theta=1e6, max_position=1024, tie_embeddings=True, qkv_bias=True,
)  # fmt: skip
QWEN3 = ModelConfig(
    family="qwen3", vocab_size=150, hidden_size=200, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=40,
    rms_norm_eps=1e-6, rope_theta=1e6, max_position=1024, tie_embeddings=False, qk_norm=True,
)  # fmt: skip
LENGTHS = (1, 130, 64, 17, 65, 3, 200)


def make_model(config: ModelConfig) -> Transformer:
    model, generator = hf.build(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.3 if p.ndim == 1 else 1.5 * config.hidden_size**-0.5, generator=generator)
    return model


CASES = [("cpp", LLAMA), ("cpp", QWEN2), ("cpp", QWEN3), ("torch", LLAMA)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[1].family}-{case[0]}")
def model(request: pytest.FixtureRequest) -> Iterator[Transformer]:
    """A model of each family on the C++ kernels, and one on the torch path."""
    implementation, c = request.param
    before = cpu.implementation()
    cpu.select(implementation)
    model = make_model(c)
    self_test([m.weight.shape for m in model.modules() if isinstance(m, Linear)], c.head_dim, c.num_heads, c.num_kv_heads, c.vocab_size)
    yield model
    cpu.select(before)


@pytest.fixture(scope="module")
def sequences(model: Transformer) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(model.config.vocab_size, (length,), generator=generator) for length in LENGTHS]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(model: Transformer, sequences: list[torch.Tensor], rows_M: torch.Tensor | None = None, *trained: object):
    """The trainer's forward over these sequences; every row unless `rows_M` says which."""
    lengths = [len(s) for s in sequences]
    attend = PackedAttend(int32([0, *lengths]).cumsum(0).int(), model.config.head_dim**-0.5)
    rows_M = torch.arange(sum(lengths)) if rows_M is None else rows_M
    return model(torch.cat(sequences), torch.cat([torch.arange(n) for n in lengths]), attend, rows_M, *trained)


class Paged:
    """The engine's side, as small as it gets: sequences with pages of their own, scattered over a cache that was never cleared."""

    def __init__(self, model: Transformer, sequences: list[torch.Tensor]):
        self.model, self.sequences, self.done = model, sequences, [0] * len(sequences)
        c, blocks = model.config, [math.ceil(len(s) / PAGE) for s in sequences]
        self.cache = allocate_cache(c.num_layers, sum(blocks) + 2, c.num_kv_heads, c.head_dim)
        pages = (torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(2)) + 1).int().split(blocks)
        self.table_SB = torch.zeros(len(sequences), max(blocks), dtype=torch.int32)
        for row, own in zip(self.table_SB, pages, strict=True):
            row[: len(own)] = own

    def forward(self, counts: dict[int, int]) -> list[torch.Tensor]:
        """The next counts[s] tokens of each sequence s in one forward. Returns their logits."""
        index = list(counts)
        starts, ends = [self.done[s] for s in index], [self.done[s] + counts[s] for s in index]
        positions = [torch.arange(a, b) for a, b in zip(starts, ends, strict=True)]
        slots = [self.table_SB[s].long()[p // PAGE] * PAGE + p % PAGE for s, p in zip(index, positions, strict=True)]
        cu_seqlens = int32([0, *counts.values()]).cumsum(0).int()
        attend = PagedAttend(
            self.cache, self.table_SB[index], cu_seqlens, int32(ends), torch.cat(slots), self.model.config.head_dim**-0.5
        )
        tokens_T = torch.cat([self.sequences[s][p] for s, p in zip(index, positions, strict=True)])
        with torch.no_grad():
            logits_TV = self.model(tokens_T, torch.cat(positions), attend, torch.arange(len(tokens_T)))
        for s in index:
            self.done[s] += counts[s]
        return list(logits_TV.split(list(counts.values())))

    def prefill(self, chunk: int) -> list[torch.Tensor]:
        """All sequences side by side, `chunk` tokens of each at a time. Returns the logits of each."""
        logits: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        while counts := {s: n for s, tokens in enumerate(self.sequences) if (n := min(chunk, len(tokens) - self.done[s])) > 0}:
            for s, part in zip(counts, self.forward(counts), strict=True):
                logits[s].append(part)
        return [torch.cat(parts) for parts in logits]


@pytest.fixture(scope="module")
def whole(model: Transformer, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of every sequence, prefilled in one piece, each in a forward of its own."""
    return [Paged(model, [tokens]).prefill(len(tokens))[0] for tokens in sequences]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for s, (a, b) in enumerate(zip(found, expected, strict=True)):
        wrong = (a != b).any(-1).nonzero()[:, 0].tolist()
        assert not wrong, f"sequence {s}: other bits at positions {wrong[:5]} (of {len(wrong)}), by {(a - b).abs().max():.1e}"


@pytest.mark.parametrize("chunk", [3, 7, 16, 20, 64, 256])
def test_chunked_prefill_is_prefill(chunk: int, model: Transformer, sequences: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
    assert_equal(Paged(model, sequences).prefill(chunk), whole)


@pytest.mark.parametrize("pack", [False, True], ids=["weights as they are", "weights packed"])
def test_decode_is_prefill(pack: bool, model: Transformer, sequences: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
    """Token by token, seven sequences at once, then fewer as they end."""
    model = make_model(model.config)
    if pack:
        model.pack_weights()
    assert_equal(Paged(model, sequences).prefill(1), whole)


def test_decode_and_prefill_mix(model: Transformer, sequences: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
    """One forward that continues a sequence by one token, others by chunks, and starts another."""
    paged = Paged(model, sequences)
    for counts in ({1: 60}, {6: 63, 1: 3}, {2: 64, 1: 1, 6: 2}, {6: 130, 4: 65, 0: 1, 1: 66}):
        begin = {s: paged.done[s] for s in counts}
        found = paged.forward(counts)
        assert_equal(found, [whole[s][begin[s] : begin[s] + n] for s, n in counts.items()])


def test_packed_is_prefill(model: Transformer, sequences: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
    """The trainer's forward, with gradients on: all sequences together, in another order, and each alone."""
    assert torch.is_grad_enabled()
    assert_equal(packed(model, sequences).detach().split(LENGTHS), whole)
    assert_equal(packed(model, sequences[::-1]).detach().split(LENGTHS[::-1]), whole[::-1])
    assert_equal([packed(model, [tokens]).detach() for tokens in sequences], whole)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "activation checkpointing"])
def test_trained_logp_is_sampled_logp(
    checkpointing: bool, model: Transformer, sequences: list[torch.Tensor], whole: list[torch.Tensor]
) -> None:
    """Log-probs that the sampler gives from its logits, token by token, and the trainer's, from hidden states, with gradients on."""
    logits_TV = torch.cat(whole)
    count = len(logits_TV)
    sampling = (torch.linspace(0.3, 2.0, count), torch.linspace(0.4, 1.1, count).clamp(max=1.0), torch.arange(count) % 40)
    zero_T = torch.zeros(count, dtype=torch.int64)
    arguments = (logits_TV, *sampling, uniform(7, zero_T, zero_T, torch.arange(count)))
    one_by_one = [sample(*row) for row in zip(*(x.split(1) for x in arguments), strict=True)]
    token_T, logp_T = (torch.cat(parts) for parts in zip(*one_by_one, strict=True))
    rows_M = torch.arange(count)[torch.arange(count) % 3 != 1]
    model.activation_checkpointing = checkpointing
    logp_M, _ = packed(model, sequences, rows_M, token_T[rows_M], tuple(x[rows_M] for x in sampling))
    model.activation_checkpointing = False
    assert logp_M.requires_grad and torch.equal(logp_M.detach(), logp_T[rows_M])
    assert len(set(token_T.tolist())) > 30, "too few different tokens to test anything"


def test_a_small_difference_is_seen(model: Transformer, sequences: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
    """The comparisons above can fail: a few units in the last place of one row of one matrix are seen."""
    other = make_model(model.config)
    assert_equal(packed(other, sequences).detach().split(LENGTHS), whole)
    with torch.no_grad():
        other.layers[0].mlp.down_proj.weight[3] *= 1 + 1e-6
    found = packed(other, sequences).detach().split(LENGTHS)
    with pytest.raises(AssertionError, match="other bits at positions"):
        assert_equal(found, whole)
