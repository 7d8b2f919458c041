#!/bin/bash
set -euo pipefail
mkdir -p site/public/img site/private/keys site/bin
echo x > site/index.html; echo x > site/public/img/a.png; echo x > site/private/keys/id; echo x > site/private/note.txt
printf '#!/bin/sh\n' | tee site/bin/run.sh site/private/keys/rotate.sh site/public/deploy.sh > /dev/null
chmod 777 site/public site/index.html; chmod 666 site/private/keys/id; chmod 600 site/public/img/a.png; chmod 500 site/private/keys
chmod 644 site/bin/run.sh; chmod 777 site/private
