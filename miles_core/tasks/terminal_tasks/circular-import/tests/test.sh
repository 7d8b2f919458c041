#!/bin/bash
set -euo pipefail
printf 'from shop.customer import Customer\n\nprint(Customer("Jane").order(7, ["a", "b"]))\n' | cmp - main.py
export PYTHONPATH=.
[ "$(python3 main.py)" = 'order 7: 2 items for Jane' ] || exit 1
[ "$(python3 -c 'from shop.order import Order; from shop.customer import Customer; print(Order(1, Customer("Al"), []))')" = 'order 1: 0 items for Al' ] || exit 1
[ "$(python3 -c 'import shop.order
try: shop.order.Order(1, "Al", [])
except TypeError as error: print(error)')" = 'an order needs a customer' ] || exit 1
