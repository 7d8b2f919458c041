#!/bin/bash
set -euo pipefail
printf 'int total = 0;\nint counter, recount;\nvoid count_all(int *total) { *total += count2; }\n' | cmp - src/a.c
printf 'extern int total;\n#define MAX(total) ((total) + 1)\n' | cmp - src/lib/b.h
printf 'puts("the count is"); printf("%%d", total);\n' | cmp - src/lib/b.c
printf 'count the files\n' | cmp - src/notes.txt
[ "$(find src -type f | wc -l)" = 4 ] || exit 1
