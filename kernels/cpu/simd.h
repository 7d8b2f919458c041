// Sixteen floats and the few operations that the kernels use, the same bits with AVX-512 (one register), AVX2 (two) and plain C++ (an array;
// -DSCALAR, several times slower: it is the specification, and what a port to another processor starts from).
// Anything that adds across lanes fixes the order, and anything that ends before a full vector works on a copy padded to one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#if !defined(SCALAR)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#if defined(SCALAR)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

constexpr long LANES = 16;

#if defined(SCALAR)

struct V {
    float x[LANES];
};
template <class F>
INLINE V each(F f) {
    V v;
    for (long i = 0; i < LANES; ++i) v.x[i] = f(i);
    return v;
}
INLINE V set1(float a) { return each([&](long) { return a; }); }
INLINE V load(const float* p) { return each([&](long i) { return p[i]; }); }
INLINE void store(float* p, V a) { std::memcpy(p, a.x, sizeof a.x); }
INLINE V add(V a, V b) { return each([&](long i) { return a.x[i] + b.x[i]; }); }
INLINE V sub(V a, V b) { return each([&](long i) { return a.x[i] - b.x[i]; }); }
INLINE V mul(V a, V b) { return each([&](long i) { return a.x[i] * b.x[i]; }); }
INLINE V div(V a, V b) { return each([&](long i) { return a.x[i] / b.x[i]; }); }
INLINE V fma(V a, V b, V c) { return each([&](long i) { return std::fma(a.x[i], b.x[i], c.x[i]); }); }
INLINE V max(V a, V b) { return each([&](long i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }  // b where either is NaN
INLINE V min(V a, V b) { return each([&](long i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; }); }
INLINE V zero_below(V x, float limit, V a) { return each([&](long i) { return x.x[i] < limit ? 0.0f : a.x[i]; }); }
INLINE V first(V a, long n, float rest) { return each([&](long i) { return i < n ? a.x[i] : rest; }); }  // lanes below n, else `rest`
INLINE V scale_by_power_of_2(V a, V n) { return each([&](long i) { return std::ldexp(a.x[i], static_cast<int>(n.x[i])); }); }
INLINE V load8(const float* p) { return each([&](long i) { return i < 8 ? p[i] : 0.0f; }); }

#elif defined(__AVX512F__)

struct V {
    __m512 x;
};
INLINE V set1(float a) { return {_mm512_set1_ps(a)}; }
INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.x); }
INLINE V add(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
INLINE V div(V a, V b) { return {_mm512_div_ps(a.x, b.x)}; }
INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
INLINE V max(V a, V b) { return {_mm512_max_ps(a.x, b.x)}; }  // b where either is NaN
INLINE V min(V a, V b) { return {_mm512_min_ps(a.x, b.x)}; }
INLINE V zero_below(V x, float limit, V a) {  // x < limit ? 0 : a
    return {_mm512_mask_mov_ps(a.x, _mm512_cmp_ps_mask(x.x, _mm512_set1_ps(limit), _CMP_LT_OQ), _mm512_setzero_ps())};
}
INLINE V first(V a, long n, float rest) {  // lanes below n, `rest` in the others
    return {_mm512_mask_mov_ps(_mm512_set1_ps(rest), n >= 16 ? 0xFFFF : n <= 0 ? 0 : (1 << n) - 1, a.x)};
}
INLINE V scale_by_power_of_2(V a, V n) { return {_mm512_scalef_ps(a.x, n.x)}; }
INLINE __m256 low(V a) { return _mm512_castps512_ps256(a.x); }
INLINE __m256 high(V a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.x), 1)); }
INLINE V load8(const float* p) { return {_mm512_maskz_loadu_ps(0xFF, p)}; }

#else

struct V {
    __m256 lo, hi;
};
INLINE V set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, V a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
INLINE V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
INLINE V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
INLINE V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
INLINE V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
INLINE V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }  // b where either is NaN
INLINE V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
INLINE V zero_below(V x, float limit, V a) {  // x < limit ? 0 : a
    const __m256 l = _mm256_set1_ps(limit);
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, l, _CMP_LT_OQ), a.lo), _mm256_andnot_ps(_mm256_cmp_ps(x.hi, l, _CMP_LT_OQ), a.hi)};
}
INLINE V first(V a, long n, float rest) {  // lanes below n, `rest` in the others
    const __m256 lane = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), r = _mm256_set1_ps(rest);
    const __m256 keep_lo = _mm256_cmp_ps(lane, _mm256_set1_ps(static_cast<float>(n)), _CMP_LT_OQ);
    const __m256 keep_hi = _mm256_cmp_ps(lane, _mm256_set1_ps(static_cast<float>(n - 8)), _CMP_LT_OQ);
    return {_mm256_blendv_ps(r, a.lo, keep_lo), _mm256_blendv_ps(r, a.hi, keep_hi)};
}
INLINE __m256 scale_half(__m256 a, __m256 n) {  // in two steps, because 2^128 is not a float
    const __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1), rest = _mm256_sub_epi32(i, half);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256 p = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const __m256 q = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(a, p), q);
}
INLINE V scale_by_power_of_2(V a, V n) { return {scale_half(a.lo, n.lo), scale_half(a.hi, n.hi)}; }
INLINE __m256 low(V a) { return a.lo; }
INLINE __m256 high(V a) { return a.hi; }
INLINE V load8(const float* p) { return {_mm256_loadu_ps(p), _mm256_setzero_ps()}; }

#endif

INLINE V load_part(const float* p, long n) {  // n < 16 floats, then zeros
    alignas(64) float buffer[LANES] = {};
    std::memcpy(buffer, p, n * sizeof(float));
    return load(buffer);
}
INLINE void store_part(float* p, long n, V a) {
    alignas(64) float buffer[LANES];
    store(buffer, a);
    std::memcpy(p, buffer, n * sizeof(float));
}

// Across lanes: i with i + 8, then i + 4, i + 2, i + 1.
#if defined(SCALAR)
template <class T>
INLINE T fold(const V& a, T (*op)(T, T)) {
    T t[LANES];
    for (long i = 0; i < LANES; ++i) t[i] = a.x[i];
    for (long half = LANES / 2; half > 0; half /= 2) {
        for (long i = 0; i < half; ++i) t[i] = op(t[i], t[i + half]);
    }
    return t[0];
}
INLINE float sum(V a) { return fold<float>(a, [](float x, float y) { return x + y; }); }
INLINE float max_of(V a) { return fold<float>(a, [](float x, float y) { return x > y ? x : y; }); }
INLINE double sum_double(V a) { return fold<double>(a, [](double x, double y) { return x + y; }); }
#else
INLINE float sum(V a) {
    const __m256 b = _mm256_add_ps(low(a), high(a));
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
INLINE float max_of(V a) {
    const __m256 b = _mm256_max_ps(low(a), high(a));
    const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
INLINE __m256d widen(__m256 a, int half) {
    return _mm256_cvtps_pd(half ? _mm256_extractf128_ps(a, 1) : _mm256_castps256_ps128(a));
}
INLINE double sum_double(V a) {
    const __m256d b = _mm256_add_pd(widen(low(a), 0), widen(high(a), 0)), c = _mm256_add_pd(widen(low(a), 1), widen(high(a), 1));
    const __m256d d = _mm256_add_pd(b, c);
    const __m128d e = _mm_add_pd(_mm256_castpd256_pd128(d), _mm256_extractf128_pd(d, 1));
    return _mm_cvtsd_f64(_mm_add_sd(e, _mm_unpackhi_pd(e, e)));
}
#endif

// e^x within 2 ulp: x = n ln 2 + r, Taylor to degree 7 on |r| <= ln 2 / 2 (remainder 5e-9). exp(0) is 1. Results that would be subnormal
// are 0, so that flush-to-zero modes change nothing. NaN stays NaN.
INLINE V exp(V x) {
    const V shift = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const V a = min(set1(89.0f), x);
    const V n = sub(fma(a, set1(1.44269504f), shift), shift);
    const V r = fma(n, set1(1.90465421e-9f), fma(n, set1(-0.693147182f), a));  // ln 2 in two parts
    V p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return zero_below(x, -87.3365f, scale_by_power_of_2(p, n));
}

// ---- the register tile that linear and attention share

#if defined(__AVX512F__) && !defined(SCALAR)
constexpr int REGISTERS = 31;  // vectors of 16 floats, one kept for the broadcast
#else
constexpr int REGISTERS = 7;
#endif

// The columns of a tile of this many rows that fit in registers: a sum for each output, and one row of b.
constexpr int columns_for(int rows) { return std::min(REGISTERS / (rows + 1), 4); }

// acc[r][c] += sum over k of a[r][k] * b[k][c], one chain of fused multiply-adds in order of k. Only the first 8 lanes of b if HALF.
template <int R, int C, bool HALF = false>
INLINE void chain(const float* a, long a_stride, const float* b, long b_stride, long column_stride, long terms, V (&acc)[R][C]) {
    for (long k = 0; k < terms; ++k) {
        V w[C];
        UNROLL for (int c = 0; c < C; ++c) w[c] = HALF ? load8(b + k * b_stride) : load(b + k * b_stride + c * column_stride);
        UNROLL for (int r = 0; r < R; ++r) {
            const V x = set1(a[r * a_stride + k]);
            UNROLL for (int c = 0; c < C; ++c) acc[r][c] = fma(x, w[c], acc[r][c]);
        }
    }
}
