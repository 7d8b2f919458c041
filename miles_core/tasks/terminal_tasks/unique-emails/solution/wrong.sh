#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3
db = sqlite3.connect("shop.db")
db.execute("delete from users where id not in (select min(id) from users group by lower(email))")
db.execute("create unique index one_email on users(email)")
db.commit()
END
