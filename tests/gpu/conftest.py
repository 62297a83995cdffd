"""Fixtures of the checks on a GPU: the device, the sizes, and a place for figures.

They run with `SWARM_GPU=1` (`make gpu`), where a missing device is a failure. With `SWARM_GPU_DEVICE=cpu` the
same bodies run on the host at small sizes and without bounds on time and memory. Otherwise all of them are
skipped.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.cuda.companion import LOCAL
from benchmarks.cuda.device import DEVICE_VARIABLE, Figure
from benchmarks.cuda.model import TINY, Size
from swarm.node import Node

# a file to which figures and outcomes are appended, a JSON object a line
FIGURES_VARIABLE = "SWARM_GPU_FIGURES"
# small sizes on a GPU, too: under compute-sanitizer everything is a hundred times slower
SMALL_VARIABLE = "SWARM_GPU_SMALL"


def _append(record: dict[str, object]) -> None:
    path = os.environ.get(FIGURES_VARIABLE)
    if path:
        # one write a line: several processes append to it
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.environ.get("SWARM_GPU") != "1" and DEVICE_VARIABLE not in os.environ:
        pytest.skip(
            "checks on a GPU run with `make gpu`, or with SWARM_GPU=1; on the host with SWARM_GPU_DEVICE=cpu"
        )
    name = os.environ.get(DEVICE_VARIABLE, "cuda")
    if name != "cpu" and not torch.cuda.is_available():
        pytest.fail(
            f"no CUDA device: torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees none",
            pytrace=False,
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid.startswith("tests/gpu/") and (report.when == "call" or report.outcome != "passed"):
        why = (
            report.longrepr[2]
            if report.skipped and isinstance(report.longrepr, tuple)
            else str(report.longrepr or "")
        )
        _append(
            {
                "test": report.nodeid,
                "outcome": report.outcome,
                "seconds": round(report.duration, 2),
                "why": why[-600:],
            }
        )


@pytest.fixture
def device() -> torch.device:
    """The device that is checked."""
    name = torch.device(os.environ.get(DEVICE_VARIABLE, "cuda"))
    return torch.device("cuda", name.index or 0) if name.type == "cuda" else name


@pytest.fixture
def small(device: torch.device) -> bool:
    """Return whether sizes are small and figures are not held to their bounds."""
    return device.type == "cpu" or os.environ.get(SMALL_VARIABLE) == "1"


@pytest.fixture
def size(small: bool) -> Size:
    """Return the sizes of the transformer, the state and the expert."""
    return TINY if small else Size()


@pytest.fixture
def figure(request: pytest.FixtureRequest, small: bool) -> Figure:
    """`figure(name, value, unit, at_most=…, at_least=…)`: keep a figure, and hold it to its bounds where the
    sizes are real.
    """

    def keep(
        name: str, value: float, unit: str, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        bounds = {
            key: bound for key, bound in (("at_most", at_most), ("at_least", at_least)) if bound is not None
        }
        _append(
            {
                "figure": name,
                "value": float(f"{value:.4g}"),
                "unit": unit,
                **bounds,
                "test": request.node.nodeid,
            }
        )
        if small:
            return
        assert at_most is None or value <= at_most, f"{name}: {value:.4g} {unit}, more than {at_most:g}"
        assert at_least is None or value >= at_least, f"{name}: {value:.4g} {unit}, less than {at_least:g}"

    return keep


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two nodes of this process on loopback that know each other."""
    with (
        Node(listen="127.0.0.1:0", config=LOCAL) as first,
        Node(bootstrap=first.addresses, listen="127.0.0.1:0", config=LOCAL) as second,
    ):
        yield [first, second]


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """Each test begins with an empty device, whatever the one before left."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
