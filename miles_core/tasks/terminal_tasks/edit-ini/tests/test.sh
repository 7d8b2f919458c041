#!/bin/bash
set -euo pipefail
python3 - <<'END'
import configparser, re
text = open("service.ini").read()
read = configparser.ConfigParser(inline_comment_prefixes=(";",))
read.read_string(text)
assert read["web"] == read["web"] and dict(read["web"]) == {"host": "0.0.0.0", "port": "9090"}, dict(read["web"])
assert dict(read["queue"]) == {"size": "5", "timeout": "30"} and read["log"]["port"] == "8080" and read["admin"]["port"] == "8000"
kept = ["# ports below 1024 need root", "[admin]", "port = 8000", "[web]", "; port = 1", "host = 0.0.0.0", "[queue]", "size = 5", "[log]", "port = 8080"]
lines = [line for line in text.splitlines() if line and not re.match(r"(port\s*=\s*9090|timeout\s*=)", line)]
assert lines == kept, lines
assert text.count("\n\n") == 3
END
