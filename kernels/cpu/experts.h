// Rows in the order of their experts, and a linear layer with a weight for each expert: every row gets the bits that linear.h gives it with
// its expert's weight.
//
// Legend: M rows (one for each slot of a token), N outputs, K inputs, E experts. The rows of expert e are [offsets[e], offsets[e + 1]).
#pragma once

#include "linear.h"

#include <algorithm>
#include <cstdint>
#include <vector>

// Counting sort, stable: order[m] is the slot of sorted row m, place its inverse. -1, or the first slot whose id is no expert.
inline int64_t order_by_expert(const int64_t* ids, int64_t* order, int64_t* place, int32_t* offsets, long num_rows, long num_experts) {
    std::fill(offsets, offsets + num_experts + 1, 0);
    for (long m = 0; m < num_rows; ++m) {
        if (ids[m] < 0 || ids[m] >= num_experts) return m;
        ++offsets[ids[m] + 1];
    }
    for (long e = 0; e < num_experts; ++e) offsets[e + 1] += offsets[e];
    for (long m = 0; m < num_rows; ++m) order[place[m] = offsets[ids[m]]++] = m;
    for (long e = num_experts; e > 0; --e) offsets[e] = offsets[e - 1];  // each had moved on to the next expert's start
    offsets[0] = 0;
    return -1;
}

struct Grouped {
    const float *x, *weight, *panels;  // weight [E, N, K] is read if `panels` is null
    const int32_t* offsets;
    const int64_t* index;  // row of x for each sorted row; null: they are the same
    float* y;
    long num_inputs, num_rows, num_experts, num_out, num_in;
};

constexpr long WAVE_INPUTS = 1 << 20;  // inputs that are cut into runs before the threads start on them

// A group of panels of one expert's weight, times a block of the expert's rows.
struct GroupedItem {
    Linear linear;
    long first_row, count, runs, group;  // `runs`: where the rows' inputs begin in the buffer
};

// -1, or the first sorted row that belongs to no expert or to no row of x.
inline int64_t first_misplaced(const Grouped& p) {
    if (p.offsets[0] != 0) return 0;
    for (long e = 0; e < p.num_experts; ++e) {
        if (p.offsets[e + 1] < p.offsets[e] || p.offsets[e + 1] > p.num_rows) return p.offsets[e];
    }
    if (p.offsets[p.num_experts] != p.num_rows) return p.offsets[p.num_experts];
    for (long m = 0; p.index && m < p.num_rows; ++m) {
        if (p.index[m] < 0 || p.index[m] >= p.num_inputs) return m;
    }
    return -1;
}

inline void run_wave(const Grouped& p, const std::vector<GroupedItem>& items, const float* runs, long rows, long threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && rows * p.num_out * p.num_in > MIN_PARALLEL_WORK)
    for (size_t i = 0; i < items.size(); ++i) {
        const GroupedItem& item = items[i];
        linear_group(item.linear, {runs + item.runs, p.y + item.first_row * p.num_out, item.count}, item.group);
    }
}

inline int64_t grouped_linear_all(const Grouped& p, long threads) {
    const int64_t misplaced = first_misplaced(p);
    if (misplaced >= 0) return misplaced;
    static thread_local std::vector<float> runs;
    static thread_local std::vector<GroupedItem> items;
    const long all_panels = (p.num_out + LANES - 1) / LANES, wave_rows = std::max<long>(1, WAVE_INPUTS / p.num_in);
    long used = 0, rows = 0;  // of this wave: floats in `runs`, rows
    items.clear();
    for (long e = 0; e < p.num_experts; ++e) {
        const LinearPlan plan = plan_linear(p.offsets[e + 1] - p.offsets[e], p.num_out, p.num_in);
        const float* panels = p.panels ? p.panels + e * all_panels * LANES * p.num_in : nullptr;
        const Linear linear{p.weight + e * p.num_out * p.num_in, panels, nullptr, p.num_out, p.num_in, plan};
        for (long row = p.offsets[e]; row < p.offsets[e + 1]; row += plan.block) {
            const long count = std::min<long>(plan.block, p.offsets[e + 1] - row);
            runs.resize(std::max<size_t>(runs.size(), used + runs_size(count, p.num_in)));
            cut_into_runs(p.index ? p.x : p.x + row * p.num_in, p.index ? p.index + row : nullptr, count, p.num_in, &runs[used]);
            for (long g = 0; g * plan.panels < all_panels; ++g) items.push_back({linear, row, count, used, g});
            used += runs_size(count, p.num_in), rows += count;
            if (rows >= wave_rows) {
                run_wave(p, items, runs.data(), rows, threads);
                items.clear(), used = rows = 0;
            }
        }
    }
    run_wave(p, items, runs.data(), rows, threads);
    return -1;
}
