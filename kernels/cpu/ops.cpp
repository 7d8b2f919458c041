// Every op of the parity path on the CPU, called from Python through ctypes (which releases the GIL). Shapes and contracts are in the
// wrappers, kernels/<op>/__init__.py; definitions in kernels/<op>/ref.py.
//
// Invariance is by construction: each output is computed by one thread, by a sequence of operations that depends on its own row only.
// Tiles, threads and vector width decide which outputs are computed together, never how. Compiled with -ffp-contract=off: a fused
// multiply-add is written fma().
//
// Pointers are float32 unless the type says otherwise. Functions that return a number give -1, or the index of the first bad row.

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "router.h"
#include "simd.h"
#include "tokens.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void pack(const float* weight, int64_t num_out, int64_t num_in, float* panels, int64_t threads) {
    const long count = (num_out + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long p = 0; p < count; ++p) pack_panel(weight, num_out, num_in, p * LANES, 0, num_in, panels + p * LANES * num_in);
}

EXPORT void linear(const float* x, const float* weight, const float* panels, const float* bias, float* y, int64_t num_rows, int64_t num_out,
                   int64_t num_in, int64_t threads) {
    if (num_rows == 0) return;
    static thread_local std::vector<float> runs;
    const Linear problem{weight, panels, bias, num_out, num_in, plan_linear(num_rows, num_out, num_in)};
    const long groups = ((num_out + LANES - 1) / LANES + problem.plan.panels - 1) / problem.plan.panels;
    for (long row = 0; row < num_rows; row += problem.plan.block) {
        const long count = std::min(problem.plan.block, num_rows - row);
        runs.resize(runs_size(count, num_in));
        cut_into_runs(x + row * num_in, nullptr, count, num_in, runs.data());
        const LinearRows rows{runs.data(), y + row * num_out, count};
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * num_out * num_in > MIN_PARALLEL_WORK)
        for (long g = 0; g < groups; ++g) linear_group(problem, rows, g);
    }
}

// y = x / sqrt(mean(x^2) + eps) * weight, the squares added in four interleaved sums of vectors. With RESIDUAL, x + residual is written to
// `total` and normed: read back from there, a row is in the first-level cache.
template <bool RESIDUAL>
static void norm_rows(const float* x, const float* residual, const float* weight, float eps, float* y, float* total, long num_rows,
                      long dim) {
    for (long row = 0; row < num_rows; ++row, x += dim, residual += dim, y += dim, total += dim) {
        V squares[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
        for (long i = 0; i < dim; i += LANES) {
            const bool whole = i + LANES <= dim;
            V a = whole ? load(x + i) : load_part(x + i, dim - i);
            if (RESIDUAL) {
                a = add(a, whole ? load(residual + i) : load_part(residual + i, dim - i));
                whole ? store(total + i, a) : store_part(total + i, dim - i, a);
            }
            V& square = squares[i / LANES % 4];
            square = fma(a, a, square);
        }
        const float mean = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / static_cast<float>(dim);
        const V scale = set1(1.0f / std::sqrt(mean + eps));
        const float* in = RESIDUAL ? total : x;
        long i = 0;
        for (; i + LANES <= dim; i += LANES) store(y + i, mul(mul(load(in + i), scale), load(weight + i)));
        if (i < dim) store_part(y + i, dim - i, mul(mul(load_part(in + i, dim - i), scale), load_part(weight + i, dim - i)));
    }
}

EXPORT void rmsnorm(const float* x, const float* weight, float eps, float* y, int64_t num_rows, int64_t dim) {
    norm_rows<false>(x, x, weight, eps, y, y, num_rows, dim);
}

EXPORT void rmsnorm_residual(const float* x, const float* residual, const float* weight, float eps, float* y, float* total,
                             int64_t num_rows, int64_t dim) {
    norm_rows<true>(x, residual, weight, eps, y, total, num_rows, dim);
}

// Elementwise, every product and sum rounded on its own: vector body and scalar tail agree. `backwards` turns by the opposite angle.
EXPORT void rope(const float* x, const float* cos, const float* sin, float* y, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
                 int64_t backwards) {
    const long half = head_dim / 2;
    const float sign = backwards ? -1.0f : 1.0f;
    for (long token = 0; token < num_tokens; ++token, cos += half, sin += half) {
        for (long head = 0; head < num_heads; ++head, x += head_dim, y += head_dim) {
            for (long j = 0; j < half; ++j) {
                const float a = x[j], b = x[j + half], s = sin[j] * sign;
                y[j] = a * cos[j] - b * s;
                y[j + half] = b * cos[j] + a * s;
            }
        }
    }
}

EXPORT void swiglu(const float* gate, const float* up, float* y, int64_t count) {
    const auto op = [](V g, V u) { return mul(div(g, add(set1(1.0f), exp(sub(set1(0.0f), g)))), u); };
    long i = 0;
    for (; i + LANES <= count; i += LANES) store(y + i, op(load(gate + i), load(up + i)));
    if (i < count) store_part(y + i, count - i, op(load_part(gate + i, count - i), load_part(up + i, count - i)));
}

EXPORT int64_t write_kv(const float* k, const float* v, float* cache_k, float* cache_v, const int64_t* slots, int64_t num_tokens,
                        int64_t num_pages, int64_t num_kv_heads, int64_t head_dim) {
    for (long token = 0; token < num_tokens; ++token) {
        const long slot = slots[token];
        if (slot < 0 || slot >= num_pages * PAGE) return token;
        for (long head = 0; head < num_kv_heads; ++head, k += head_dim, v += head_dim) {
            store_key_value(k, v, cache_k, cache_v, slot / PAGE * num_kv_heads + head, slot % PAGE, head_dim);
        }
    }
    return -1;
}

EXPORT int64_t paged_attention(const float* q, const float* cache_k, const float* cache_v, const int32_t* block_table,
                               const int32_t* cu_seqlens_q, const int32_t* context_lens, float scale, float* out, int64_t num_tokens,
                               int64_t num_sequences, int64_t num_blocks, int64_t num_pages, int64_t num_heads, int64_t num_kv_heads,
                               int64_t head_dim, int64_t threads) {
    std::vector<Sequence> sequences;
    for (long s = 0; s < num_sequences; ++s) {
        const long queries = cu_seqlens_q[s + 1] - cu_seqlens_q[s], context = context_lens[s], pages = (context + PAGE - 1) / PAGE;
        const int32_t* table = block_table + s * num_blocks;
        const bool covers = (s > 0 || cu_seqlens_q[0] == 0) && (s + 1 < num_sequences || cu_seqlens_q[s + 1] == num_tokens);
        if (!covers || queries < 0 || cu_seqlens_q[s + 1] > num_tokens || queries > context || pages > num_blocks) return s;
        for (long b = 0; b < pages; ++b) {
            if (table[b] < 0 || table[b] >= num_pages) return s;
        }
        sequences.push_back({cache_k, cache_v, table, cu_seqlens_q[s], queries, context - queries});
    }
    attend_all(sequences, {q, out, nullptr, scale, num_heads, num_kv_heads, head_dim}, threads);
    return -1;
}

EXPORT int64_t packed_attention(const float* q, const float* k, const float* v, const int32_t* cu_seqlens, float scale, float* out,
                                float* lse, int64_t num_tokens, int64_t num_sequences, int64_t num_heads, int64_t num_kv_heads,
                                int64_t head_dim, int64_t threads) {
    if (cu_seqlens[0] != 0 || cu_seqlens[num_sequences] != num_tokens) return num_sequences;
    long pages = 0;
    for (long s = 0; s < num_sequences; ++s) {
        if (cu_seqlens[s + 1] < cu_seqlens[s]) return s;
        pages += (cu_seqlens[s + 1] - cu_seqlens[s] + PAGE - 1) / PAGE;
    }
    const long page_size = num_kv_heads * head_dim * PAGE;
    static thread_local std::vector<float> buffer;  // kept between calls: fresh memory costs a page fault every 4 KiB
    buffer.resize(std::max<size_t>(buffer.size(), 2 * pages * page_size));
    float *page_k = buffer.data(), *page_v = page_k + pages * page_size;
    std::vector<Sequence> sequences;
    for (long s = 0; s < num_sequences; ++s) {
        const long length = cu_seqlens[s + 1] - cu_seqlens[s];
        sequences.push_back({page_k, page_v, nullptr, cu_seqlens[s], length, 0});
        for (long token = 0; token < length; ++token) {
            for (long head = 0; head < num_kv_heads; ++head, k += head_dim, v += head_dim) {
                store_key_value(k, v, page_k, page_v, token / PAGE * num_kv_heads + head, token % PAGE, head_dim);
            }
        }
        page_k += (length + PAGE - 1) / PAGE * page_size, page_v += (length + PAGE - 1) / PAGE * page_size;
    }
    attend_all(sequences, {q, out, lse, scale, num_heads, num_kv_heads, head_dim}, threads);
    return -1;
}

// Scores `tokens` if `uniform` is null, else draws them.
EXPORT int64_t token_rows(const float* logits, int64_t num_rows, int64_t vocab, const float* temperature, const float* top_p,
                          const int64_t* top_k, const double* uniform, float* z_out, int64_t* tokens, float* logp, float* entropy,
                          int64_t threads) {
    int64_t bad = num_rows;
#pragma omp parallel for num_threads(threads) if (threads > 1 && num_rows > 1) reduction(min : bad)
    for (long row = 0; row < num_rows; ++row) {
        static thread_local TokenRow scratch;
        const Sampling sampling{temperature[row], top_p[row], top_k[row]};
        const double* noise = uniform ? uniform + row : nullptr;
        float* z = z_out ? z_out + row * vocab : nullptr;
        if (!token_row(logits + row * vocab, vocab, sampling, noise, z, scratch, tokens[row], logp[row], entropy[row])) {
            bad = std::min<int64_t>(bad, row);
        }
    }
    return bad < num_rows ? bad : -1;
}

// 53 bits of two Philox words as a float64 in [0, 1).
EXPORT void uniform(uint64_t seed, const int64_t* group, const int64_t* sample, const int64_t* position, double* out, int64_t count) {
    for (long i = 0; i < count; ++i) {
        uint32_t words[4] = {static_cast<uint32_t>(group[i]), static_cast<uint32_t>(group[i] >> 32), static_cast<uint32_t>(sample[i]),
                             static_cast<uint32_t>(position[i])};
        philox(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
        const uint64_t bits = (static_cast<uint64_t>(words[0] >> 5) << 26) | (words[1] >> 6);
        out[i] = static_cast<double>(bits) * 0x1p-53;
    }
}

// ---- mixture of experts

EXPORT void select_experts(const float* logits, const float* bias, int64_t* ids, int64_t num_tokens, int64_t num_experts, int64_t top_k,
                           int64_t sigmoid, int64_t num_groups, int64_t top_groups) {
    static thread_local RouterRow scratch;
    const Router router{bias, num_experts, top_k, num_groups, top_groups, sigmoid != 0};
    for (long t = 0; t < num_tokens; ++t) select_row(router, logits + t * num_experts, scratch, ids + t * top_k);
}

// weights[t][k] = the score of expert ids[t][k], divided by (their sum in slot order + 1e-20) if `normalise`, times scale.
EXPORT int64_t weigh_experts(const float* logits, const int64_t* ids, float* weights, int64_t num_tokens, int64_t num_experts,
                             int64_t top_k, int64_t sigmoid, int64_t normalise, float scale) {
    static thread_local RouterRow scratch;
    for (long t = 0; t < num_tokens; ++t, logits += num_experts, ids += top_k, weights += top_k) {
        score_row(logits, num_experts, sigmoid != 0, scratch.scores);
        float total = 0.0f;
        for (long k = 0; k < top_k; ++k) {
            if (ids[k] < 0 || ids[k] >= num_experts) return t;
            total += weights[k] = scratch.scores[ids[k]];
        }
        const float divisor = total + 1e-20f;
        for (long k = 0; k < top_k; ++k) weights[k] = (normalise ? weights[k] / divisor : weights[k]) * scale;
    }
    return -1;
}

EXPORT int64_t expert_order(const int64_t* ids, int64_t* order, int64_t* place, int32_t* offsets, int64_t num_rows, int64_t num_experts) {
    return order_by_expert(ids, order, place, offsets, num_rows, num_experts);
}

EXPORT void pack_experts(const float* weight, int64_t num_experts, int64_t num_out, int64_t num_in, float* panels, int64_t threads) {
    const long per_expert = (num_out + LANES - 1) / LANES * LANES * num_in;
    for (long e = 0; e < num_experts; ++e) pack(weight + e * num_out * num_in, num_out, num_in, panels + e * per_expert, threads);
}

EXPORT int64_t grouped_linear(const float* x, const float* weight, const float* panels, const int32_t* offsets, const int64_t* index,
                              float* y, int64_t num_inputs, int64_t num_rows, int64_t num_experts, int64_t num_out, int64_t num_in,
                              int64_t threads) {
    const Grouped problem{x, weight, panels, offsets, index, y, num_inputs, num_rows, num_experts, num_out, num_in};
    return grouped_linear_all(problem, threads);
}

// out[t] = sum over the slots of y[place[t][k]] * weights[t][k]: a product, then fused multiply-adds in slot order.
EXPORT int64_t combine(const float* y, const float* weights, const int64_t* place, float* out, int64_t num_tokens, int64_t top_k,
                       int64_t dim) {
    for (long t = 0; t < num_tokens; ++t, weights += top_k, place += top_k, out += dim) {
        for (long k = 0; k < top_k; ++k) {
            if (place[k] < 0 || place[k] >= num_tokens * top_k) return t;
        }
        for (long i = 0; i < dim; i += LANES) {
            const long width = std::min(LANES, dim - i);
            const auto part = [&](long k) {
                const float* row = y + place[k] * dim + i;
                return width == LANES ? load(row) : load_part(row, width);
            };
            V sum = mul(part(0), set1(weights[0]));
            for (long k = 1; k < top_k; ++k) sum = fma(part(k), set1(weights[k]), sum);
            width == LANES ? store(out + i, sum) : store_part(out + i, width, sum);
        }
    }
    return -1;
}
