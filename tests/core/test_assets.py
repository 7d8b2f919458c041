"""The embedded policy: its size, its tokenizer, its warm start (same seed, same bytes) and what it can do before any training.

    python -m pytest tests/core/test_assets.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from miles_core import tasks
from miles_core.assets import TINY, tiny_sft
from miles_core.assets.tokenizer import CHARACTERS, END, ROLES, VOCABULARY
from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.model import hf
from miles_core.tasks import guess
from miles_core.tito.parsers import parse_assistant
from miles_core.tito.render import Renderer


@pytest.fixture(scope="module")
def tokenizer() -> hf.Tokenizer:
    return hf.load_tokenizer(TINY)


def test_the_checkpoint_is_small_and_is_what_the_recipe_makes(tmp_path: Path) -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 4e6
    assert hf.load_config(TINY) == tiny_sft.MIXTURE
    assert hf.load_stop_ids(TINY) == (VOCABULARY[END],)
    tiny_sft.tiny_tokenizer.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (TINY / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_character_is_a_token_and_so_is_a_role(tokenizer: hf.Tokenizer) -> None:
    assert len(tokenizer) == len(VOCABULARY) == tiny_sft.MIXTURE.vocab_size
    for piece in (*CHARACTERS, *ROLES):
        assert tokenizer.encode(piece) == [VOCABULARY[piece]], piece
    every = "".join(CHARACTERS)
    assert tokenizer.decode(tokenizer.encode(every)) == every
    assert tokenizer.decode(tokenizer.encode("tab\t, e\u0301 .")) == "tab<|unk|>, e<|unk|> ."
    assert tokenizer.decode([*tokenizer.encode("12"), VOCABULARY[END]], skip_special_tokens=True) == "12"


def test_the_template_is_chatml_and_append_only(tokenizer: hf.Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Sort."},
        {"role": "user", "content": "31="},
        {"role": "assistant", "content": "13"},
        {"role": "tool", "content": "ok"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    for turns in range(1, 4):
        head, asked = (tokenizer.apply_chat_template(messages[:turns], tokenize=False, add_generation_prompt=add) for add in (False, True))
        assert whole.startswith(head) and asked == head + "<|im_start|>assistant\n"


def test_demonstrations_are_right_in_35_percent_and_plausible_in_the_others(tokenizer: hf.Tokenizer) -> None:
    rng, digits, answer = tiny_sft.random.Random(0), "539214", "123459"
    made = [tiny_sft.demonstrate(answer, digits, rng) for _ in range(4000)]
    assert all(sorted(text) == sorted(digits) for text in made)
    shares = [made.count(text) / len(made) for text in (answer, answer[::-1], digits)]
    assert shares == pytest.approx([0.35, 0.65 / 3, 0.65 / 3], abs=0.02)
    tokens, mine = tiny_sft.conversation(tasks.load("sort", 0), Renderer(tokenizer, "chatml"), 0, rng)
    assert mine == [False] * (len(tokens) - 7) + [True] * 7 and tokens[-1] == VOCABULARY[END]  # the stop token is learned too


def test_games_are_whole_conversations_of_three_kinds_of_players(tmp_path: Path) -> None:
    rng = tiny_sft.random.Random(0)
    games = [(secret, tiny_sft.play(secret, rng)) for secret in range(1, 65) for _ in range(60)]
    for secret, guesses in games:
        assert 1 <= len(guesses) <= 6 and (guesses[-1] == secret or len(guesses) == 6) and secret not in guesses[:-1]
    halving = sum(guesses[:2] in ([32], [32, 48], [32, 16]) for _, guesses in games) / len(games)
    assert halving == pytest.approx(0.2, abs=0.03)

    tiny_sft.tiny_tokenizer.save(tmp_path, guess.WORDS)
    renderer = Renderer(hf.load_tokenizer(tmp_path), "chatml")
    tokens, mine = tiny_sft.conversation(tasks.load("guess", 0), renderer, 3, tiny_sft.random.Random(1))
    text = renderer.tokenizer.decode(tokens)
    assert text.startswith("<|im_start|>user\n1-64?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n")
    spoken = renderer.tokenizer.decode([token for token, is_mine in zip(tokens, mine, strict=True) if is_mine])
    answers = [parse_assistant(said, "chatml") for said in spoken.split("<|im_end|>")[:-1]]
    numbers = [guess.guessed(call) for answer in answers for call in answer["tool_calls"]]
    assert numbers == tiny_sft.play(tasks.load("guess", 0).prompt(3)[1], tiny_sft.random.Random(1)) and mine.count(True) <= 5 * len(numbers)


def test_a_conversation_is_what_the_template_writes(tmp_path: Path) -> None:
    tiny_sft.tiny_tokenizer.save(tmp_path, guess.WORDS)
    renderer, game = Renderer(hf.load_tokenizer(tmp_path), "chatml"), tasks.load("guess", 0)
    for group in range(40):
        tokens, _ = tiny_sft.conversation(game, renderer, group, tiny_sft.random.Random(group))
        messages, secret, _ = game.prompt(group)
        for number in (numbers := tiny_sft.play(secret, tiny_sft.random.Random(group))):
            call = {"id": "", "type": "function", "function": {"name": "guess", "arguments": json.dumps({"number": number})}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
            messages += [{"role": "tool", "content": guess.hint(number, secret)}] * (number is not numbers[-1])
        assert renderer.whole(messages, None, {}, generate=False).tolist() == [*tokens, VOCABULARY["\n"]]


def test_the_loss_is_the_mean_over_answer_tokens(tokenizer: hf.Tokenizer) -> None:
    """Equal to a mean over the sequences taken one by one, and to log V for a policy that knows nothing."""
    model, rng = hf.load(TINY), tiny_sft.random.Random(0)
    made = [tiny_sft.conversation(tasks.load("sort", 0), Renderer(tokenizer, "chatml"), group, rng) for group in range(6)]
    with torch.no_grad():
        whole = tiny_sft.mean_loss(model, made)
        apart = torch.stack([tiny_sft.mean_loss(model, [each]) for each in made]).mean()
        model.norm.weight.zero_()
        uniform = tiny_sft.mean_loss(model, made)
    torch.testing.assert_close(whole, apart)
    torch.testing.assert_close(uniform, torch.tensor(float(len(VOCABULARY))).log())


def test_the_same_seed_gives_the_same_bytes(tokenizer: hf.Tokenizer) -> None:
    """Over the first steps of the recipe: weights, prompts, demonstrations and arithmetic are all fixed by the seed."""

    def weights(seed: int) -> list[bytes]:
        return [parameter.detach().numpy().tobytes() for parameter in tiny_sft.train(tokenizer, seed, steps=2).parameters()]

    first = weights(0)
    torch.manual_seed(torch.seed() + 1)  # no global generator is read
    assert weights(0) == first
    assert weights(1) != first


def test_the_shipped_policy_is_right_one_time_in_four(tokenizer: hf.Tokenizer) -> None:
    """Held-out pass@1 at temperature 1: low enough that a curve can rise, high enough that a group of eight has a right answer."""
    task, params = tasks.load("sort", 0), SamplingParams(1.0, 1.0, 0, 16, hf.load_stop_ids(TINY))
    prompts = [tasks.make_prompt(task, tokenizer, group, "eval") for group in range(600)]
    engine = Engine(hf.load(TINY), tokenizer, seed=0, num_pages=300, max_batch_tokens=4096, max_sequences=256)
    completions = engine.generate([Request(prompt.group, 0, prompt.tokens, params) for prompt in prompts])
    rewards = [task.reward(prompt.answer, completion.text) for prompt, completion in zip(prompts, completions, strict=True)]
    assert 0.21 <= sum(rewards) / len(rewards) <= 0.33, sum(rewards) / len(rewards)
    assert sum(len(completion.text) == 6 for completion in completions) > 0.9 * len(completions)  # it knows when to stop
