#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3
sqlite3.connect("shop.db").executescript('''
create table authors(id integer primary key, name text not null unique);
insert into authors(name) select distinct author from books where author is not null;
create table new(id integer primary key, title text, author_id integer references authors(id));
insert into new select b.id, title, a.id from books b left join authors a on a.name = author;
drop table books;
alter table new rename to books;
''')
END
