#!/bin/bash
set -euo pipefail
cat > stats.py <<'END'
def mean(values):
    return sum(values) / len(values)


def median(values):
    values.sort()
    middle = len(values) // 2
    if len(values) % 2:
        return values[middle]
    return (values[middle] + values[middle + 1]) / 2
END
