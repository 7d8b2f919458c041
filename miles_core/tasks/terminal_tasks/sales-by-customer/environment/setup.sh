#!/bin/bash
set -euo pipefail
cat > orders.csv <<'END'
id,customer,quantity,price
1,"Miller, Jane",2,19.99
2,Okafor,1,100.00
3,"Miller, Jane",1,0.02
4,"O""Neil",3,3.335
5,Okafor,-1,40.50
6,Zhou,10,0.1
END
