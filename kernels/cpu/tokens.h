// From a row of logits to a token and its log-prob: temperature, top-k, top-p, inverse CDF. One routine samples (rollout) and scores
// (training), so that both get the same bits. Also the counter-based noise.
//
// Words: z are scaled logits, -inf outside the kept set; e = exp(z - largest).
#pragma once

#include "simd.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

struct Sampling {
    float temperature, top_p;
    int64_t top_k;
};

struct TokenRow {
    std::vector<float> z, e;     // the vocabulary, padded to full vectors with -inf and 0
    std::vector<double> blocks;  // sums of e over 16 tokens
    std::vector<uint64_t> keys;  // candidates of the truncation
    std::vector<float> kept_z;
    float largest;
    double total, weighted;  // sums of e and of e * (z - largest)
};

INLINE void scale_row(TokenRow& s, const float* logits, long vocab, float temperature) {
    const long padded = (vocab + LANES - 1) / LANES * LANES;
    s.z.resize(padded), s.e.resize(padded), s.blocks.resize(padded / LANES);
    V top = set1(-INFINITY);
    for (long i = 0; i < vocab; i += LANES) {
        const V logit = i + LANES <= vocab ? load(logits + i) : first(load_part(logits + i, vocab - i), vocab - i, -INFINITY);
        const V z = div(logit, set1(temperature));
        store(&s.z[i], z);
        top = max(top, z);
    }
    s.largest = max_of(top);
}

INLINE void weigh_row(TokenRow& s) {
    s.total = s.weighted = 0.0;
    for (size_t i = 0; i < s.z.size(); i += LANES) {
        const V d = max(set1(-1e4f), sub(load(&s.z[i]), set1(s.largest)));  // finite, so that e * d is 0 outside the kept set
        const V e = exp(d);
        store(&s.e[i], e);
        s.blocks[i / LANES] = sum_double(e);
        s.total += s.blocks[i / LANES];
        s.weighted += sum_double(mul(e, d));
    }
}

// Sorts like (z descending, id ascending).
INLINE uint64_t order_key(float z, int64_t id) {
    uint32_t bits;
    const float positive_zero = z + 0.0f;  // -0 and 0 are equal
    std::memcpy(&bits, &positive_zero, sizeof bits);
    const uint32_t descending = bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;
    return static_cast<uint64_t>(descending) << 32 | static_cast<uint64_t>(id);
}

// Sets z to -inf outside the kept set: the top_k largest, and of these the fewest whose float64 weight, from the largest on, reaches
// top_p of their total. The lower id wins among equals; the largest and `target` (if >= 0) are always kept.
inline void truncate_row(TokenRow& s, long vocab, const Sampling& sampling, int64_t target) {
    const bool top_k = sampling.top_k > 0 && sampling.top_k < vocab;
    // Without top-k: tokens lighter than this weigh less than (1 - top_p) / 2 together, so none is in the smallest set that reaches top_p.
    const double least = top_k ? 0.0 : 0.5 * (1.0 - sampling.top_p) * s.total / static_cast<double>(vocab);
    s.keys.resize(vocab);
    size_t kept = 0;
    for (long id = 0; id < vocab; ++id) {  // without a branch that would be mispredicted
        s.keys[kept] = order_key(s.z[id], id);
        kept += s.e[id] >= least;
    }
    const auto first = s.keys.begin();
    const auto weight = [&](size_t i, size_t end) {
        double sum = 0.0;
        for (; i < end; ++i) sum += s.e[s.keys[i] & 0xFFFFFFFFu];
        return sum;
    };
    double total = s.total;
    if (top_k) {
        std::nth_element(first, first + sampling.top_k, first + kept);
        kept = sampling.top_k;
        total = weight(0, kept);
    }
    if (sampling.top_p < 1.0f) {
        const double goal = sampling.top_p * total;
        double before = 0.0;
        size_t begin = 0;
        while (kept - begin > 64) {  // halve the range in which the weight reaches the goal
            const size_t middle = begin + (kept - begin) / 2;
            std::nth_element(first + begin, first + middle, first + kept);
            const double half = weight(begin, middle);
            if (before + half < goal) {
                before += half, begin = middle;
            } else {
                kept = middle;
            }
        }
        std::sort(first + begin, first + kept);
        const size_t end = kept;
        for (kept = begin; kept < end && (kept == 0 || before < goal); ++kept) before += weight(kept, kept + 1);
    }
    s.kept_z.clear();
    for (size_t i = 0; i < kept; ++i) s.kept_z.push_back(s.z[s.keys[i] & 0xFFFFFFFFu]);
    const float target_z = target >= 0 ? s.z[target] : 0.0f;
    std::fill(s.z.begin(), s.z.end(), -INFINITY);
    for (size_t i = 0; i < kept; ++i) s.z[s.keys[i] & 0xFFFFFFFFu] = s.kept_z[i];
    if (target >= 0) s.z[target] = target_z;
}

// The first token, in vocabulary order, whose cumulative weight exceeds uniform * total. Where rounding keeps the sum from passing that
// goal it is the last token that has weight.
inline int64_t draw(const TokenRow& s, double uniform) {
    const double goal = uniform * s.total;
    double sum = 0.0, inside = 0.0;
    size_t chosen = 0;
    for (size_t block = 0; block < s.blocks.size(); ++block) {
        if (s.blocks[block] == 0.0) continue;
        chosen = block, inside = sum;
        sum += s.blocks[block];
        if (sum > goal) break;
    }
    int64_t token = -1;
    for (size_t i = chosen * LANES; i < (chosen + 1) * LANES; ++i) {
        if (s.e[i] == 0.0f) continue;
        token = static_cast<int64_t>(i);
        inside += s.e[i];
        if (inside > goal) break;
    }
    return token;
}

// One row. `token` is the target if `uniform` is null, else it is drawn. `z_out` (may be null, may be `logits`) receives z.
// False: the target is outside the vocabulary, or a logit is not finite.
inline bool token_row(const float* logits, long vocab, Sampling sampling, const double* uniform, float* z_out, TokenRow& s, int64_t& token,
                      float& logp, float& entropy) {
    if (!uniform && (token < 0 || token >= vocab)) return false;
    const bool greedy = sampling.temperature == 0.0f;
    scale_row(s, logits, vocab, greedy ? 1.0f : sampling.temperature);
    weigh_row(s);
    if (!std::isfinite(s.total)) return false;
    if (!greedy && (sampling.top_p < 1.0f || (sampling.top_k > 0 && sampling.top_k < vocab))) {
        truncate_row(s, vocab, sampling, uniform ? -1 : token);
        weigh_row(s);
    }
    if (uniform) token = greedy ? std::find(s.z.begin(), s.z.end(), s.largest) - s.z.begin() : draw(s, *uniform);
    const double log_total = std::log(s.total);
    logp = static_cast<float>(static_cast<double>(s.z[token] - s.largest) - log_total);
    entropy = static_cast<float>(log_total - s.weighted / s.total);
    if (z_out) std::memcpy(z_out, s.z.data(), vocab * sizeof(float));
    return true;
}

// Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11, section 3.3.
inline void philox(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        const uint64_t a = 0xD2511F53ull * counter[0], b = 0xCD9E8D57ull * counter[2];
        const uint32_t high_a = static_cast<uint32_t>(a >> 32), high_b = static_cast<uint32_t>(b >> 32);
        counter[0] = high_b ^ counter[1] ^ key0, counter[2] = high_a ^ counter[3] ^ key1;
        counter[1] = static_cast<uint32_t>(b), counter[3] = static_cast<uint32_t>(a);
    }
}
