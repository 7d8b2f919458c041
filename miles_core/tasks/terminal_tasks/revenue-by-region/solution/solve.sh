#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3
rows = sqlite3.connect("shop.db").execute('''select region, coalesce(sum(case when coalesce(cancelled, 0) = 0 then amount end), 0) as revenue
    from customers left join sales on sales.customer = customers.id group by region order by revenue desc, region''')
open("revenue.csv", "w").write("region,revenue\n" + "".join(f"{r},{n}\n" for r, n in rows))
END
