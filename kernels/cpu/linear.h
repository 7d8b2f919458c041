// Linear layer: y = x W^T + bias, every output a fixed sequence of chains of fused multiply-adds over k.
//
// The weight is read in panels of 16 outputs, [panel][k][16]: packed once (decode), or block by block on the way (training).
// Legend: M rows, N outputs, K inputs.
#pragma once

#include "simd.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr long RUN = 192;               // terms of one chain
constexpr long BLOCK_INPUTS = 1 << 18;  // inputs of the rows that are multiplied in one pass over the weight
constexpr int MAX_ROWS = 6;
// A single row only waits for memory, which gives more to a core that reads from many places at once.
constexpr int panels_for(int rows) { return rows == 1 ? std::min(REGISTERS / 2, 12) : columns_for(rows); }
constexpr int MAX_PANELS = panels_for(1);
constexpr long MIN_PARALLEL_WORK = 1 << 18;  // multiply-adds; below it a second thread costs more than it gives

// K cut into chains: one up to 192, two halves below 384, then 192 each and the rest (close to what MKL does on AVX2).
inline long run_length(long num_in, long start) {
    const long half = num_in > RUN && num_in < 2 * RUN ? (num_in + 1) / 2 : RUN;
    return std::min(half, num_in - start);
}

// One register tile over one run: y[r][c] = (first run ? bias or 0 : y[r][c]) + chain.
template <int R, int C>
void linear_tile(const float* a, const float* b, long panel_stride, long run, const float* bias, bool first_run, float* y, long num_out,
                 long columns) {
    V acc[R][C];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) acc[r][c] = set1(0.0f);
    chain<R, C>(a, RUN, b, LANES, panel_stride, run, acc);
    if (columns >= C * LANES) {
        UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) {
            float* out = y + r * num_out + c * LANES;
            const float* before = first_run ? bias ? bias + c * LANES : nullptr : out;
            store(out, before ? add(load(before), acc[r][c]) : acc[r][c]);
        }
        return;
    }
    for (int c = 0; c < C; ++c) {
        const long width = std::min(LANES, columns - c * LANES);
        for (int r = 0; r < R; ++r) {
            float* out = y + r * num_out + c * LANES;
            const float* before = first_run ? bias ? bias + c * LANES : nullptr : out;
            store_part(out, width, before ? add(load_part(before, width), acc[r][c]) : acc[r][c]);
        }
    }
}

using LinearTile = void (*)(const float*, const float*, long, long, const float*, bool, float*, long, long);

template <int R, int C = panels_for(R)>
constexpr LinearTile linear_tile_for(int panels) {
    if constexpr (C > 1) {
        if (panels < C) return linear_tile_for<R, C - 1>(panels);
    }
    return linear_tile<R, C>;
}
constexpr LinearTile (*LINEAR_TILES[MAX_ROWS + 1])(int) = {
    nullptr, linear_tile_for<1>, linear_tile_for<2>, linear_tile_for<3>, linear_tile_for<4>, linear_tile_for<5>, linear_tile_for<6>};

// out[k][j] = weight[n0 + j][k] for 16 rows, zeros past the last.
inline void pack_panel(const float* weight, long num_out, long num_in, long n0, long k0, long terms, float* out) {
    const long rows = std::min(LANES, num_out - n0);
    const float* w = weight + n0 * num_in + k0;
    long k = 0;
#if !defined(SCALAR)  // sixteen rows, transposed eight columns at a time
    for (; rows == LANES && k + 8 <= terms; k += 8) {
        for (int half = 0; half < 2; ++half) {
            __m256 t[8], u[8];
            UNROLL for (int i = 0; i < 8; ++i) t[i] = _mm256_loadu_ps(w + (half * 8 + i) * num_in + k);
            UNROLL for (int i = 0; i < 4; ++i) {
                u[2 * i] = _mm256_unpacklo_ps(t[2 * i], t[2 * i + 1]);
                u[2 * i + 1] = _mm256_unpackhi_ps(t[2 * i], t[2 * i + 1]);
            }
            UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; ++j) {
                t[i + 2 * j] = _mm256_shuffle_ps(u[i + j], u[i + j + 2], 0x44);
                t[i + 2 * j + 1] = _mm256_shuffle_ps(u[i + j], u[i + j + 2], 0xEE);
            }
            UNROLL for (int i = 0; i < 4; ++i) {
                _mm256_storeu_ps(out + (k + i) * LANES + half * 8, _mm256_permute2f128_ps(t[i], t[i + 4], 0x20));
                _mm256_storeu_ps(out + (k + i + 4) * LANES + half * 8, _mm256_permute2f128_ps(t[i], t[i + 4], 0x31));
            }
        }
    }
#endif
    for (; k < terms; ++k) {
        for (long j = 0; j < LANES; ++j) out[k * LANES + j] = j < rows ? w[j * num_in + k] : 0.0f;
    }
}

struct LinearPlan {
    int rows, panels;  // the largest register tile
    long block;        // rows that share one pass over the weight, few enough that their inputs stay in the second-level cache
};

struct Linear {
    const float *weight, *panels, *bias;  // weight [N, K] is read if `panels` is null; bias may be null
    long num_out, num_in;
    LinearPlan plan;
};

// Rows of x cut into runs, [run][rows][RUN], and where their outputs go.
struct LinearRows {
    const float* runs;
    float* y;
    long count;
};

// Decides the speed only.
inline LinearPlan plan_linear(long num_rows, long num_out, long num_in) {
    const int rows = static_cast<int>(std::min<long>(num_rows, MAX_ROWS));
    const long panels = std::min<long>(panels_for(rows), (num_out + LANES - 1) / LANES);
    return {rows, static_cast<int>(panels), std::max<long>(4, BLOCK_INPUTS / num_in / MAX_ROWS) * MAX_ROWS};
}

// Floats that the runs of this many rows take.
inline long runs_size(long rows, long num_in) { return (num_in / RUN + 2) * rows * RUN; }

// `index` (may be null) says which rows of x are meant.
inline void cut_into_runs(const float* x, const int64_t* index, long rows, long num_in, float* out) {
    for (long k0 = 0; k0 < num_in; k0 += run_length(num_in, k0)) {
        for (long row = 0; row < rows; ++row, out += RUN) {
            std::memcpy(out, x + (index ? index[row] : row) * num_in + k0, run_length(num_in, k0) * sizeof(float));
        }
    }
}

// The g-th group of panels, whose outputs start at column g * panels * 16.
inline void linear_group(const Linear& p, const LinearRows& x, long g) {
    alignas(64) float scratch[MAX_PANELS * RUN * LANES];
    const long panel = g * p.plan.panels, column = panel * LANES, tiles = (x.count + p.plan.rows - 1) / p.plan.rows;
    const int count = static_cast<int>(std::min<long>(p.plan.panels, (p.num_out + LANES - 1) / LANES - panel));
    const float *a = x.runs, *bias = p.bias ? p.bias + column : nullptr;
    for (long k0 = 0, run; k0 < p.num_in; k0 += run) {
        run = run_length(p.num_in, k0);
        for (int c = 0; c < count && !p.panels; ++c) {
            pack_panel(p.weight, p.num_out, p.num_in, column + c * LANES, k0, run, scratch + c * RUN * LANES);
        }
        const float* b = p.panels ? p.panels + (panel * p.num_in + k0) * LANES : scratch;
        const long panel_stride = (p.panels ? p.num_in : RUN) * LANES;
        float* y = x.y + column;
        for (long tile = 0, row = 0; tile < tiles; ++tile) {
            const long rows = (x.count - row) / (tiles - tile);
            LINEAR_TILES[rows](count)(a, b, panel_stride, run, bias, k0 == 0, y, p.num_out, p.num_out - column);
            row += rows, a += rows * RUN, y += rows * p.num_out;
        }
    }
}
