"""The distribution that tokens are sampled from, and log-probs under it: the definition in torch.

    z = logits / temperature;  keep the top_k largest;  of these the smallest set of largest ones whose probability reaches top_p.

Ties go to the lower id. Temperature 0 (greedy) means temperature 1 without truncation. Top-p is nucleus sampling (Holtzman et al.,
arXiv 1904.09751, section 3.1), applied after top-k as in vLLM and transformers; its cumulative sums are float64.

Legend: M rows, V vocabulary.
"""

import torch


def truncate(
    logits_MV: torch.Tensor,
    temperature_M: torch.Tensor,
    top_p_M: torch.Tensor,
    top_k_M: torch.Tensor,
    targets_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scaled logits [M, V] with -inf outside the kept set. `targets_M` (if any) are always kept."""
    vocab = logits_MV.shape[1]
    greedy_M = temperature_M == 0
    z_MV = logits_MV / torch.where(greedy_M, 1.0, temperature_M)[:, None]
    top_k_M = torch.where(greedy_M | (top_k_M <= 0), vocab, top_k_M)
    top_p_M = torch.where(greedy_M | (top_p_M >= 1), torch.inf, top_p_M).double()
    if bool((top_k_M >= vocab).all()) and bool(torch.isinf(top_p_M).all()):
        return z_MV
    sorted_MV, id_MV = z_MV.sort(dim=1, descending=True, stable=True)
    inside_MV = torch.arange(vocab) < top_k_M[:, None]
    p_MV = torch.exp(sorted_MV - sorted_MV[:, :1]).double() * inside_MV
    before_MV = p_MV.cumsum(1) - p_MV
    keep_sorted_MV = inside_MV & (before_MV < top_p_M[:, None] * p_MV.sum(1, keepdim=True))
    keep_MV = torch.zeros_like(keep_sorted_MV).scatter(1, id_MV, keep_sorted_MV)
    if targets_M is not None:
        keep_MV.scatter_(1, targets_M[:, None], True)
    return torch.where(keep_MV, z_MV, -torch.inf)


def log_prob(z_MV: torch.Tensor, targets_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (log-prob of the target [M], entropy in nats [M]) of softmax(z); -inf marks tokens outside the kept set."""
    shifted_MV = z_MV - z_MV.amax(1, keepdim=True)
    e_MV = torch.exp(shifted_MV).double()
    total_M = e_MV.sum(1)
    weighted_M = (e_MV * torch.where(e_MV > 0, shifted_MV, 0.0)).sum(1)
    logp_M = shifted_MV.gather(1, targets_M[:, None]).squeeze(1) - torch.log(total_M)
    return logp_M.float(), (torch.log(total_M) - weighted_M / total_M).float()


def draw(z_MV: torch.Tensor, uniform_M: torch.Tensor) -> torch.Tensor:
    """int64 [M]: the first token, in vocabulary order, whose float64 cumulative weight exceeds uniform x total."""
    e_MV = torch.exp(z_MV - z_MV.amax(1, keepdim=True)).double()
    cumulative_MV = e_MV.cumsum(1)
    token_M = torch.searchsorted(cumulative_MV, (uniform_M * cumulative_MV[:, -1])[:, None], right=True).squeeze(1)
    # uniform x total can round up to the total: then the last kept token
    last_M = z_MV.shape[1] - 1 - (e_MV > 0).to(torch.int8).flip(1).argmax(1)
    return torch.minimum(token_M, last_M)
