"""Log-prob of a token under the distribution it was sampled from, without ever holding [M, V] logits.

Rows pass in chunks through the linear kernel and then through one row routine, the one that also samples (`kernels.sample`): a row's
bits are the same in the sampler and in the trainer. Backward recomputes the logits of each chunk; it is plain torch.

Legend: M rows, D model, V vocabulary.
"""

from __future__ import annotations

import torch

from kernels.cpu.loader import load
from kernels.dispatch import dense, on_triton
from kernels.linear import PackedWeight
from kernels.linear import forward as linear_forward
from kernels.logprob import ref

CHUNK_LOGITS = 1 << 23  # logits held at a time: 32 MiB, and as much again for their gradient


def logprob(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_M: torch.Tensor,
    temperature_M: torch.Tensor,
    top_p_M: torch.Tensor,
    top_k_M: torch.Tensor,
    packed: PackedWeight | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (log-prob of the target [M], entropy in nats [M]) of softmax(hidden W^T / temperature) after top-k, then top-p.

    hidden and weight are float32, or bfloat16 on a GPU, where the logits are float32 all the same; targets and top_k are int64, temperature
    and top_p float32. top_k 0 and top_p 1 mean off; temperature 0 (greedy) gives the log-prob at temperature 1 without truncation. The
    target always belongs to the kept set. Differentiable in hidden and weight; entropy is not.
    """
    if packed is not None:
        packed.check(weight_VD)
    sampling = (temperature_M, top_p_M, top_k_M)
    if torch.is_grad_enabled() and (hidden_MD.requires_grad or weight_VD.requires_grad):
        return _LogProb.apply(hidden_MD, weight_VD, targets_M, *sampling, packed)
    return _forward(hidden_MD, weight_VD, targets_M, sampling, packed)


def rows(
    logits_MV: torch.Tensor,
    temperature_M: torch.Tensor,
    top_p_M: torch.Tensor,
    top_k_M: torch.Tensor,
    targets_M: torch.Tensor | None = None,
    uniform_M: torch.Tensor | None = None,
    z_MV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The row routine: (token [M], its log-prob [M], entropy [M]), where the token is `targets_M` or drawn with `uniform_M` in [0, 1).

    `z_MV` (it may be `logits_MV`) receives the scaled logits with -inf outside the kept set. No autograd.
    """
    num_rows, vocab = logits_MV.shape
    assert (targets_M is None) != (uniform_M is None), "either targets or noise"
    expected = ((logits_MV, torch.float32), (temperature_M, torch.float32), (top_p_M, torch.float32), (top_k_M, torch.int64))
    for x, dtype in (*expected, (targets_M, torch.int64), (uniform_M, torch.float64)):
        assert x is None or (x.dtype is dtype and len(x) == num_rows and x.is_contiguous()), (x.dtype, dtype, x.shape, logits_MV.shape)
    if on_triton(logits_MV):
        from kernels.logprob.triton import token_rows

        vectors = (None if x is None else dense(x) for x in (temperature_M, top_p_M, top_k_M, targets_M, uniform_M))
        token_M, logp_M, entropy_M, *z = token_rows(dense(logits_MV), *vectors, z_MV is not None)
        if z_MV is not None:
            z_MV.copy_(z[0])
        return token_M, logp_M, entropy_M
    if (lib := load()) is None:
        return _rows_torch(logits_MV, temperature_M, top_p_M, top_k_M, targets_M, uniform_M, z_MV)
    token_M = targets_M if targets_M is not None else torch.empty(num_rows, dtype=torch.int64)
    logp_M, entropy_M = torch.empty(num_rows), torch.empty(num_rows)
    bad = lib.token_rows(
        logits_MV.data_ptr(),
        num_rows,
        vocab,
        temperature_M.data_ptr(),
        top_p_M.data_ptr(),
        top_k_M.data_ptr(),
        uniform_M.data_ptr() if uniform_M is not None else None,
        z_MV.data_ptr() if z_MV is not None else None,
        token_M.data_ptr(),
        logp_M.data_ptr(),
        entropy_M.data_ptr(),
        torch.get_num_threads(),
    )
    assert bad < 0, f"row {bad}: target outside the vocabulary of {vocab}, or logits that are not finite"
    return token_M, logp_M, entropy_M


def _rows_torch(logits_MV, temperature_M, top_p_M, top_k_M, targets_M, uniform_M, z_MV):
    assert not logits_MV.isnan().any() and not logits_MV.isposinf().any(), "logits that are not finite"
    z = ref.truncate(logits_MV, temperature_M, top_p_M, top_k_M, targets_M)
    token_M = targets_M
    if targets_M is None:
        token_M = torch.where(temperature_M == 0, z.argmax(1), ref.draw(z, uniform_M))
    if z_MV is not None:
        z_MV.copy_(z)
    return token_M, *ref.log_prob(z, token_M)


def _chunks(num_rows: int, vocab: int) -> list[slice]:
    size = max(16, CHUNK_LOGITS // vocab)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _forward(hidden_MD, weight_VD, targets_M, sampling, packed):
    logp_M, entropy_M = (hidden_MD.new_empty(len(hidden_MD), dtype=torch.float32) for _ in range(2))
    for c in _chunks(len(hidden_MD), len(weight_VD)):
        logits = linear_forward(hidden_MD[c], weight_VD, None, packed, wide=True)
        _, logp_M[c], entropy_M[c] = rows(logits, *(x[c] for x in sampling), targets_M=targets_M[c])
        del logits  # before the next ones are made
    return logp_M, entropy_M


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, targets_M, temperature_M, top_p_M, top_k_M, packed):
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, temperature_M, top_p_M, top_k_M)
        logp_M, entropy_M = _forward(hidden_MD, weight_VD, targets_M, (temperature_M, top_p_M, top_k_M), packed)
        ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx, grad_logp_M, _):
        hidden_MD, weight_VD, targets_M, temperature_M, *truncation = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_MD = torch.empty_like(hidden_MD) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD) if need_weight else None
        slope_M = grad_logp_M / torch.where(temperature_M == 0, 1.0, temperature_M)
        for c in _chunks(len(hidden_MD), len(weight_VD)):
            z = linear_forward(hidden_MD[c], weight_VD, None, None, wide=True)
            rows(z, temperature_M[c], *(x[c] for x in truncation), targets_M=targets_M[c], z_MV=z)
            grad_z = torch.softmax(z, dim=1).mul_(-slope_M[c, None])
            del z
            grad_z = grad_z.scatter_add_(1, targets_M[c, None], slope_M[c, None]).to(weight_VD.dtype)
            if need_hidden:
                torch.mm(grad_z, weight_VD, out=grad_hidden_MD[c])
            if need_weight:
                grad_weight_VD.addmm_(grad_z.t(), hidden_MD[c])
            del grad_z
        return grad_hidden_MD, grad_weight_VD, None, None, None, None, None
