"""The warm start that made the embedded policy: supervised, and mostly wrong on purpose.

    python -m miles_core.assets.tiny_sft --out DIR --seed 0        (launch/recipes/tiny_sft.sh)
    python -m miles_core.assets.tiny_sft --out DIR --dense         as wide as the experts that one token visits, without a router

A reinforcement-learning run needs a policy that is right sometimes. Here 240 batches of 128 demonstrations of the task `sort` are
learned, of which 35 % are right; the others are plausible: descending, copied, shuffled. Sampled at temperature 1 the result sorts about
one prompt in four, and the probability mass of the right answer is there to be sharpened. The same seed on the same machine gives the
same bytes. Prompts come from the training split only, under a seed of their own.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch

from miles_core import numerics
from miles_core.assets import tokenizer as tiny_tokenizer
from miles_core.model import hf
from miles_core.model.attend import PackedAttend
from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import ModelConfig, Transformer
from miles_core.tasks import Task, load, make_prompt

STEPS, DEMONSTRATIONS, SHARE_RIGHT = 240, 128, 0.35
PEAK_LR, WARMUP_STEPS, FINAL_LR = 2e-3, 20, 0.1  # FINAL_LR: fraction of the peak that a cosine ends at
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


def batch(task: Task, tokenizer: hf.Tokenizer, step: int, rng: random.Random) -> tuple[torch.Tensor, int]:
    """(tokens int64 [S, prompt + answer + stop], length of every prompt) of one step."""
    rows = []
    for group in range(step * DEMONSTRATIONS, (step + 1) * DEMONSTRATIONS):
        prompt = make_prompt(task, tokenizer, group)
        answer = demonstrate(prompt.answer, prompt.text.removesuffix("="), rng)
        rows.append([*prompt.tokens.tolist(), *tokenizer.encode(answer), tokenizer.eos_token_id])
    return torch.tensor(rows), len(prompt.tokens)


def mean_loss(model: Transformer, tokens_SL: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Mean negative log-likelihood of the answer tokens, the stop token among them."""
    num_sequences, length = tokens_SL.shape
    targets = tokens_SL[:, prompt_length:].reshape(-1)
    rows_M = (torch.arange(num_sequences)[:, None] * length + torch.arange(prompt_length, length) - 1).reshape(-1)
    cu_seqlens_S1 = torch.arange(0, num_sequences * length + 1, length, dtype=torch.int32)
    ones_M = torch.ones(len(targets))
    logp_M, _ = model(
        tokens_SL.reshape(-1),
        torch.arange(length).repeat(num_sequences),
        PackedAttend(cu_seqlens_S1, model.config.head_dim**-0.5),
        rows_M,
        targets,
        (ones_M, ones_M, torch.zeros(len(targets), dtype=torch.int64)),
    )
    return -logp_M.mean()


def learning_rate(step: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_LR + (1 - FINAL_LR) * cosine)


def train(tokenizer: hf.Tokenizer, seed: int, steps: int = STEPS, config: ModelConfig = MIXTURE) -> Transformer:
    """The warm-started model. Prints the loss every 40 steps; a model of `steps` < STEPS is the full run's at that step."""
    model = hf.build(config)
    initialise(model, seed)
    task, rng = load("sort", numerics.derive_seed(seed, "warm start")), random.Random(f"demonstrations/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        loss = mean_loss(model, *batch(task, tokenizer, step, rng))
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 40 == 0:
            print(f"warm start: step {step + 1}/{STEPS}, loss {loss.item():.3f} nats a token", file=sys.stderr, flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint, in Hugging Face layout")
    parser.add_argument("--seed", type=int, default=0, help="initial weights, prompts and demonstrations (default: 0)")
    parser.add_argument("--dense", action="store_true", help="no mixture of experts")
    args = parser.parse_args()
    config = DENSE if args.dense else MIXTURE
    numerics.setup()
    args.out.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer.save(args.out)
    model = train(hf.load_tokenizer(args.out), args.seed, config=config)
    hf.save(args.out, config, model.named_parameters(), args.out)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {args.out}; held-out pass@1: "
          f"python rollout.py --model {args.out} --task sort --eval", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
