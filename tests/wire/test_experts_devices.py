"""Servers whose experts are on devices of their own: the same answers, no device work on the network thread,
and an orderly end when a device is lost.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import swarm
from averaging.optim.state.view import StateView
from moe.protocol.declarations import Directory
from moe.protocol.names import ExpertUid
from moe.server.checkpoints import ExpertCheckpoints, saved_names
from tests.moe.late_link import LateLink
from tests.wire.expert_pair import UID, expert, gated, network, pair, sgd, until

LOST = "CUDA error: device-side assert triggered"


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LateLink]]:
    """Give every device a link that fails when used on a thread other than the experts' own."""
    created: list[LateLink] = []

    def link_of(device: torch.device) -> LateLink:
        created.append(LateLink())
        return created[-1]

    monkeypatch.setattr("moe.server.expert_server.link_of", link_of)
    yield created
    assert created


@pytest.mark.parametrize("batch", [1, 9000])  # within a call, and in a stream
@pytest.mark.parametrize(
    "codecs",
    [
        swarm.WireCodecs(),
        swarm.WireCodecs(inputs="int8", outputs="float16", gradients="int8", input_gradients="int4"),
    ],
)
def test_a_server_with_a_link_answers_as_one_on_the_host(
    links: list[LateLink], batch: int, codecs: swarm.WireCodecs
) -> None:
    local = network()
    answers: list[list[torch.Tensor]] = []
    for linked in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not linked:
                patch.setattr("moe.server.expert_server.link_of", lambda device: None)
            with pair({"ffn.0": expert(copy.deepcopy(local), sgd)}, max_batch_size=10_000) as two:
                chance = torch.Generator().manual_seed(batch)
                x = torch.randn(batch, 16, generator=chance).requires_grad_()
                y = two.remote(codecs=codecs)(x)
                # with the inputs that the server has kept
                y.backward(torch.randn(batch, 16, generator=chance))
                assert x.grad is not None
                answers.append([y.detach(), x.grad, two.remote(codecs=codecs)(x).detach()])
                assert two.server.statistics().experts["ffn.0"].refusals == {}
                assert two.server.statistics().experts["ffn.0"].version == 1
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))
    assert len(links) == 1
    assert [name for name, _ in links[0].events].count("in") == 3


def test_each_device_computes_independently(links: list[LateLink]) -> None:
    """One expert is on another device of the same memory: while it computes, the other one answers."""
    module, slow = gated()
    slow.device = torch.device("cpu", 0)
    with pair({"ffn.0": slow, "ffn.1": expert(network())}) as two:
        assert len(links) == 2
        calls = two.calls

        async def beside() -> torch.Tensor:
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(
                    calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0)
                )
                await asyncio.get_running_loop().run_in_executor(None, module.entered.wait, 10.0)
                other = await calls.forward(
                    two.replica, ExpertUid.parse("ffn.1"), [torch.ones(2, 16)], timeout_s=10.0
                )
                assert not waiting.done()
                assert two.server.statistics().queued == 0
                module.open.set()
            return other.outputs[0]

        assert two.run(beside()).shape == (2, 16)
        statistics = two.server.statistics()
        assert statistics.samples_per_s > 0
        assert {name: one.counts.forward_samples for name, one in statistics.experts.items()} == {
            "ffn.0": 1,
            "ffn.1": 2,
        }


class Fragile(torch.nn.Module):
    """A module that loses its device on a negative index."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise RuntimeError(LOST)
        return x * self.weight


def saved_version(folder: Path, name: str) -> int:
    """Return the version of an expert in its newest checkpoint."""
    resumed = expert(Fragile() if name == "ffn.0" else network(), sgd)
    uid = ExpertUid.parse(name)
    assert ExpertCheckpoints(folder, {uid: resumed}).load() == [uid]
    return resumed.version


def test_a_lost_device_ends_the_server_and_keeps_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    fragile, sound = expert(Fragile(), sgd), expert(network(), sgd)
    sound.device = torch.device("cpu", 0)  # another device
    config = swarm.ExpertServerConfig(checkpoints=tmp_path)
    with pair({"ffn.0": fragile, "ffn.1": sound}, config=config) as two:
        remote = two.remote()
        remote(torch.ones(2, 16)).sum().backward()
        assert two.server.save() == 2
        good = saved_version(tmp_path, "ffn.0")
        remote(torch.ones(2, 16)).sum().backward()
        two.remote("ffn.1")(torch.ones(2, 16)).sum().backward()
        assert not two.server.ended.is_set()
        assert two.server.failed is None
        calls = two.calls

        async def lose() -> None:
            await calls.forward(two.replica, UID, [-torch.ones(1, 16)], timeout_s=10.0)

        with pytest.raises(
            (swarm.ExpertFailed, swarm.ExpertMissing),
            match="cannot be used any more until the server's process ends",
        ):
            two.run(lose())
        assert two.server.ended.wait(10.0)
        assert two.server.failed == f"cpu cannot be used any more until the server's process ends: {LOST}"

        async def found() -> Any:
            uids = [UID, ExpertUid.parse("ffn.1")]
            return await Directory(two.guest.dht.service).replicas(uids, timeout_s=5.0, max_age_s=0.0)

        assert not any(two.run(found()).values())
        with pytest.raises(swarm.ExpertMissing):
            two.run(calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=5.0))
    assert [str(uid) for uid in saved_names(tmp_path)] == ["ffn.0", "ffn.1"]
    assert saved_version(tmp_path, "ffn.0") == good == 1
    # the other device's was saved
    assert saved_version(tmp_path, "ffn.1") == 1


def test_requests_waiting_for_a_lost_device_get_a_reason() -> None:
    module, hosted = gated()

    def lost(x: torch.Tensor) -> torch.Tensor:
        module.entered.set()
        assert module.open.wait(10.0)
        raise RuntimeError(LOST)

    module.forward = lost  # type: ignore[method-assign]
    with pair({"ffn.0": hosted}) as two:
        calls = two.calls

        async def together() -> list[str]:
            async def ask() -> str:
                try:
                    await calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0)
                except (swarm.ExpertFailed, swarm.ExpertMissing) as error:
                    return str(error)
                return "an answer"

            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(ask())]
                await asyncio.get_running_loop().run_in_executor(None, module.entered.wait, 10.0)
                asked += [tasks.create_task(ask()) for _ in range(3)]
                await until(lambda: two.server.statistics().queued == 3)
                module.open.set()
            return [task.result() for task in asked]

        for said in two.run(together()):
            assert "cannot be used any more until the server's process ends" in said


def test_a_checkpoint_that_finds_the_device_lost_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = expert(network(), sgd)
    with pair({"ffn.0": hosted}, config=swarm.ExpertServerConfig(checkpoints=tmp_path)) as two:
        two.remote()(torch.ones(2, 16)).sum().backward()

        def lost() -> Any:
            raise RuntimeError(LOST)

        monkeypatch.setattr(StateView, "complete_copy", lambda view: lost())
        assert two.server.save() == 0
        assert two.server.ended.wait(10.0)
        assert two.server.failed is not None
    assert not list(tmp_path.iterdir())


def test_a_server_that_is_closed_has_ended_and_has_not_failed() -> None:
    with pair({"ffn.0": expert()}) as two:
        two.server.close()
        assert two.server.ended.is_set()
        assert two.server.failed is None
