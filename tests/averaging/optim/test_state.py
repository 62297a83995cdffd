"""The training state: averaging, snapshots, and the checks of a state that another peer sent."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.optim.state.encoding import encode_view
from averaging.optim.state.probe import probe, probe_shapes
from averaging.optim.state.snapshot import CHUNK_BYTES, chunk_digest, is_finite, merge, plain, snapshot_digest
from averaging.optim.state.training_state import TrainingState
from averaging.optim.state.view import StateView
from averaging.reduction.staging import Staging
from swarm.core.errors import PeerError, UsageError

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adam-fused": lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True),
    "adamw-fused-amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True, amsgrad=True),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "momentum-fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "momentum-foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "rprop": torch.optim.Rprop,
    "adadelta": torch.optim.Adadelta,
    "radam": torch.optim.RAdam,
    "adafactor": torch.optim.Adafactor,
}


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def made(seed: int, optimizer: str = "adamw", schedule: bool = True) -> tuple[torch.nn.Module, TrainingState]:
    net = model(seed)
    first, second = list(net[0].parameters()), list(net[1:].parameters())  # type: ignore[index]
    inner = OPTIMIZERS[optimizer]([{"params": first}, {"params": second, "lr": 0.05}])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(inner, [3, 5]) if schedule else None
    return net, TrainingState(inner, list(net.buffers()), scheduler)


def train(net: torch.nn.Module, state: TrainingState, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        state.inner.zero_grad()
        net(torch.randn(16, 4, generator=generator)).square().mean().backward()
        state.inner.step()
        if state.scheduler is not None:
            state.scheduler.step()
        state.epoch += 1


def weights(net: torch.nn.Module) -> list[torch.Tensor]:
    return [t.clone() for t in net.state_dict().values()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_state_trains_on_exactly_as_its_donor(optimizer: str) -> None:
    donor_net, donor = made(1, optimizer)
    train(donor_net, donor, 4)
    donor.agree_extras()
    snapshot = donor.snapshot()
    net, state = made(2, optimizer)
    before = weights(net)
    assert state.bytes_max() >= len(snapshot.blob)
    assert same(before, weights(net)), "looking at the structure must not move weights"
    state.load(snapshot.blob)
    assert state.epoch == 4
    assert state.snapshot().digest == snapshot.digest
    assert state.counters_digest() == donor.counters_digest()
    train(donor_net, donor, 3, seed=7)
    train(net, state, 3, seed=7)
    assert same(weights(net), weights(donor_net))
    donor.agree_extras()
    state.agree_extras()
    assert state.snapshot().digest == donor.snapshot().digest


def test_a_state_before_the_first_step_can_be_loaded() -> None:
    _, donor = made(1)
    net, state = made(2)
    train(net, state, 2)
    state.load(donor.snapshot().blob)
    assert not any(state.inner.state.values())
    assert state.snapshot().digest == donor.snapshot().digest


def test_buffers_are_served_as_last_agreed() -> None:
    net, state = made(1)
    before = state.snapshot().digest
    net(torch.randn(16, 4))
    assert state.snapshot().digest == before, "a forward pass moves this peer's own BatchNorm statistics only"
    state.agree_extras([[7], [3], [1, 2]])
    assert state.extra_counts() == [7]
    assert state.snapshot().digest != before


def test_averaged_tensors_have_the_same_layout_on_all_peers() -> None:
    one, two = made(1), made(2)
    train(*one, 1)
    train(*two, 3)
    shapes = [tuple(t.shape) for t in one[1].averaged_tensors()]
    assert shapes == [tuple(t.shape) for t in two[1].averaged_tensors()]
    # 6 parameters, three statistics of each (amsgrad), two floating buffers; no step counters
    assert len(shapes) == 6 * 4 + 2
    assert all(t.is_floating_point() and not t.requires_grad for t in one[1].averaged_tensors())


def test_the_digest_commits_to_every_chunk() -> None:
    p = torch.nn.Parameter(torch.randn(900_000))
    snapshot = TrainingState(torch.optim.SGD([p], lr=0.1)).snapshot()
    assert len(snapshot.chunk_digests) == 4
    assert b"".join(bytes(snapshot.chunk(i)) for i in range(4)) == bytes(snapshot.blob)
    assert [chunk_digest(snapshot.chunk(i)) for i in range(4)] == list(snapshot.chunk_digests)
    assert len(snapshot.chunk(0)) == CHUNK_BYTES
    other = (*snapshot.chunk_digests[:3], bytes(32))
    assert snapshot_digest(len(snapshot.blob), other) != snapshot.digest


def rewritten(blob: bytearray, change: Callable[[dict[str, Any]], None]) -> bytearray:
    (length,) = struct.unpack_from("<I", blob)
    header = msgpack.unpackb(blob[4 : 4 + length], strict_map_key=False)
    change(header)
    packed = msgpack.packb(header)
    tensors_at = -(-(4 + length) // 64) * 64
    padded = -(-(4 + len(packed)) // 64) * 64
    out = bytearray(padded)
    out[: 4 + len(packed)] = struct.pack("<I", len(packed)) + packed
    return out + blob[tensors_at:]


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "lacks": lambda h: h["tensors"].pop(0),
    "has a tensor": lambda h: h["tensors"][-1].__setitem__(0, "x.99"),
    "describes a tensor wrongly": lambda h: h["tensors"][0].__setitem__(1, "complex64"),
    "impossible shape": lambda h: h["tensors"][0].__setitem__(2, [-1, 4]),
    "dimension that is a bool": lambda h: h["tensors"][0].__setitem__(2, [True, 32]),
    "dtype that cannot be looked up": lambda h: h["tensors"][0].__setitem__(1, []),
    "strides that overflow": lambda h: h["tensors"][0].__setitem__(2, [0, *[200] * 15]),
    "ends before": lambda h: h["tensors"][0].__setitem__(2, [1 << 20, 4]),
    "is torch": lambda h: h["tensors"][0].__setitem__(2, [4, 8]),
    "another format": lambda h: h.__setitem__("epoch", -1),
    "describes no tensors": lambda h: h.__setitem__("tensors", {}),
    "number of parameter groups": lambda h: h["groups"].pop(),
}


@pytest.mark.parametrize("complaint", LIES)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(complaint: str) -> None:
    donor = made(1)
    train(*donor, 2)
    net, state = made(2)
    train(net, state, 1, seed=3)
    before, digest = weights(net), state.snapshot().digest
    with pytest.raises(PeerError, match="the state"):
        state.load(rewritten(donor[1].snapshot().blob, LIES[complaint]))
    assert same(before, weights(net))
    assert state.snapshot().digest == digest


def test_non_finite_numbers_are_refused() -> None:
    donor_net, donor = made(1)
    with torch.no_grad():
        donor_net[0].weight[0, 0] = float("nan")  # type: ignore[index, union-attr]
    with pytest.raises(PeerError, match="not finite"):
        made(2)[1].load(donor.snapshot().blob)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_damaged_blob_raises_peer_error_and_changes_nothing(data: st.DataObject) -> None:
    _, donor = made(1)
    blob = donor.snapshot().blob
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(blob), 900) - 1))
        blob[at] = data.draw(st.integers(0, 255))
    blob = blob[: data.draw(st.sampled_from([len(blob), len(blob) - 1, 100, 3, 0]))]
    _, state = made(2)
    before = state.snapshot().digest
    try:
        state.load(blob)
    except PeerError:
        assert state.snapshot().digest == before
    else:
        state.snapshot()  # what was damaged was a number, and it is a finite one


@pytest.mark.parametrize(
    "lie", [{"lr": 123.0, "weight_decay": 9.0}, {"lr": "much", "maximize": True, "new": 1}]
)
def test_hyperparameters_never_come_from_a_donor_and_the_schedule_follows_the_epoch(
    lie: dict[str, Any],
) -> None:
    donor_net, donor = made(1)
    train(donor_net, donor, 4)

    def forge(header: dict[str, Any]) -> None:
        header["groups"][0] |= lie
        header["schedule"] = {"last_epoch": 77, "milestones": 5, "_last_lr": [9.0, 9.0]}

    net, state = made(2)
    state.load(rewritten(donor.snapshot().blob, forge))
    for group, theirs in zip(state.inner.param_groups, donor.inner.param_groups, strict=True):
        assert group.keys() == theirs.keys()
        assert all(group[key] == theirs[key] for key in group if key != "params")
    assert state.scheduler is not None
    assert donor.scheduler is not None
    assert state.scheduler.state_dict() == donor.scheduler.state_dict()
    train(net, state, 4)


@pytest.mark.parametrize(("present", "epoch"), [(0, 4), (2, 4), (6, 4), (4, 0), (4, 4)])
def test_a_schedule_moves_forward_and_back_to_the_epoch_of_a_state(present: int, epoch: int) -> None:
    donor_net, donor = made(1)
    train(donor_net, donor, epoch)
    net, state = made(2)
    train(net, state, present)
    state.load(donor.snapshot().blob)
    rates = [[group["lr"] for group in one.inner.param_groups] for one in (state, donor)]
    assert rates[0] == rates[1]
    train(net, state, 3)
    train(donor_net, donor, 3)
    rates = [[group["lr"] for group in one.inner.param_groups] for one in (state, donor)]
    assert rates[0] == rates[1]


def test_a_state_of_an_epoch_that_no_schedule_reaches_is_refused_at_once() -> None:
    _, donor = made(1)
    blob = rewritten(donor.snapshot().blob, lambda header: header.update(epoch=1 << 40))
    _, state = made(2)
    with pytest.raises(PeerError, match="a schedule has at most"):
        state.load(blob)
    assert state.epoch == 0


def test_merging_keeps_our_structure() -> None:
    own = {"a": 1, "b": (1.0, 2.0), "c": {"d": torch.tensor(1.0)}, "e": None, "f": [1, 2]}
    assert merge(own, {"a": 2, "b": [3.0, "x"], "c": {"d": 4.0, "z": 1}, "e": 1, "f": [1, 2, 3]}, 0) == {
        "a": 2,
        "b": (3.0, 2.0),
        "c": {"d": torch.tensor(4.0)},
        "e": None,
        "f": [1, 2],
    }
    assert plain({"f": print, "t": torch.ones(2), "n": [1, (2.5, None)]}, 0) == {
        "f": None,
        "t": None,
        "n": [1, [2.5, None]],
    }


def test_bfloat16_frozen_and_scalar_parameters() -> None:
    def build(seed: int) -> TrainingState:
        torch.manual_seed(seed)
        ps = [
            torch.nn.Parameter(torch.randn(3).bfloat16()),
            torch.nn.Parameter(torch.randn(2), requires_grad=False),
            torch.nn.Parameter(torch.randn(())),
        ]
        return TrainingState(torch.optim.Adam(ps, lr=0.1))

    donor, state = build(1), build(2)
    for p in donor.parameters:
        p.grad = torch.ones_like(p) if p.requires_grad else None
    donor.inner.step()
    assert [tuple(t.shape) for t in donor.averaged_tensors()] == [(3,), (), (3,), (3,), (), ()]
    state.load(donor.snapshot().blob)
    assert state.snapshot().digest == donor.snapshot().digest


def test_the_frozen_digest_changes_exactly_when_a_frozen_parameter_does() -> None:
    def build(frozen: float) -> TrainingState:
        torch.manual_seed(0)
        ps = [
            torch.nn.Parameter(torch.full((4, 3), frozen).t(), requires_grad=False),
            torch.nn.Parameter(torch.randn(2)),
            torch.nn.Parameter(torch.full((3,), frozen).bfloat16(), requires_grad=False),
        ]
        return TrainingState(torch.optim.SGD(ps, lr=0.1))

    donor, state = build(1.0), build(2.0)
    assert donor.frozen_digest() == build(1.0).frozen_digest() != state.frozen_digest()
    state.load(donor.snapshot().blob)
    assert state.frozen_digest() == donor.frozen_digest()
    with torch.no_grad():
        state.parameters[1].add_(1.0)
        assert state.frozen_digest() == donor.frozen_digest()
        state.parameters[2][0] = 3.0
    assert state.frozen_digest() != donor.frozen_digest()
    trained = TrainingState(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
    assert trained.frozen_digest() == b""


@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
def test_encoded_states_of_equal_donors_are_equal(codec: str) -> None:
    def encoded(seed: int) -> StateView:
        return encode_view(donors[seed].view(), codec)

    donors = []
    for _ in range(2):
        net, state = made(1)
        train(net, state, 3)
        state.agree_extras()
        with torch.no_grad():
            state.parameters[0][0, 0] = 1e5  # more than float16 holds
        state.inner.state[state.parameters[1]]["exp_avg_sq"].fill_(1e-9)  # less than float16 holds
        donors.append(state)
    first, second = encoded(0), encoded(1)
    for view in (first, second):
        view.compute_digests()
    assert first.digest == second.digest != donors[0].snapshot().digest
    assert bytes(first.blob) == b"".join(first.chunk(index) for index in range(first.chunks))
    loader = made(2)[1]
    loader.load(first.blob, codec)
    assert loader.epoch == 3
    for own, theirs in zip(loader.averaged_tensors(), donors[0].averaged_tensors(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=2**-8, atol=1e-7)
    assert loader.inner.state[loader.parameters[1]]["exp_avg_sq"].min() > 0
    if codec == "float16":
        assert loader.parameters[0][0, 0] == 1e5
    other = made(2)[1]
    before = other.snapshot().digest
    for asked in {"float32", "float16", "bfloat16"} - {codec}:
        with pytest.raises(PeerError, match="is encoded by"):
            other.load(first.blob, asked)
    assert other.snapshot().digest == before


def test_an_optimizer_whose_state_is_not_tensors_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.LBFGS([p])
    inner.state[p]["old_dirs"] = []
    with pytest.raises(UsageError, match="only tensors and numbers"):
        TrainingState(inner).snapshot()


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_the_probe_without_memory_finds_what_a_step_makes(optimizer: str) -> None:
    _, state = made(1, optimizer)
    shapes = probe_shapes(state.inner, state.parameters)
    assert (shapes is None) == (optimizer == "adafactor"), "only what looks at values needs memory"
    stepped = probe(state.inner, state.parameters)
    for one, other in zip(shapes or stepped, stepped, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, torch.Tensor) and key == "step":
                assert torch.equal(one[key], value)
                assert (one[key].dtype, one[key].device) == (value.dtype, value.device)
            elif isinstance(value, torch.Tensor):
                assert one[key].is_meta or shapes is None
                assert (one[key].shape, one[key].dtype, one[key].stride()) == (
                    value.shape,
                    value.dtype,
                    value.stride(),
                )
            else:
                assert one[key] == value


@pytest.mark.parametrize(
    "flags", [{"fused": True}, {"capturable": True}, {"capturable": True, "amsgrad": True}]
)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_counters_are_found_beside_their_parameters_where_the_step_wants_them_there(
    kind: type[torch.optim.Adam], flags: dict[str, bool]
) -> None:
    """The meta device stands for one that is not the host."""
    parameters = [
        torch.nn.Parameter(torch.empty(30, 40, device="meta")),
        torch.nn.Parameter(torch.empty(3, dtype=torch.bfloat16)),
    ]
    lr = torch.tensor(0.1) if "capturable" in flags else 0.1
    shapes = probe_shapes(kind(parameters, lr=lr, **flags), parameters)  # type: ignore[arg-type]
    assert shapes is not None
    for p, statistics in zip(parameters, shapes, strict=True):
        assert (statistics["step"].device, statistics["step"].dtype, statistics["step"].dim()) == (
            p.device,
            torch.float32,
            0,
        )
        keys = {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if "amsgrad" in flags else set())
        assert statistics.keys() == keys
        assert all(
            (statistics[key].shape, statistics[key].dtype) == (p.shape, p.dtype) for key in keys - {"step"}
        )


def test_present_statistics_stay_when_others_are_missing() -> None:
    """A frozen layer was thawed: its parameters have no statistics yet, those of others are in the middle of
    their course.
    """
    net, state = made(1)
    train(net, state, 3)
    thawed = state.parameters[0]
    donor = state.snapshot()
    del state.inner.state[thawed]
    fourth = state.inner.state[state.parameters[1]]["step"].clone()
    assert state.bytes_max() >= len(donor.blob)
    assert torch.equal(state.structure()[1]["step"], fourth)
    assert state.structure()[0]["exp_avg"].is_meta
    state.load(donor.blob)
    assert state.snapshot().digest == donor.digest


def test_loading_without_memory_for_statistics_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = made(1)
    train(*donor, 2)
    net, state = made(2)
    before, digest = weights(net), state.snapshot().digest

    def full(*arguments: object, **options: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("averaging.optim.state.training_state.materialized", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        state.load(donor[1].snapshot().blob)
    assert same(before, weights(net))
    assert state.snapshot().digest == digest


class TestDTensor:
    @pytest.fixture
    def sharded(self) -> Iterator[torch.nn.Parameter]:
        distributed = pytest.importorskip("torch.distributed.tensor")
        device_mesh = pytest.importorskip("torch.distributed.device_mesh")
        fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
        torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
        try:
            mesh = device_mesh.init_device_mesh("cpu", (2,))
            yield torch.nn.Parameter(
                distributed.distribute_tensor(torch.ones(4, 4), mesh, [distributed.Shard(0)])
            )
        finally:
            torch.distributed.destroy_process_group()

    def test_sharded_parameters_are_refused_with_what_to_pass_instead(
        self, sharded: torch.nn.Parameter
    ) -> None:
        whole = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(UsageError, match=r"parameter 1 is a DTensor.*pass its whole tensors"):
            TrainingState(torch.optim.SGD([whole, sharded], lr=0.1))
        with pytest.raises(UsageError, match="extra tensor 0 is a DTensor"):
            TrainingState(torch.optim.SGD([whole], lr=0.1), [sharded])
        with pytest.raises(UsageError, match="tensor 1 is a DTensor"):
            Staging([torch.ones(3), sharded])


def test_counters_without_statistics_leave_none_without_memory() -> None:
    donor, state = made(1)[1], made(2)[1]
    for p in donor.parameters:
        donor.inner.state[p] = {"step": torch.tensor(3.0)}
    state.load(bytearray(donor.snapshot().blob))
    statistics = [value for held in state.inner.state.values() for value in held.values()]
    assert len(statistics) == 4 * len(state.parameters)
    assert not any(value.is_meta for value in statistics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, bad: float) -> None:
    for at in (0, 517, 998):
        values = torch.zeros(999, dtype=dtype)
        assert is_finite(values)
        values[at] = bad
        assert not is_finite(values)
    largest = torch.full((7,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(largest), "although the sum is not"
    largest[3] = bad
    assert not is_finite(largest)
    assert is_finite(torch.zeros(0, dtype=dtype))
    assert is_finite(torch.zeros(3, dtype=torch.int32))
