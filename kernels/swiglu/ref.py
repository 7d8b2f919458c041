"""SwiGLU without its matrices (Shazeer, arXiv 2002.05202, eq. 5-6): the definition in torch."""

import torch


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """float32, any shape: gate / (1 + exp(-gate)) * up. Written out because torch's silu and sigmoid give other bits in vector tails."""
    return gate / (1.0 + torch.exp(-gate)) * up
