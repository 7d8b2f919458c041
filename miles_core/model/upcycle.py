"""A dense Llama checkpoint -> a Mixtral that computes the same function: every expert is a copy of the MLP, every router is new.

    python -m miles_core.model.upcycle SOURCE OUT --experts 4 --top-k 2

The weights of a token's experts add up to 1 and the experts are equal, so it does not matter which are chosen, up to rounding. They drift
apart once they are trained on different tokens. Source: sparse upcycling, Komatsuzaki et al., arXiv 2212.05055, section 3.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from miles_core import guard, numerics
from miles_core.model import hf
from miles_core.model.moe import Experts, MoEConfig
from miles_core.model.transformer import ModelConfig

ROUTER_STD = 0.02  # of new router weights, as transformers initialises them


def upcycled_config(dense: ModelConfig, num_experts: int, top_k: int) -> ModelConfig:
    """ValueError for a model that Mixtral has no form for."""
    if dense.family != "llama" or dense.qkv_bias or dense.o_bias or dense.mlp_bias or dense.rope_scaling:
        raise ValueError(f"upcycle: only a Llama without biases and rope scaling becomes a Mixtral, not this {dense.family}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"upcycle: --top-k {top_k} is not between 1 and --experts {num_experts}")
    moe = MoEConfig(num_experts, top_k, dense.intermediate_size, tuple(range(dense.num_layers)))
    return replace(dense, family="mixtral", moe=moe)


def upcycled_tensors(source: Path, dense: ModelConfig, moe: MoEConfig, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor of the mixture, one at a time. Experts are views of one copy."""
    for name, tensor in hf.read_tensors(source, dense):
        layer, is_mlp, rest = name.partition(".mlp.")
        if name == "lm_head.weight" and dense.tie_embeddings:
            continue
        if not is_mlp:
            yield name, tensor
            continue
        matrix = rest.removesuffix(".weight")
        assert matrix in Experts.NAMES, name
        yield f"{layer}.mlp.experts.{matrix}", tensor.expand(moe.num_experts, -1, -1)
    for layer in moe.layers:
        generator = torch.Generator().manual_seed(numerics.derive_seed(seed, "router", layer))
        yield f"layers.{layer}.mlp.gate.weight", torch.randn(moe.num_experts, dense.hidden_size, generator=generator) * ROUTER_STD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a dense Llama in Hugging Face layout")
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=4, help="experts of a layer (default: 4)")
    parser.add_argument("--top-k", type=int, default=2, help="experts that a token visits (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the routers (default: 0)")
    args = parser.parse_args()
    dense = hf.load_config(args.source)
    hf.check_weights(args.source, dense)
    config = upcycled_config(dense, args.experts, args.top_k)
    hf.save(args.out, config, upcycled_tensors(args.source, dense, config.moe, args.seed), args.source)
    print(f"{args.out}: {args.experts} experts a layer, {args.top_k} of them for each token", file=sys.stderr)


if __name__ == "__main__":
    guard.run(main)
