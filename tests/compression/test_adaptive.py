"""The choice by role and size is the same on all peers, and never takes too few bits for a small vector."""

from __future__ import annotations

import pytest

from swarm.compression import ADAPTIVE, Adaptive, find, names, resolve
from swarm.compression.adaptive import ROLES
from swarm.core.errors import UsageError


def test_the_role_decides_the_codec() -> None:
    chosen = {role: resolve(ADAPTIVE, role, 1_000_000).name for role in ROLES}
    assert chosen == {
        "gradient": "int8",
        "pseudo_gradient": "int4",
        "parameter": "float16",
        "statistic": "float32",
        "activation": "int8",
    }


def test_small_vectors_use_the_small_codec() -> None:
    assert [resolve(ADAPTIVE, "gradient", numel).name for numel in (0, 1, 1 << 14, (1 << 14) + 1)] == [
        "float16"
    ] * 3 + ["int8"]
    assert resolve(ADAPTIVE, "statistic", 10).name == "float32"  # never fewer bits than the role's
    assert Adaptive(small_elements_max=0).choose("gradient", 10).name == "int8"
    assert Adaptive(pseudo_gradient="topk", small="int8").choose("pseudo_gradient", 100).name == "int8"


def test_a_codecs_name_selects_it() -> None:
    for name in names():
        assert resolve(name, "gradient", 10) is find(name)


def test_unknown_roles_and_codecs_are_refused() -> None:
    with pytest.raises(UsageError, match="there is no codec 'zip'; there are bfloat16"):
        resolve("zip", "gradient", 10)
    with pytest.raises(UsageError, match="there is no codec 'zip'"):
        Adaptive(parameter="zip")
    with pytest.raises(UsageError, match="there is no role 'weights'; there is gradient"):
        resolve(ADAPTIVE, "weights", 10)
    with pytest.raises(UsageError, match="0 for none"):
        Adaptive(small_elements_max=-1)
