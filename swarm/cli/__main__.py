"""`python -m swarm.cli`: the command without its installed script."""

from __future__ import annotations

import sys

from swarm.cli import main

if __name__ == "__main__":
    sys.exit(main())
