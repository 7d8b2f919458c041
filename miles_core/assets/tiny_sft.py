"""The warm start that made the embedded policy: supervised, and mostly wrong on purpose.

    python -m miles_core.assets.tiny_sft --out DIR --seed 0        (launch/recipes/tiny_sft.sh)
    python -m miles_core.assets.tiny_sft --out DIR --dense         as wide as the experts that one token visits, without a router
    python -m miles_core.assets.tiny_sft --out DIR --task guess    a policy for the game of several turns (launch/recipes/guess.sh)

A reinforcement-learning run needs a policy that is right sometimes. Here 240 batches of 128 demonstrations of the task `sort` are
learned, of which 35 % are right; the others are plausible: descending, copied, shuffled. Sampled at temperature 1 the result sorts about
one prompt in four, and the probability mass of the right answer is there to be sharpened. Games of `guess`, 480 batches of 64, are whole
conversations with tool calls, of which 20 % halve the interval, 40 % guess anything that the hints allow, and 40 % ignore them: the result
finds one number in four. The same seed on the same machine gives the same bytes. Prompts come from the training split only, under a seed of
their own.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from miles_core import numerics
from miles_core.assets import tokenizer as tiny_tokenizer
from miles_core.model import hf
from miles_core.model.attend import PackedAttend
from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import ModelConfig, Transformer
from miles_core.tasks import Task, guess, load
from miles_core.tito.render import Renderer


class Recipe(NamedTuple):
    """Of one task. `batch`: demonstrations a step; `words`: those that the tokenizer has for this task alone."""

    steps: int
    batch: int
    peak_lr: float
    words: tuple[str, ...] = ()


RECIPES = {"sort": Recipe(240, 128, 2e-3), "guess": Recipe(480, 64, 4e-3, guess.WORDS)}
WARMUP_STEPS, FINAL_LR, SHARE_RIGHT = 20, 0.1, 0.35  # FINAL_LR: fraction of the peak that a cosine ends at
DENSE = ModelConfig(
    family="qwen3",
    vocab_size=len(tiny_tokenizer.VOCABULARY),
    hidden_size=96,
    intermediate_size=224,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=24,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position=tiny_tokenizer.MAX_LENGTH,
    tie_embeddings=True,
    qk_norm=True,
)
MIXTURE = replace(DENSE, family="qwen3_moe", moe=MoEConfig(num_experts=8, top_k=2, expert_size=112, layers=(0, 1, 2)))


def initialise(model: Transformer, seed: int) -> None:
    """Matrices from N(0, 0.02), norms one; in the order of the parameters, from a generator of their own."""
    generator = torch.Generator().manual_seed(numerics.derive_seed(seed, "initial weights"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)


def demonstrate(answer: str, digits: str, rng: random.Random) -> str:
    """The answer that one demonstration gives: right, or one of three plausible mistakes."""
    if rng.random() < SHARE_RIGHT:
        return answer
    return rng.choice((answer[::-1], digits, "".join(rng.sample(digits, len(digits)))))


def play(secret: int, rng: random.Random) -> list[int]:
    """The guesses of a game of `guess`."""
    style, low, high, guesses = rng.choices(("halve", "heed", "ignore"), (0.2, 0.4, 0.4))[0], 1, guess.HIGHEST, []
    while len(guesses) < guess.MAX_GUESSES and secret not in guesses:
        number = (low + high) // 2 if style == "halve" else rng.randint(low, high) if style == "heed" else rng.randint(1, guess.HIGHEST)
        guesses.append(number)
        low, high = (max(low, number + 1), high) if number < secret else (low, min(high, number - 1))
    return guesses


def conversation(task: Task, renderer: Renderer, group: int, rng: random.Random) -> tuple[list[int], list[bool]]:
    """Tokens of one demonstration, and which of them are the assistant's, its stop tokens among them."""
    messages, answer, text = task.prompt(group)
    if task.name == "guess":
        turns = [(str(number).join(guess.SPELT), [{"role": "tool", "content": guess.hint(number, answer)}]) for number in play(answer, rng)]
    else:
        turns = [(demonstrate(answer, text.removesuffix("="), rng), [])]
    tokens, mine = [], []
    for said, answered in turns:
        rendered = renderer.later(tokens[-1], messages, None, {}) if tokens else renderer.first(messages, None, {})
        prompt, sampled = rendered.tokens.tolist(), [*renderer.tokenizer.encode(said), renderer.tokenizer.eos_token_id]
        tokens += prompt + sampled
        mine += [False] * len(prompt) + [True] * len(sampled)
        messages = answered
    return tokens, mine


def mean_loss(model: Transformer, demonstrations: list[tuple[list[int], list[bool]]]) -> torch.Tensor:
    """Mean negative log-likelihood of the assistant's tokens."""
    lengths = [len(tokens) for tokens, _ in demonstrations]
    tokens_T = torch.tensor([token for tokens, _ in demonstrations for token in tokens])
    rows_M = torch.tensor([is_mine for _, mine in demonstrations for is_mine in mine]).nonzero()[:, 0] - 1
    ones_M = torch.ones(len(rows_M))
    logp_M, _ = model(
        tokens_T,
        torch.cat([torch.arange(length) for length in lengths]),
        PackedAttend(torch.tensor([0, *lengths]).cumsum(0).int(), model.config.head_dim**-0.5),
        rows_M,
        tokens_T[rows_M + 1],
        (ones_M, ones_M, torch.zeros(len(rows_M), dtype=torch.int64)),
    )
    return -logp_M.mean()


def learning_rate(step: int, recipe: Recipe) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return recipe.peak_lr * min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_LR + (1 - FINAL_LR) * cosine)


def train(
    tokenizer: hf.Tokenizer, seed: int, *, task: str = "sort", steps: int | None = None, config: ModelConfig = MIXTURE
) -> Transformer:
    """The warm-started model. Prints the loss every 40 steps; a model of fewer `steps` is the full run's at that step."""
    recipe = RECIPES[task]
    model = hf.build(config)
    initialise(model, seed)
    renderer = Renderer(tokenizer, "chatml")
    source, rng = load(task, numerics.derive_seed(seed, "warm start")), random.Random(f"demonstrations/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(recipe.steps if steps is None else steps):
        groups = range(step * recipe.batch, (step + 1) * recipe.batch)
        loss = mean_loss(model, [conversation(source, renderer, group, rng) for group in groups])
        optimizer.param_groups[0]["lr"] = learning_rate(step, recipe)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 40 == 0:
            print(f"warm start: step {step + 1}/{recipe.steps}, loss {loss.item():.3f} nats a token", file=sys.stderr, flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint, in Hugging Face layout")
    parser.add_argument("--seed", type=int, default=0, help="initial weights, prompts and demonstrations (default: 0)")
    parser.add_argument("--task", choices=RECIPES, default="sort", help="what to demonstrate (default: sort)")
    parser.add_argument("--dense", action="store_true", help="no mixture of experts")
    args = parser.parse_args()
    words = RECIPES[args.task].words
    config = DENSE if args.dense else MIXTURE
    config = replace(config, vocab_size=config.vocab_size + len(words))
    numerics.setup()
    args.out.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer.save(args.out, words)
    model = train(hf.load_tokenizer(args.out), args.seed, task=args.task, config=config)
    hf.save(args.out, config, model.named_parameters(), args.out)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {args.out}; held-out pass@1: "
          f"python rollout.py --model {args.out} --task {args.task} --eval", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
