#!/bin/bash
set -euo pipefail
mkdir -p src/lib
printf 'int count = 0;\nint counter, recount;\nvoid count_all(int *count) { *count += count2; }\n' > src/a.c
printf 'extern int count;\n#define MAX(count) ((count) + 1)\n' > src/lib/b.h
printf 'puts("the count is"); printf("%%d", count);\n' > src/lib/b.c
printf 'count the files\n' > src/notes.txt
