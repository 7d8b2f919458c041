#!/bin/bash
set -euo pipefail
cat > stats.py <<'END'
def mean(values):
    return sum(values) / len(values)


def median(values):
    values = sorted(values)
    if not values:
        raise ValueError("the median of no values")
    middle = len(values) // 2
    if len(values) % 2:
        return values[middle]
    return (values[middle - 1] + values[middle]) / 2
END
