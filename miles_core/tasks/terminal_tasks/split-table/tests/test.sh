#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3
db = sqlite3.connect("shop.db")
assert [row[1] for row in db.execute("pragma table_info(books)")] == ["id", "title", "author_id"]
assert [row[1] for row in db.execute("pragma table_info(authors)")] == ["id", "name"]
assert sorted(db.execute("select name from authors")) == [("Austen",), ("Joyce",)]
rows = db.execute("select b.id, title, name, author_id is null from books b left join authors a on a.id = author_id order by b.id").fetchall()
expected = [(10, "Emma", "Austen", 0), (11, "Persuasion", "Austen", 0), (12, "Beowulf", None, 1), (13, "Ulysses", "Joyce", 0), (14, "Dubliners", "Joyce", 0)]
assert rows == expected, rows
keys = db.execute("pragma foreign_key_list(books)").fetchall()
assert [(k[2], k[3]) for k in keys] == [("authors", "author_id")], keys
db.execute("pragma foreign_keys = on")
try:
    db.execute("insert into books values (99, 'x', 12345)")
except sqlite3.IntegrityError:
    raise SystemExit(0)
raise AssertionError("no foreign key")
END
