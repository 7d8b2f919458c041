#!/bin/bash
set -euo pipefail
printf "b B b c-c a1a\nIt's\n" > /tmp/one; printf 'A x\n' > /tmp/two
[ "$(python3 wordcount.py --top 3 /tmp/one /tmp/two)" = "$(printf 'a\t3\nb\t3\nc\t2')" ] || exit 1
[ "$(python3 wordcount.py sample.txt --top 2)" = "$(printf 'the\t4\nand\t2')" ] || exit 1
for letter in a b c d e f g h i j k l; do echo $letter; done > /tmp/letters
[ "$(python3 wordcount.py /tmp/letters | wc -l)" = 10 ] || exit 1
code=0; output=$(python3 wordcount.py sample.txt /tmp/no-such-file 2> /tmp/message) || code=$?
[ "$code" = 2 ] && [ -z "$output" ] && [ -s /tmp/message ] || exit 1
