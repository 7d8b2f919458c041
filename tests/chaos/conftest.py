"""chaos.py puts the folders of its helpers on the path; pytest imports this first."""

import chaos  # noqa: F401
