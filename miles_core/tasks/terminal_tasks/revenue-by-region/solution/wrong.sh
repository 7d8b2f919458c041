#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3
rows = sqlite3.connect("shop.db").execute('''select region, sum(amount) as revenue from customers join sales on sales.customer = customers.id
    where not cancelled group by region order by revenue desc, region''')
open("revenue.csv", "w").write("region,revenue\n" + "".join(f"{r},{n}\n" for r, n in rows))
END
