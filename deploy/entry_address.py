"""Print the address of an entry point from the JSON lines of `swarm bootstrap --json`. Exit with 1 while
there is none.

python entry_address.py FILE [HOST]        HOST replaces the address's own
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def entry_address(lines: str, host: str | None = None) -> str | None:
    """Return the first address that other machines can call; None if there is none yet."""
    for line in lines.splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        outer = [one for one in event.get("addresses", ()) if "/127.0.0.1/" not in one]
        if event.get("event") == "listening" and outer:
            address = str(outer[0])
            return address if host is None else re.sub(r"^/[^/]+/[^/]+/", f"/dns/{host}/", address)
    return None


def main(path: Path, host: str | None = None) -> int:
    address = entry_address(path.read_text(encoding="utf-8"), host) if path.exists() else None
    if address is not None:
        print(address)
    return int(address is None)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
