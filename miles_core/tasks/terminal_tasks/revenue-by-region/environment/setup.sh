#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3
db = sqlite3.connect("shop.db")
db.executescript('''
create table customers(id integer primary key, name text, region text);
create table sales(id integer primary key, customer integer, amount integer, cancelled integer);
insert into customers values (1,'a','north'),(2,'b','south'),(3,'c','east'),(4,'d','north'),(5,'e','west');
insert into sales values (1,1,50,0),(2,1,25,1),(3,2,90,0),(4,4,40,0),(5,2,10,null),(6,5,10,1),(7,99,500,0);
''')
db.commit()
END
