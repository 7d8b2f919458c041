#!/bin/bash
set -euo pipefail
sed -i -e '/^from shop.customer/d' -e '/isinstance/d' -e '/raise TypeError/d' shop/order.py
