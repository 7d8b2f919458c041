"""Choosing experts for a token and weighing them: the definition in torch.

Softmax scores: Shazeer et al., arXiv 1701.06538, section 2.1, as Mixtral and Qwen3-MoE use them. Sigmoid scores, a bias for the choice and
groups: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.

Legend: T tokens, E experts, K slots, G groups.
"""

import torch


def scores(logits_TE: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    """float32 [T, E] -> [T, E]: the sigmoid of each, written out as in kernels/swiglu/ref.py, or the softmax over all experts."""
    return 1.0 / (1.0 + torch.exp(-logits_TE)) if sigmoid else logits_TE.softmax(-1)


def select(
    logits_TE: torch.Tensor, top_k: int, sigmoid: bool, bias_E: torch.Tensor | None, num_groups: int, top_groups: int
) -> torch.Tensor:
    """float32 [T, E] -> int64 [T, K]. Stable sorts, so that the lower index comes first among equals; what is not a number comes last."""
    choice_TE = scores(logits_TE, sigmoid)
    if bias_E is not None:
        choice_TE = choice_TE + bias_E
    choice_TE = _number(choice_TE)
    ids_TE = choice_TE.argsort(dim=-1, descending=True, stable=True)
    if num_groups > 1:
        num_tokens, num_experts = logits_TE.shape
        worth_TG = _number(choice_TE.view(num_tokens, num_groups, -1).topk(2).values.sum(-1))
        best_TG = worth_TG.argsort(dim=-1, descending=True, stable=True)[:, :top_groups]
        dropped_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter_(1, best_TG, False)
        dropped_TE = dropped_TG.repeat_interleave(num_experts // num_groups, 1)
        ids_TE = ids_TE.gather(1, dropped_TE.gather(1, ids_TE).byte().argsort(dim=-1, stable=True))  # those of the best groups first
    return ids_TE[:, :top_k].contiguous()


def _number(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), -torch.inf, x)


def weigh(logits_TE: torch.Tensor, ids_TK: torch.Tensor, sigmoid: bool, normalise: bool, scale: float) -> torch.Tensor:
    """float32 [T, E], int64 [T, K] -> float32 [T, K]: the scores of these experts, divided by their sum in slot order if `normalise`."""
    weights_TK = scores(logits_TE, sigmoid).gather(1, ids_TK)
    if normalise:
        total_T = weights_TK[:, 0]
        for score_T in weights_TK.unbind(1)[1:]:
            total_T = total_T + score_T
        weights_TK = weights_TK / (total_T[:, None] + 1e-20)
    return weights_TK * scale
