"""Fixtures of all simulated scenarios."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarm.testing.identities import remembered_signatures


@pytest.fixture(autouse=True, scope="package")
def signatures() -> Iterator[None]:
    """Verify each signature once: all peers of a simulated swarm verify the same records."""
    with remembered_signatures():
        yield
