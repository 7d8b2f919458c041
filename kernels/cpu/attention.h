// Causal attention over pages of 64 keys with an online softmax: one routine for decode, prefill and the packed training forward.
//
// Legend: N query heads, K key/value heads, G = N / K, H head dim.
#pragma once

#include "simd.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

constexpr long PAGE = 64;
constexpr int TILE = 6;   // query rows of a register tile
constexpr int TILES = 8;  // register tiles that share a page while it is in the first-level cache

struct Sequence {
    const float *k, *v;    // pages: [pages, K, H, PAGE] and [pages, K, PAGE, H]
    const int32_t* table;  // page of every 64 positions in order; null: they follow each other
    long first_token, num_queries, first_position;
};

struct Attention {
    const float* q;
    float *out, *lse;  // lse [T, N] may be null
    float scale;
    long num_heads, num_kv_heads, head_dim;
};

struct AttendScratch {
    std::vector<float> q, o;
    float top[TILE * TILES], total[TILE * TILES];
};

// Scores of R rows against C vectors of keys: s[r][j] = q[r] . k[j], a chain over the head dim.
template <int R, int C>
INLINE void scores(const float* q, long stride, const float* k, long head_dim, float* s) {
    V acc[R][C];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) acc[r][c] = set1(0.0f);
    chain<R, C>(q, stride, k, PAGE, LANES, head_dim, acc);
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) store(s + r * PAGE + c * LANES, acc[r][c]);
}

// One step of the online softmax for R rows: s becomes the weights of the first valid[r] keys (exactly 0 for the others), alpha the factor
// for what was accumulated before. A row with no valid key is left as it was: the factor is 1 and the weights 0.
template <int R>
INLINE void softmax_step(float* s, const long* valid, float* top, float* total, float* alpha) {
    alignas(64) float drop[LANES] = {};
    UNROLL for (int r = 0; r < R; ++r) {
        V x[4];
        UNROLL for (int c = 0; c < 4; ++c) {
            x[c] = load(s + r * PAGE + c * LANES);
            if (valid[r] < PAGE) store(s + r * PAGE + c * LANES, x[c] = first(x[c], valid[r] - c * LANES, -INFINITY));
        }
        const float new_top = std::max(top[r], max_of(max(max(x[0], x[1]), max(x[2], x[3]))));
        drop[r] = top[r] - new_top;
        top[r] = new_top;
    }
    store(alpha, exp(load(drop)));
    UNROLL for (int r = 0; r < R; ++r) {
        V x[4];
        UNROLL for (int c = 0; c < 4; ++c) {
            x[c] = exp(sub(load(s + r * PAGE + c * LANES), set1(top[r])));
            store(s + r * PAGE + c * LANES, x[c]);
        }
        total[r] = total[r] * alpha[r] + sum(add(add(x[0], x[1]), add(x[2], x[3])));
    }
}

// o[r] = o[r] * alpha[r] + sum over the first `keys` of p[r][j] * v[j], for C vectors of the head dim.
template <int R, int C, bool HALF>
INLINE void values(const float* p, const float* v, long head_dim, long keys, const float* alpha, float* o, long stride) {
    V acc[R][C];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) acc[r][c] = mul(load(o + r * stride + c * LANES), set1(alpha[r]));
    chain<R, C, HALF>(p, PAGE, v, head_dim, LANES, keys, acc);
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) store(o + r * stride + c * LANES, acc[r][c]);
}

template <int R>
INLINE void values_of_rows(const float* p, const float* v, long head_dim, long keys, const float* alpha, float* o, long stride) {
    constexpr int C = columns_for(R);
    long h = 0;
    for (; h + C * LANES <= head_dim; h += C * LANES) values<R, C, false>(p, v + h, head_dim, keys, alpha, o + h, stride);
    for (; h + LANES <= head_dim; h += LANES) values<R, 1, false>(p, v + h, head_dim, keys, alpha, o + h, stride);
    if (h < head_dim) values<R, 1, true>(p, v + h, head_dim, keys, alpha, o + h, stride);
}

// R rows against one page. valid[r] keys are at or before row r's position; keys past it are never multiplied.
template <int R>
void attend_tile(const float* q, float* o, float* top, float* total, long stride, const float* k, const float* v, long head_dim,
                 const long* valid) {
    alignas(64) float s[TILE * PAGE], alpha[LANES];
    constexpr float one[1] = {1.0f};
    const long seen = *std::max_element(valid, valid + R);  // no score is computed far past it
    constexpr int C = columns_for(R);
    long j = 0;
    for (; j + C * LANES <= seen; j += C * LANES) scores<R, C>(q, stride, k + j, head_dim, s + j);
    for (; j < seen; j += LANES) scores<R, 1>(q, stride, k + j, head_dim, s + j);
    softmax_step<R>(s, valid, top, total, alpha);
    const long common = *std::min_element(valid, valid + R);
    values_of_rows<R>(s, v, head_dim, common, alpha, o, stride);
    for (int r = 0; r < R; ++r) {
        const long rest = valid[r] - common;
        if (rest > 0) values_of_rows<1>(s + r * PAGE + common, v + common * head_dim, head_dim, rest, one, o + r * stride, stride);
    }
}

using AttendTile = void (*)(const float*, float*, float*, float*, long, const float*, const float*, long, const long*);
constexpr AttendTile ATTEND_TILES[TILE + 1] = {nullptr,        attend_tile<1>, attend_tile<2>, attend_tile<3>,
                                               attend_tile<4>, attend_tile<5>, attend_tile<6>};

// Rows [row0, row1), at most TILE * TILES, of one sequence and key/value head. Row r is token r / G, head r % G of the group.
inline void attend(const Attention& p, const Sequence& sequence, long kv_head, long row0, long row1, AttendScratch& scratch) {
    const long head_dim = p.head_dim, count = row1 - row0, group = p.num_heads / p.num_kv_heads;
    const long stride = (head_dim + LANES - 1) / LANES * LANES + LANES;  // not a power of two: rows spread over the cache's sets
    long position[TILE * TILES], output[TILE * TILES];  // of each row: in the sequence, and in q, out and lse
    scratch.q.resize(count * stride);
    scratch.o.assign(count * stride, 0.0f);
    for (long r = 0; r < count; ++r) {
        const long token = (row0 + r) / group, head = (row0 + r) % group;
        position[r] = sequence.first_position + token;
        output[r] = (sequence.first_token + token) * p.num_heads + kv_head * group + head;
        const float* q = p.q + output[r] * head_dim;
        for (long h = 0; h < head_dim; ++h) scratch.q[r * stride + h] = q[h] * p.scale;
        scratch.top[r] = -INFINITY, scratch.total[r] = 0.0f;
    }
    for (long start = 0, last = sequence.first_position + (row1 - 1) / group; start <= last; start += PAGE) {
        const long page = ((sequence.table ? sequence.table[start / PAGE] : start / PAGE) * p.num_kv_heads + kv_head) * head_dim * PAGE;
        for (long r = 0; r < count; r += TILE) {
            const long tile = std::min<long>(TILE, count - r);
            if (position[r + tile - 1] < start) continue;
            long valid[TILE];
            for (long i = 0; i < tile; ++i) valid[i] = std::clamp(position[r + i] + 1 - start, 0L, PAGE);
            ATTEND_TILES[tile](&scratch.q[r * stride], &scratch.o[r * stride], scratch.top + r, scratch.total + r, stride,
                               sequence.k + page, sequence.v + page, head_dim, valid);
        }
    }
    for (long r = 0; r < count; ++r) {
        const float total = scratch.total[r];
        for (long h = 0; h < head_dim; ++h) p.out[output[r] * head_dim + h] = scratch.o[r * stride + h] / total;
        if (p.lse) p.lse[output[r]] = scratch.top[r] + static_cast<float>(std::log(static_cast<double>(total)));
    }
}

inline void attend_all(const std::vector<Sequence>& sequences, const Attention& problem, long threads) {
    struct Item {
        const Sequence* sequence;
        long kv_head, row0, row1;
    };
    std::vector<Item> items;
    for (const Sequence& s : sequences) {
        const long rows = s.num_queries * (problem.num_heads / problem.num_kv_heads);
        for (long head = 0; head < problem.num_kv_heads; ++head) {
            for (long row = 0; row < rows; row += TILE * TILES) items.push_back({&s, head, row, std::min(row + TILE * TILES, rows)});
        }
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && items.size() > 1)
    for (size_t i = 0; i < items.size(); ++i) {
        static thread_local AttendScratch scratch;
        attend(problem, *items[i].sequence, items[i].kv_head, items[i].row0, items[i].row1, scratch);
    }
}

INLINE void store_key_value(const float* k, const float* v, float* cache_k, float* cache_v, long page, long offset, long head_dim) {
    for (long h = 0; h < head_dim; ++h) cache_k[(page * head_dim + h) * PAGE + offset] = k[h];
    std::memcpy(cache_v + (page * PAGE + offset) * head_dim, v, head_dim * sizeof(float));
}
