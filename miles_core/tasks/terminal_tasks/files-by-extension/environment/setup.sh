#!/bin/bash
set -euo pipefail
mkdir inbox && cd inbox
for name in a.txt b.TXT 'two words.txt' photo.jpg PHOTO.JPG archive.tar.gz README notes.md Makefile x.Md; do echo "content of $name" > "$name"; done
