#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3
db = sqlite3.connect("shop.db")
rows = db.execute("select id, email, name from users order by id").fetchall()
assert rows == [(1, "Jane@X.org", "J"), (2, "bob@x.org", "Bob"), (5, "eve@x.org", "Eve"), (9, "eve@y.org", "Eve")], rows
for email in ("bob@x.org", "EVE@x.ORG"):
    try:
        db.execute("insert into users(email, name) values (?, 'x')", (email,))
    except sqlite3.IntegrityError:
        continue
    raise AssertionError(email)
db.execute("insert into users(email, name) values ('new@x.org', 'x')")
END
