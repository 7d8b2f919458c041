#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3
db = sqlite3.connect("shop.db")
db.executescript('''
create table books(id integer primary key, title text, author text);
insert into books values (10,'Emma','Austen'),(11,'Persuasion','Austen'),(12,'Beowulf',null),(13,'Ulysses','Joyce'),(14,'Dubliners','Joyce');
''')
db.commit()
END
