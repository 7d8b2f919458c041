"""The router of a mixture of experts: which experts a token visits (`select`), and with which weights (`weigh`).

They are two ops because a trainer replays the ids that the sampler recorded and still learns through the weights. Rows are invariant
forwards; backward is plain torch in float32. Source: see ref.py.

Legend: T tokens, E experts, K slots.
"""

from __future__ import annotations

import torch

from kernels.cpu.loader import load
from kernels.dispatch import dense, on_triton
from kernels.router import ref

SCORING = ("softmax", "sigmoid")


def select(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> torch.Tensor:
    """float32 [T, E] -> int64 [T, K]: the experts with the largest choices, descending, the lower index first among equals. No gradient.

    A choice is the score (`scoring`: "softmax" over all experts, or "sigmoid") plus `bias_E` (float32). With `num_groups` > 1 the experts
    stand in that many equal groups that follow each other, a group is worth the sum of its two largest choices, and the experts of all but
    the `top_groups` best groups are out. Choices that are not numbers come last: ids are distinct and inside whatever the logits are.

    Raises ValueError for sizes that do not fit; on a GPU also for more than 4096 experts.
    """
    num_experts = logits_TE.shape[-1]
    if not 0 < top_k <= num_experts or not num_groups == top_groups == 1:
        _require_sizes(num_experts, top_k, num_groups, top_groups)
    logits_TE, sigmoid = logits_TE.detach(), _sigmoid(logits_TE, scoring)
    if bias_E is not None and (bias_E.dtype is not torch.float32 or bias_E.shape != (num_experts,)):
        raise ValueError(f"router.select: bias {list(bias_E.shape)} {bias_E.dtype}; supported: float32 [{num_experts}], one per expert")
    if on_triton(logits_TE):
        from kernels.router.triton import select as triton_select

        return triton_select(dense(logits_TE), top_k, sigmoid, None if bias_E is None else dense(bias_E.detach()), num_groups, top_groups)
    lib = load()
    if lib is None:
        return ref.select(logits_TE, top_k, sigmoid, bias_E, num_groups, top_groups)
    logits, bias = logits_TE.contiguous(), None if bias_E is None else bias_E.contiguous()
    num_tokens = len(logits)
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int64)
    bias_pointer = None if bias is None else bias.data_ptr()
    lib.select_experts(logits.data_ptr(), bias_pointer, ids_TK.data_ptr(), num_tokens, num_experts, top_k, sigmoid, num_groups, top_groups)
    return ids_TK


def weigh(logits_TE: torch.Tensor, ids_TK: torch.Tensor, *, scoring: str, normalise: bool, scale: float) -> torch.Tensor:
    """float32 [T, E], int64 [T, K] distinct in a row -> float32 [T, K]; differentiable in the logits for any ids.

    The score of each id, divided by (their sum in slot order + 1e-20) if `normalise`, times `scale`. An id outside of 0 .. E - 1 is an
    AssertionError on a CPU, and NaN on a GPU.
    """
    sigmoid = _sigmoid(logits_TE, scoring)
    assert ids_TK.ndim == 2 and len(ids_TK) == len(logits_TE) and ids_TK.dtype is torch.int64, (ids_TK.shape, ids_TK.dtype, logits_TE.shape)
    if torch.is_grad_enabled() and logits_TE.requires_grad:
        return _Weigh.apply(logits_TE, ids_TK, sigmoid, normalise, scale)
    return _weigh(logits_TE, ids_TK, sigmoid, normalise, scale)


def _weigh(logits_TE: torch.Tensor, ids_TK: torch.Tensor, sigmoid: bool, normalise: bool, scale: float) -> torch.Tensor:
    if on_triton(logits_TE):
        from kernels.router.triton import weigh as triton_weigh

        return triton_weigh(dense(logits_TE), dense(ids_TK), sigmoid, normalise, scale)
    lib = load()
    if lib is None:
        return ref.weigh(logits_TE, ids_TK, sigmoid, normalise, scale)
    logits, ids = logits_TE.contiguous(), ids_TK.contiguous()
    (num_tokens, num_experts), top_k = logits.shape, ids.shape[1]
    weights_TK = logits.new_empty(num_tokens, top_k)
    pointers = (logits.data_ptr(), ids.data_ptr(), weights_TK.data_ptr())
    bad = lib.weigh_experts(*pointers, num_tokens, num_experts, top_k, sigmoid, normalise, scale)
    assert bad < 0, f"router.weigh: token {bad} has ids {ids[bad].tolist()} of {num_experts} experts"
    return weights_TK


def _sigmoid(logits_TE: torch.Tensor, scoring: str) -> bool:
    if scoring not in SCORING:
        raise ValueError(f"router: scoring={scoring!r} is not supported; supported: {', '.join(SCORING)}")
    if logits_TE.dtype is not torch.float32 or logits_TE.ndim != 2:
        raise ValueError(f"router: logits {list(logits_TE.shape)} {logits_TE.dtype} are not supported; supported: float32 [T, E]")
    return scoring == "sigmoid"


def _require_sizes(num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    given = f"router.select: top_k={top_k}, num_groups={num_groups}, top_groups={top_groups} with {num_experts} experts"
    if num_groups < 1 or num_experts % num_groups or (num_groups > 1 and num_experts < 2 * num_groups):
        raise ValueError(f"{given}: supported are equal groups of at least 2 experts")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"{given}: supported is 1 <= top_groups <= num_groups")
    candidates = num_experts // num_groups * top_groups
    if not 1 <= top_k <= candidates:
        raise ValueError(f"{given}: supported is 1 <= top_k <= {candidates}, the experts that may be chosen")


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE, ids_TK, sigmoid, normalise, scale):
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.settings = sigmoid, normalise, scale
        return _weigh(logits_TE, ids_TK, sigmoid, normalise, scale)

    @staticmethod
    def backward(ctx, grad_TK):
        logits_TE, ids_TK = ctx.saved_tensors
        sigmoid, normalise, scale = ctx.settings
        scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
        scores_TK = scores_TE.gather(1, ids_TK)
        grad_TK = grad_TK * scale
        if normalise:
            total_T1 = scores_TK.sum(1, keepdim=True) + 1e-20
            grad_TK = (grad_TK - (grad_TK * scores_TK).sum(1, keepdim=True) / total_T1) / total_T1
        grad_TK = grad_TK * scores_TK
        if sigmoid:
            return torch.zeros_like(logits_TE).scatter_(1, ids_TK, grad_TK * (1 - scores_TK)), None, None, None, None
        # Each logit moves the scores of all experts through the softmax's total, chosen or not.
        direct_TE = torch.zeros_like(logits_TE).scatter_(1, ids_TK, grad_TK)
        return direct_TE - scores_TE * grad_TK.sum(1, keepdim=True), None, None, None, None
