"""From rows of logits to tokens and their log-probs on the GPU: temperature, top-k, top-p, inverse CDF, entropy.

The meaning is `kernels/logprob/ref.py`. One program has one row and walks the vocabulary in blocks, in order; sampling and scoring are one
compiled kernel, so that the sampler's log-prob is bit for bit the scorer's. There is no sort: the tokens of a row have one total order,
(z descending, id ascending), in which the kept set is a beginning, and its end is searched for in integers that order the same way. A probe
counts or weighs all tokens at or above an integer, each lane in float64 over the blocks and then the lanes in a fixed tree; such sums never
fall when tokens are added, so the search is exact.

Words: z are scaled logits, -inf outside the kept set; d = z - largest; e = exp(d); a key is the integer of (z, id).
Legend: M rows, V vocabulary, X lanes of a block.
"""

import torch
import triton
import triton.language as tl

from kernels.tiles import Spec, arch_of, check, require, tile

SUPPORTED = "logits float32 [M, V], V < 2^24; temperature, top_p float32, top_k int64, either targets int64 or uniform float64, all [M]"
_NO_LIMIT = tl.constexpr(-(2**62))  # below every key


@triton.jit
def _scaled(row_ptr, start, temperature, V: tl.constexpr, X: tl.constexpr):
    """One block of ids and scaled logits; -inf past the end of the vocabulary."""
    id_X = start + tl.arange(0, X)
    logit_X = tl.load(row_ptr + id_X, mask=id_X < V, other=-float("inf"))
    return id_X, tl.math.div_rn(logit_X, tl.full([X], 0.0, tl.float32) + temperature)


@triton.jit
def order_key(z: tl.tensor, id: tl.tensor, ID_BITS: tl.constexpr) -> tl.tensor:
    """int64 that orders like (z ascending, id descending): an order-preserving integer of the float, then the id counted down."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << ID_BITS) + ((1 << ID_BITS) - 1 - id)


@triton.jit
def _shifted(z, largest):
    """d, at least -1e4 so that e * d is 0 where e is. A NaN stays one."""
    d = z - largest
    return tl.where(d < -1e4, -1e4, d)


@triton.jit
def _weigh(row_ptr, temperature, largest, lowest, target, V: tl.constexpr, X: tl.constexpr, ID_BITS: tl.constexpr):
    """Over the kept set: the sums of e and of e * d, block after block."""
    total = tl.full([], 0.0, tl.float64)
    weighted = tl.full([], 0.0, tl.float64)
    for start in range(0, V, X):
        id_X, z_X = _scaled(row_ptr, start, temperature, V, X)
        kept_X = (order_key(z_X, id_X, ID_BITS) >= lowest) | (id_X == target)
        d_X = _shifted(tl.where(kept_X, z_X, -float("inf")), largest)
        e_X = tl.exp(d_X)
        total += tl.sum(e_X.to(tl.float64))
        weighted += tl.sum((e_X * d_X).to(tl.float64))
    return total, weighted


@triton.jit
def _probe(row_ptr, temperature, largest, lowest, by_weight, key1, key2, key3, V: tl.constexpr, X: tl.constexpr, ID_BITS: tl.constexpr):
    """For three keys: how many tokens are at or above it and `lowest`, and their measure, which is their number or their weight."""
    HALF: tl.constexpr = X // 2  # nine numbers a lane: whole blocks of them would not fit in the registers
    sum1_X, sum2_X, sum3_X = tl.full([HALF], 0.0, tl.float64), tl.full([HALF], 0.0, tl.float64), tl.full([HALF], 0.0, tl.float64)
    count1_X, count2_X, count3_X = tl.full([HALF], 0, tl.int32), tl.full([HALF], 0, tl.int32), tl.full([HALF], 0, tl.int32)
    for start in range(0, V, HALF):
        id_X, z_X = _scaled(row_ptr, start, temperature, V, HALF)
        key_X = tl.where(id_X < V, order_key(z_X, id_X, ID_BITS), _NO_LIMIT)
        key_X = tl.where(key_X >= lowest, key_X, _NO_LIMIT)
        measure_X = tl.where(by_weight, tl.exp(_shifted(z_X, largest)), 1.0).to(tl.float64)
        sum1_X += tl.where(key_X >= key1, measure_X, 0.0)
        sum2_X += tl.where(key_X >= key2, measure_X, 0.0)
        sum3_X += tl.where(key_X >= key3, measure_X, 0.0)
        count1_X += (key_X >= key1).to(tl.int32)
        count2_X += (key_X >= key2).to(tl.int32)
        count3_X += (key_X >= key3).to(tl.int32)
    return tl.sum(sum1_X), tl.sum(sum2_X), tl.sum(sum3_X), tl.sum(count1_X), tl.sum(count2_X), tl.sum(count3_X)


@triton.jit
def _end_of_kept(row_ptr, temperature, largest, highest, top_p, top_k, V: tl.constexpr, X: tl.constexpr, ID_BITS: tl.constexpr):
    """The lowest key that is kept: the largest key at or above which there are top_k tokens; then, of these, weight top_p of theirs.

    Each pass over the row tests three keys between the largest one known to reach the goal and the smallest known to miss it, and so
    quarters the range, until there is one token in it.
    """
    lowest = tl.full([], -(2**31), tl.int64) << ID_BITS  # no key is lower
    for limit in range(2):
        by_weight = limit == 1
        wanted = tl.where(by_weight, top_p < 1.0, (top_k > 0) & (top_k < V))
        if wanted:
            goal = top_k.to(tl.float64)
            if by_weight:
                all_of_it, _, _, _, _, _ = _probe(row_ptr, temperature, largest, lowest, by_weight, lowest, lowest, lowest, V, X, ID_BITS)
                goal = top_p.to(tl.float64) * all_of_it
            reached, missed = lowest, highest + 1
            count_reached = tl.full([], V + 1, tl.int32)  # it is not known, and not needed before the range is smaller
            count_missed = tl.full([], 0, tl.int32)
            while (missed - reached > 1) & (count_reached - count_missed > 1):
                step, last = (missed - reached + 3) // 4, missed - 1
                key1, key2, key3 = reached + step, tl.minimum(reached + 2 * step, last), tl.minimum(reached + 3 * step, last)
                sum1, sum2, sum3, count1, count2, count3 = _probe(
                    row_ptr, temperature, largest, lowest, by_weight, key1, key2, key3, V, X, ID_BITS
                )
                miss1, miss2, miss3 = sum1 < goal, sum2 < goal, sum3 < goal
                missed = tl.where(miss1, key1, tl.where(miss2, key2, tl.where(miss3, key3, missed)))
                count_missed = tl.where(miss1, count1, tl.where(miss2, count2, tl.where(miss3, count3, count_missed)))
                reached = tl.where(miss1, reached, tl.where(miss2, key1, tl.where(miss3, key2, key3)))
                count_reached = tl.where(miss1, count_reached, tl.where(miss2, count1, tl.where(miss3, count2, count3)))
            lowest = reached
    return lowest


@triton.jit
def _draw(row_ptr, temperature, largest, lowest, goal, V: tl.constexpr, X: tl.constexpr, ID_BITS: tl.constexpr):
    """The first token, in vocabulary order, up to which e sums to more than `goal`; if rounding allows none, the last that has weight."""
    chosen, start = 0, 0
    before = tl.full([], 0.0, tl.float64)
    running = tl.full([], 0.0, tl.float64)
    while (start < V) & (running <= goal):
        id_X, z_X = _scaled(row_ptr, start, temperature, V, X)
        kept_X = order_key(z_X, id_X, ID_BITS) >= lowest
        weight = tl.sum(tl.exp(_shifted(tl.where(kept_X, z_X, -float("inf")), largest)).to(tl.float64))
        chosen = tl.where(weight > 0, start, chosen)
        before = tl.where(weight > 0, running, before)
        running += weight
        start += X
    id_X, z_X = _scaled(row_ptr, chosen, temperature, V, X)
    kept_X = order_key(z_X, id_X, ID_BITS) >= lowest
    e_X = tl.exp(_shifted(tl.where(kept_X, z_X, -float("inf")), largest))
    past_X = (e_X > 0) & (before + tl.cumsum(e_X.to(tl.float64), 0) > goal)
    first = tl.min(tl.where(past_X, id_X, V))
    return tl.where(first < V, first, tl.maximum(tl.max(tl.where(e_X > 0, id_X, -1)), 0))


@triton.jit(do_not_specialize=["draws", "wants_z"])
def _token_rows_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, top_k_ptr, target_ptr, uniform_ptr, token_ptr, logp_ptr, entropy_ptr, z_ptr, draws, wants_z,
    V: tl.constexpr, X: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * V
    temperature, top_p, top_k = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row), tl.load(top_k_ptr + row)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    target = tl.full([], -1, tl.int64)
    if draws == 0:
        target = tl.load(target_ptr + row)
    inside = (draws != 0) | ((target >= 0) & (target < V))

    largest_X = tl.full([X], -float("inf"), tl.float32)
    highest_X = tl.full([X], _NO_LIMIT, tl.int64)
    for start in range(0, V, X):
        id_X, z_X = _scaled(row_ptr, start, temperature, V, X)
        largest_X = tl.maximum(largest_X, z_X)
        highest_X = tl.maximum(highest_X, order_key(z_X, id_X, ID_BITS))
    largest, highest = tl.max(largest_X), tl.max(highest_X)

    lowest = tl.full([], _NO_LIMIT, tl.int64)
    if greedy == 0:
        lowest = _end_of_kept(row_ptr, temperature, largest, highest, top_p, top_k, V, X, ID_BITS)
    total, weighted = _weigh(row_ptr, temperature, largest, lowest, target, V, X, ID_BITS)
    token = tl.where(inside, target, 0)
    if draws != 0:
        token = (1 << ID_BITS) - 1 - (highest & ((1 << ID_BITS) - 1))  # the lowest id of the largest
        if greedy == 0:
            token = _draw(row_ptr, temperature, largest, lowest, tl.load(uniform_ptr + row) * total, V, X, ID_BITS).to(tl.int64)
    log_total = tl.log(total)
    d = tl.math.div_rn(tl.load(row_ptr + token), temperature) - largest
    nan = float("nan")
    tl.store(token_ptr + row, tl.where(inside, token, target))
    tl.store(logp_ptr + row, tl.where(inside, (d.to(tl.float64) - log_total).to(tl.float32), nan))
    tl.store(entropy_ptr + row, tl.where(inside, (log_total - weighted / total).to(tl.float32), nan))
    if wants_z != 0:
        for start in range(0, V, X):
            id_X, z_X = _scaled(row_ptr, start, temperature, V, X)
            kept_X = (order_key(z_X, id_X, ID_BITS) >= lowest) | (id_X == target)
            tl.store(z_ptr + row.to(tl.int64) * V + id_X, tl.where(kept_X, z_X, -float("inf")), mask=id_X < V)


def token_rows(
    logits_MV: torch.Tensor,
    temperature_M: torch.Tensor,
    top_p_M: torch.Tensor,
    top_k_M: torch.Tensor,
    targets_M: torch.Tensor | None = None,
    uniform_M: torch.Tensor | None = None,
    want_z: bool = False,
) -> tuple[torch.Tensor, ...]:
    """(token [M], its log-prob [M], entropy [M]), and z [M, V] if wanted; the token is `targets_M` or drawn with `uniform_M` in [0, 1).

    Meaning and dtypes as `kernels.logprob.rows`. A row whose logits are not finite, or whose target is outside the vocabulary, has log-prob
    and entropy NaN, because checking would stop the GPU. No autograd.
    """
    token_M, logp_M, entropy_M, z = _token_rows(logits_MV, temperature_M, top_p_M, top_k_M, targets_M, uniform_M, want_z)
    return (token_M, logp_M, entropy_M, z) if want_z else (token_M, logp_M, entropy_M)


@torch.library.custom_op("miles_spmd::token_rows", mutates_args=())
def _token_rows(
    logits_MV: torch.Tensor,
    temperature_M: torch.Tensor,
    top_p_M: torch.Tensor,
    top_k_M: torch.Tensor,
    targets_M: torch.Tensor | None,
    uniform_M: torch.Tensor | None,
    want_z: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = _outputs(logits_MV, temperature_M, top_p_M, top_k_M, targets_M, uniform_M, want_z)
    check("token_rows", logits_MV, temperature_M, top_p_M, top_k_M, targets_M, uniform_M)
    num_rows, vocab = logits_MV.shape
    if num_rows:
        constants, warps, stages = _constants(vocab, arch_of(logits_MV))
        # An argument that is not there would make another variant of the kernel: any aligned memory of the type stands in for it.
        targets = targets_M if targets_M is not None else outputs[0]
        uniform = uniform_M if uniform_M is not None else logits_MV.new_zeros(1, dtype=torch.float64)
        numbers = (int(uniform_M is not None), int(want_z))
        arguments = (logits_MV, temperature_M, top_p_M, top_k_M, targets, uniform, *outputs, *numbers)
        _token_rows_kernel[(num_rows,)](*arguments, **constants, num_warps=warps, num_stages=stages)
    return outputs


@_token_rows.register_fake
def _outputs(logits_MV, temperature_M, top_p_M, top_k_M, targets_M, uniform_M, want_z):
    tensors = (logits_MV, temperature_M, top_p_M, top_k_M, targets_M, uniform_M)
    dtypes = (torch.float32, torch.float32, torch.float32, torch.int64, torch.int64, torch.float64)
    fits = logits_MV.dim() == 2 and 1 <= logits_MV.shape[1] < 1 << 24 and (targets_M is None) != (uniform_M is None)
    fits = fits and all(x is None or (x.dtype is dtype and len(x) == len(logits_MV)) for x, dtype in zip(tensors, dtypes, strict=True))
    fits = fits and all(x is None or x.dim() == 1 for x in tensors[1:])
    require("token_rows", fits, SUPPORTED, *tensors)
    num_rows, vocab = logits_MV.shape
    z = logits_MV.new_empty((num_rows, vocab) if want_z else (0, vocab))
    return logits_MV.new_empty(num_rows, dtype=torch.int64), logits_MV.new_empty(num_rows), logits_MV.new_empty(num_rows), z


def _constants(vocab: int, arch: str) -> tuple[dict[str, int], int, int]:
    t = tile("logprob", torch.float32, 1, vocab, arch)
    padded = triton.cdiv(vocab, t.block_n) * t.block_n
    return {"V": vocab, "X": t.block_n, "ID_BITS": (padded - 1).bit_length()}, t.warps, t.stages


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """Vocabularies of common models and an odd one. Logits are float32 whatever the model's dtype."""
    result = []
    pointers = {"logits": "fp32", "temperature": "fp32", "top_p": "fp32", "top_k": "i64", "target": "i64", "uniform": "fp64"}
    pointers |= {"token": "i64", "logp": "fp32", "entropy": "fp32", "z": "fp32"}
    for vocab in (151936, 49152, 301):
        constants, warps, stages = _constants(vocab, arch)
        signature = {f"{name}_ptr": f"*{kind}" for name, kind in pointers.items()} | {"draws": "i32", "wants_z": "i32"}
        signature |= dict.fromkeys(constants, "constexpr")
        result.append(Spec(f"token_rows V={vocab}", _token_rows_kernel, signature, constants, warps, stages, dtype))
    return result
