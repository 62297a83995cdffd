"""Few settings: a user of the library can set at most 40 things; each has a meaning, and none is hidden."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys

import pytest

import swarm
from averaging.config import RunAverager
from docs._ext.fields import fields_of
from swarm.core.errors import UsageError
from swarm.core.presets import LAN, LOCAL, WAN, Timings, timings_of

SETTINGS_MAX = 40
# what the library returns or a task describes, identities, and records of the DHT: nobody configures anything
# with them
VALUES = {
    swarm.Address,
    swarm.Contact,
    swarm.DownloadedExpert,
    swarm.Draw,
    RunAverager,
    swarm.Entry,
    swarm.FoundExpert,
    swarm.FoundReplica,
    swarm.Key,
    swarm.LoadResult,
    swarm.ManyAnswers,
    swarm.NamespaceRules,
    swarm.PassReport,
    swarm.PipelineReport,
    swarm.RoundResult,
    swarm.StepReport,
    swarm.StoreItem,
    swarm.StoreResult,
    swarm.TaskDescription,
}
EXPORTED = [value for name in swarm.__all__ if isinstance(value := getattr(swarm, name), type)]


def named_in(annotation: object, module: str) -> set[type]:
    """Return the dataclasses that an annotation, as text, names."""
    names = re.findall(r"[A-Za-z_]\w*", str(annotation))
    found = [getattr(sys.modules[module], name, getattr(swarm, name, None)) for name in names]
    return {one for one in found if isinstance(one, type) and dataclasses.is_dataclass(one)}


def settings() -> set[type]:
    """Return the classes that a user sets something with: the exported ones, those that constructors of
    exported classes take, and those within them.
    """
    found = {one for one in EXPORTED if dataclasses.is_dataclass(one)}
    for one in EXPORTED:
        if not dataclasses.is_dataclass(one) and not issubclass(one, BaseException):
            for parameter in inspect.signature(one.__init__).parameters.values():
                found |= named_in(parameter.annotation, one.__module__)
    found -= VALUES
    while True:
        inner = {
            two for one in found for field in fields_of(one) for two in named_in(field.type, one.__module__)
        }
        if inner <= found:
            return found
        found |= inner


def leaves() -> list[str]:
    """Return every setting as `Class.field`. A field that holds other settings is not one itself."""
    return [
        f"{one.__name__}.{field.name}"
        for one in sorted(settings(), key=lambda one: one.__name__)
        for field in fields_of(one)
        if not named_in(field.type, one.__module__)
    ]


def test_a_user_can_set_at_most_40_things() -> None:
    assert len(leaves()) <= SETTINGS_MAX, leaves()


def test_every_class_of_settings_is_a_public_name() -> None:
    assert settings() <= set(EXPORTED)


@pytest.mark.parametrize("one", [*sorted(settings(), key=lambda one: one.__name__), Timings])
def test_every_setting_says_what_it_means(one: type) -> None:
    assert [field.name for field in fields_of(one) if not field.meaning] == []


@pytest.mark.parametrize("time", [field.name for field in dataclasses.fields(Timings)])
def test_every_time_is_longest_on_the_internet(time: str) -> None:
    assert 0.0 < getattr(LOCAL, time) <= getattr(WAN, time)
    assert 0.0 < getattr(LAN, time) <= getattr(WAN, time)


def test_the_preset_of_a_node_reaches_its_services() -> None:
    with swarm.Node(listen=None, config=swarm.NodeConfig(preset="local")) as node:
        assert node.timings is LOCAL
        assert node.dht.service.timings is LOCAL
    with swarm.Node(listen=None) as node:
        assert node.timings is WAN


def test_an_unknown_preset_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError, match="local, lan, wan, not 'moon'"):
        timings_of("moon")  # type: ignore[arg-type]
