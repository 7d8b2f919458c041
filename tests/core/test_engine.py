"""What a user of the engine sees: when answers end, what a request may ask for, that order and company do not matter, what is counted.

    python -m pytest tests/core/test_engine.py
"""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from kernels.attention import PAGE
from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.engine.sampler import StopStrings
from miles_core.model import hf
from miles_core.model.transformer import ModelConfig
from miles_core.schema import FINISH_REASONS

CONFIG = ModelConfig(
    vocab_size=260, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6,
    rope_theta=1e4, rope_scaling=None, max_position=256, tie_embeddings=True, qkv_bias=False, qk_norm=True, family="qwen3",
)  # fmt: skip


def bytes_tokenizer() -> Tokenizer:
    """A token for each byte (ids 0..255), 'END' (256), and 'XEN' + half a character (257); ids above decode to nothing."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {b: chr(b) for b in printable}
    names |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)}
    vocab = {name: b for b, name in names.items()} | {"END": 256, "XEN" + names["é".encode()[0]]: 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = hf.build(CONFIG, "cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if "norm" in name else p.normal_(0, 0.15)
    return model


def make_engine(model, **changes) -> Engine:
    return Engine(model, bytes_tokenizer(), **{"seed": 3, "num_pages": 64, "max_batch_tokens": 64, "max_sequences": 16, **changes})


def request(prompt, *, group=0, sample=0, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=20, stop_ids=(), stop_strings=()) -> Request:
    params = SamplingParams(temperature, top_p, top_k, max_new_tokens, tuple(stop_ids), tuple(stop_strings))
    return Request(group, sample, np.asarray(prompt, np.int32), params)


def answer(completion) -> list[int]:
    t = completion.trajectory
    return t.tokens[t.loss_mask == 1].tolist()


def test_records_agree_and_name_what_was_sampled(model):
    prompts = [np.arange(5), np.arange(70), np.arange(3)]
    requests = [request(p, group=7 + i, sample=i, temperature=0.5, top_p=0.9, top_k=9, max_new_tokens=4 + i) for i, p in enumerate(prompts)]
    for i, completion in enumerate(make_engine(model, version=5).generate(requests)):
        t = completion.trajectory
        t.check()
        assert (t.group, t.sample, t.temperature, t.top_p, t.top_k) == (7 + i, i, 0.5, 0.9, 9)
        assert t.turns.tolist() == [len(prompts[i]), 4 + i] and np.array_equal(t.tokens[: len(prompts[i])], prompts[i])
        assert np.array_equal(t.loss_mask, [0] * len(prompts[i]) + [1] * (4 + i))
        assert (t.logp_roll[t.loss_mask == 1] < 0).all() and (t.logp_roll[t.loss_mask == 0] == 0).all()
        assert t.version.tolist() == [[5, 4 + i]] and FINISH_REASONS[t.finish] == "length"
        assert (t.tokens.dtype, t.logp_roll.dtype, t.loss_mask.dtype, t.version.dtype) == (np.int32, np.float32, np.uint8, np.int32)


def test_a_stop_token_ends_the_answer_and_is_part_of_it(model):
    free = answer(make_engine(model).generate([request([1, 2, 3])])[0])
    for stop in (free[0], free[7], free[-1]):
        stopped = make_engine(model).generate([request([1, 2, 3], stop_ids=(258, stop))])[0]
        assert answer(stopped) == free[: free.index(stop) + 1] and FINISH_REASONS[stopped.trajectory.finish] == "stop"
    missed = make_engine(model).generate([request([1, 2, 3], stop_ids=set(range(260)) - set(free))])[0]
    assert answer(missed) == free and FINISH_REASONS[missed.trajectory.finish] == "length"


def test_a_stop_token_of_the_prompt_does_not_end_anything(model):
    free = answer(make_engine(model).generate([request([250, 251])])[0])
    assert 250 not in free
    assert answer(make_engine(model).generate([request([250, 251], stop_ids=(250,))])[0]) == free


def test_a_stop_string_ends_the_answer_and_is_cut_from_the_text(model):
    engine = make_engine(model)
    free = engine.generate([request([1, 2, 3], max_new_tokens=30)])[0]
    tokens, decode = answer(free), engine.tokenizer.decode
    end = next(n for n in range(8, 30) if "\ufffd" not in decode(tokens[n - 2 : n]) and len(decode(tokens[n - 2 : n])) == 2)
    stop = decode(tokens[end - 2 : end])
    stopped = engine.generate([request([1, 2, 3], max_new_tokens=30, stop_strings=("never seen", stop))])[0]
    assert answer(stopped) == tokens[:end] and FINISH_REASONS[stopped.trajectory.finish] == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_are_found_at_the_token_that_completes_them(seed):
    rng = np.random.default_rng(seed)
    tokenizer = bytes_tokenizer()
    text = "".join(rng.choice(list("ab é漢🙂\n"), 60))
    tokens = list(text.encode())
    for at in sorted(rng.integers(0, 60, 3), reverse=True):
        tokens[at:at] = [[256], [257, *"é".encode()[1:]], [259]][rng.integers(3)]  # also inside a character: invalid bytes
    for strings in (("漢🙂",), ("b", "éé"), ("END",), ("ENé", " a\n"), ("a" * 9,)):
        finder = StopStrings(tokenizer, strings)
        found = next((n for n, token in enumerate(tokens) if finder.push(token)), None)
        expected = next((n for n in range(len(tokens)) if any(s in tokenizer.decode(tokens[: n + 1]) for s in strings)), None)
        assert found == expected, strings


def test_the_order_of_requests_does_not_matter(model):
    requests = [request(np.arange(3 + 40 * group), group=group, sample=sample) for group in range(3) for sample in range(4)]
    one = make_engine(model).generate(requests)
    other = make_engine(model, max_sequences=5).generate(requests[::-1])[::-1]
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a.trajectory.tokens, b.trajectory.tokens)
        assert np.array_equal(a.trajectory.logp_roll, b.trajectory.logp_roll)


def test_samples_groups_and_seeds_draw_different_noise(model):
    def answers(seed, **where):
        return tuple(answer(make_engine(model, seed=seed).generate([request([1, 2, 3], **where)])[0]))

    drawn = {answers(seed, group=group, sample=sample) for seed in (0, 1) for group in (0, 1, 1 << 32) for sample in (0, 1)}
    assert len(drawn) == 12
    assert answers(0, group=1 << 32) == answers(0, group=1 << 32)


def test_greedy_samples_are_equal_and_the_likeliest(model):
    requests = [request([1, 2, 3], sample=sample, temperature=0.0) for sample in range(3)]
    answers = [answer(c) for c in make_engine(model).generate(requests)]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] == answer(make_engine(model, seed=9).generate([request([1, 2, 3], temperature=1.0, top_k=1)])[0])


def test_requests_that_arrive_while_others_run_get_the_same_answers(model):
    requests = [request(np.arange(3 + 30 * i), group=i) for i in range(5)]
    expected = make_engine(model).generate(requests)
    engine, done = make_engine(model), {}
    pending = requests.copy()
    while pending or engine.num_unfinished:
        if pending:
            engine.add(pending.pop(0))
        for _ in range(2):
            done.update((c.number, c) for c in engine.step())
    assert engine.step() == [] and engine.num_unfinished == 0
    for i, completion in enumerate(expected):
        assert np.array_equal(done[i].trajectory.tokens, completion.trajectory.tokens)


def test_counters_and_cached_tokens(model):
    engine = make_engine(model)
    done = engine.generate([request(np.arange(40), sample=s, max_new_tokens=5) for s in range(4)])
    assert [c.trajectory.cached for c in done] == [0, 40, 40, 40]
    counters = engine.counters
    assert (counters.tokens_sampled, counters.prompt_tokens_computed, counters.prompt_tokens_cached) == (20, 40, 120)
    assert (counters.tokens_recomputed, counters.preemptions, counters.steps) == (0, 0, 5)


def test_what_can_never_be_served_is_refused_with_its_flag(model):
    engine = make_engine(model, num_pages=2)
    for bad, text in (
        (request([]), "prompt is empty"),
        (request(np.zeros(256)), "256 tokens leaves no room in a context of 256"),
        (request(np.zeros(250), max_new_tokens=7), "--max-new-tokens 7 .* lower it to at most 6"),
        (request(np.zeros(100), max_new_tokens=30), "raise --kv-tokens to 130"),
        (request([260]), "outside the model's vocabulary of 260"),
        (request([-1]), "outside the model's vocabulary of 260"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.add(bad)
    assert engine.num_unfinished == 0
    engine.generate([request(np.zeros(100), max_new_tokens=2 * PAGE - 100 + 1)])  # the longest that fits
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        Engine(model, None, seed=0, num_pages=2, max_batch_tokens=8, max_sequences=1).add(request([1], stop_strings=("a",)))
    with pytest.raises(ValueError, match="recompute or keep"):
        engine.set_version(1, "restart")
    with pytest.raises(ValueError, match="max_sequences must be at least 1"):
        make_engine(model, max_sequences=0)


def test_sampling_params_out_of_range():
    bad = {"temperature": (-1.0, float("nan")), "top_p": (0.0, 1.1), "top_k": (-1,), "max_new_tokens": (0,), "stop_strings": (("",),)}
    good = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 1, "stop_token_ids": ()}
    for field, value in ((field, value) for field, values in bad.items() for value in values):
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{**good, field: value})


def test_a_pages_former_content_is_cleared(model):
    expected = make_engine(model).generate([request(np.arange(70))])[0].trajectory
    engine = make_engine(model)
    for cache in engine.cache:
        cache.fill_(float("nan"))
    found = engine.generate([request(np.arange(70))])[0].trajectory
    assert np.array_equal(found.tokens, expected.tokens) and np.array_equal(found.logp_roll, expected.logp_roll)
    used = engine.table.pages[0, :2].tolist()
    assert all(torch.isfinite(cache[:, used]).all() for cache in engine.cache)
