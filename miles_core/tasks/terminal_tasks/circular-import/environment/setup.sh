#!/bin/bash
set -euo pipefail
mkdir shop && : > shop/__init__.py
cat > shop/customer.py <<'END'
from shop.order import Order


class Customer:
    def __init__(self, name):
        self.name = name

    def order(self, number, items):
        return Order(number, self, items)
END
cat > shop/order.py <<'END'
from shop.customer import Customer


class Order:
    def __init__(self, number, customer, items):
        if not isinstance(customer, Customer):
            raise TypeError("an order needs a customer")
        self.number, self.customer, self.items = number, customer, items

    def __str__(self):
        return f"order {self.number}: {len(self.items)} items for {self.customer.name}"
END
printf 'from shop.customer import Customer\n\nprint(Customer("Jane").order(7, ["a", "b"]))\n' > main.py
