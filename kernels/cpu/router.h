// From a row of router logits to the scores of all experts, and to the ids of the chosen ones.
//
// Legend: E experts, K slots, G groups of E / G experts that follow each other.
#pragma once

#include "simd.h"
#include "tokens.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

struct Router {
    const float* bias;  // [E], moves the choice and not the score; may be null
    long num_experts, top_k, num_groups, top_groups;
    bool sigmoid;
};

struct RouterRow {
    std::vector<float> scores;  // of all experts, padded to full vectors
    std::vector<uint64_t> keys, groups;
};

// The softmax over all experts, or the sigmoid of each.
inline void score_row(const float* logits, long num_experts, bool sigmoid, std::vector<float>& scores) {
    scores.resize((num_experts + LANES - 1) / LANES * LANES);
    V top = set1(-INFINITY), total = set1(0.0f);
    for (long i = 0; i < num_experts; i += LANES) {
        const long left = num_experts - i;
        const V z = left >= LANES ? load(logits + i) : first(load_part(logits + i, left), left, -INFINITY);
        store(&scores[i], sigmoid ? div(set1(1.0f), add(set1(1.0f), exp(sub(set1(0.0f), z)))) : z);
        top = max(top, z);
    }
    if (sigmoid) return;
    const V largest = set1(max_of(top));
    for (long i = 0; i < num_experts; i += LANES) {
        const V e = exp(sub(load(&scores[i]), largest));
        store(&scores[i], e);
        total = add(total, e);
    }
    const V divisor = set1(sum(total));
    for (long i = 0; i < num_experts; i += LANES) store(&scores[i], div(load(&scores[i]), divisor));
}

// What is not a number comes last, so that the ids stay distinct and inside whatever the logits are.
INLINE float or_least(float x) { return std::isnan(x) ? -INFINITY : x; }

// A group is worth the sum of its two largest choices. Leaves the keys of the experts of the best groups.
inline void keep_best_groups(const Router& r, RouterRow& s) {
    const long size = r.num_experts / r.num_groups;
    s.groups.clear(), s.keys.clear();
    for (long g = 0; g < r.num_groups; ++g) {
        float best = -INFINITY, second = -INFINITY;
        for (long e = g * size; e < (g + 1) * size; ++e) {
            second = std::max(second, std::min(best, s.scores[e]));
            best = std::max(best, s.scores[e]);
        }
        s.groups.push_back(order_key(or_least(best + second), g));
    }
    std::partial_sort(s.groups.begin(), s.groups.begin() + r.top_groups, s.groups.end());
    for (long i = 0; i < r.top_groups; ++i) {
        const long g = s.groups[i] & 0xFFFFFFFFu;
        for (long e = g * size; e < (g + 1) * size; ++e) s.keys.push_back(order_key(s.scores[e], e));
    }
}

inline void select_row(const Router& r, const float* logits, RouterRow& s, int64_t* ids) {
    score_row(logits, r.num_experts, r.sigmoid, s.scores);
    for (long e = 0; e < r.num_experts; ++e) s.scores[e] = or_least(r.bias ? s.scores[e] + r.bias[e] : s.scores[e]);
    if (r.num_groups > 1) {
        keep_best_groups(r, s);
    } else {
        s.keys.resize(r.num_experts);
        for (long e = 0; e < r.num_experts; ++e) s.keys[e] = order_key(s.scores[e], e);
    }
    std::partial_sort(s.keys.begin(), s.keys.begin() + r.top_k, s.keys.end());
    for (long k = 0; k < r.top_k; ++k) ids[k] = s.keys[k] & 0xFFFFFFFFu;
}
