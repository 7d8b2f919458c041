#!/bin/bash
set -euo pipefail
python3 - <<'END'
import csv, json
totals = {}
for row in csv.DictReader(open("orders.csv")):
    totals[row["customer"]] = totals.get(row["customer"], 0.0) + int(row["quantity"]) * float(row["price"])
json.dump({name: round(total, 2) for name, total in totals.items()}, open("totals.json", "w"))
END
