#!/bin/bash
set -euo pipefail
[ -d inbox ] && [ -z "$(ls -A inbox)" ] || exit 1
expected='gz/archive.tar.gz
jpg/PHOTO.JPG
jpg/photo.jpg
md/notes.md
md/x.Md
none/Makefile
none/README
txt/a.txt
txt/b.TXT
txt/two words.txt'
[ "$(cd sorted && find . -type f | sed 's|^\./||' | LC_ALL=C sort)" = "$expected" ] || exit 1
cd sorted
find . -type f | while IFS= read -r path; do [ "$(cat "$path")" = "content of ${path##*/}" ] || exit 1; done
