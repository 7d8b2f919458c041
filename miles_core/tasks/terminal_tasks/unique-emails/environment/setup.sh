#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3
db = sqlite3.connect("shop.db")
db.executescript('''
create table users(id integer primary key, email text not null, name text);
insert into users values (3,'jane@x.org','Jane'),(1,'Jane@X.org','J'),(2,'bob@x.org','Bob'),(7,'BOB@x.org','B'),(5,'eve@x.org','Eve'),(9,'eve@y.org','Eve');
''')
db.commit()
END
