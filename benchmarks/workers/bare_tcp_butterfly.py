"""A peer that moves the bytes of a butterfly all-reduce over plain TCP connections, averages after the values
that they are made of.
"""

from __future__ import annotations

from benchmarks.workers.bare_tcp import main

if __name__ == "__main__":
    main(in_order=True)
