"""Records of gRPC about callers of a node: which of them are logged."""

from __future__ import annotations

import logging

import pytest
from grpc._cython import cygrpc

import swarm.net.server  # noqa: F401 - it sets the filter

LOGGER = logging.getLogger("grpc._cython.cygrpc")


@pytest.mark.parametrize(("error", "is_logged"), [(cygrpc.ExecuteBatchError("x"), False), (OSError(), True)])
def test_a_caller_that_went_away_leaves_no_stack_trace(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        raise error
    except Exception:
        LOGGER.exception("%s raised in core by servicer method", type(error).__name__)
    assert bool(caplog.records) is is_logged
