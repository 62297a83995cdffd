"""Experts compute like their module, learn like their optimizer, and survive errors of the module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging.optim.state.checkpoint import Checkpoints
from moe.protocol.names import ExpertUid
from moe.server.checkpoints import ExpertCheckpoints, saved_names
from moe.server.devices import DeviceFailed
from moe.server.expert import ComputationFailed, Expert
from swarm.core.errors import SwarmError, UsageError


def network(width: int = 6) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Tanh(), torch.nn.Linear(8, width))


def expert(module: torch.nn.Module | None = None, **options: Any) -> Expert:
    return Expert(module or network(), (torch.zeros(1, 6),), **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def passes(count: int, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (("x", number), [torch.randn(3, 6, generator=generator)], [torch.randn(3, 6, generator=generator)])
        for number in range(count)
    ]


def test_a_frozen_expert_is_its_module_bit_by_bit() -> None:
    module = network()
    frozen = expert(copy.deepcopy(module))
    (name, inputs, gradients) = passes(1)[0]
    x = inputs[0].clone().requires_grad_()
    y = module(x)
    y.backward(gradients[0])
    assert torch.equal(frozen.forward(inputs)[0], y)
    assert x.grad is not None
    found = frozen.backward([(name, inputs, gradients)])[0][0]
    assert found is not None
    assert torch.equal(found, x.grad)
    assert frozen.version == 0
    assert all(
        torch.equal(one, other)
        for one, other in zip(frozen.module.parameters(), module.parameters(), strict=True)
    )


def test_one_step_for_a_batch_of_passes_equals_the_modules_own() -> None:
    module = network()
    learning = expert(copy.deepcopy(module), optimizer=sgd, clip_norm=0.5)
    many = passes(3)
    found = learning.backward(many)
    x = torch.cat([inputs[0] for _, inputs, _ in many]).requires_grad_()
    module(x).backward(torch.cat([gradients[0] for _, _, gradients in many]))
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    sgd(module.parameters()).step()
    assert x.grad is not None
    assert torch.allclose(torch.cat([part for (part,) in found if part is not None]), x.grad, atol=1e-6)
    assert learning.version == 1
    assert learning.samples == 9
    assert all(
        torch.allclose(one, other, atol=1e-6)
        for one, other in zip(learning.module.parameters(), module.parameters(), strict=True)
    )


def test_kept_activations_give_the_same_gradients_and_are_bounded() -> None:
    keeping, refresh = expert(optimizer=sgd, keep_activations_bytes=4000), expert(optimizer=sgd)
    for name, inputs, gradients in passes(4):
        assert torch.equal(keeping.forward_keeping(name, inputs)[0], refresh.forward(inputs)[0])
        first, second = (
            keeping.backward([(name, inputs, gradients)]),
            refresh.backward([(name, inputs, gradients)]),
        )
        assert first[0][0] is not None
        assert second[0][0] is not None
        assert torch.allclose(first[0][0], second[0][0])
    for name, inputs, _ in passes(100, seed=1):
        keeping.forward_keeping(name, inputs)
    assert 0 < keeping._activations.size_bytes <= 4000
    keeping.backward(passes(1, seed=2))
    assert keeping._activations.take(("x", 99), keeping.version) is None  # a step was made in between


class Nested(torch.nn.Module):
    """A module with several inputs, integers among them, nested outputs, and one input that it ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"sum": self.table(ids) + more["used"], "parts": [ids + 1, 2 * more["used"]]}


def test_nested_and_integer_tensors_are_computed() -> None:
    module = Nested()
    learning = Expert(
        module,
        (torch.zeros(1, dtype=torch.int64), {"used": torch.zeros(1, 4), "ignored": torch.zeros(1)}),
        sgd,
    )
    assert str(learning.schema) == (
        "(int64(batch), {ignored: float32(batch), used: float32(batch, 4)}) -> "
        "{parts: [int64(batch), float32(batch, 4)], sum: float32(batch, 4)}"
    )
    ids, ignored, used = torch.tensor([1, 2]), torch.zeros(2), torch.ones(2, 4)
    parts_ids, parts_used, total = learning.forward([ids, ignored, used])
    assert torch.equal(parts_ids, ids + 1)
    assert torch.equal(parts_used, 2 * used)
    assert torch.equal(total, module.table(ids) + used)
    ((of_ignored, of_used),) = learning.backward([(None, [ids, ignored, used], [None, torch.ones(2, 4)])])
    assert of_ignored is None
    assert of_used is not None
    assert torch.equal(of_used, torch.ones(2, 4))
    assert learning.version == 1


class Moody(torch.nn.Module):
    """A module that raises, or returns NaN, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 13).any()):
            raise AssertionError("unlucky")
        return x[1:] if bool((x == 14).any()) else x * self.weight


@pytest.mark.parametrize(("value", "said"), [(13.0, "unlucky"), (14.0, "2 samples of 3")])
def test_an_error_of_the_module_is_reported_and_changes_nothing(value: float, said: str) -> None:
    moody = Expert(Moody(), (torch.zeros(2, 2),), sgd)
    with pytest.raises(ComputationFailed, match=said):
        moody.forward([torch.full((3, 2), value)])
    with pytest.raises(ComputationFailed, match=said):
        moody.backward([(None, [torch.full((3, 2), value)], [torch.ones(3, 2)])])
    assert moody.version == 0
    assert torch.equal(moody.module.weight, torch.ones(2))  # type: ignore[arg-type]
    assert torch.equal(moody.forward([torch.ones(3, 2)])[0], torch.ones(3, 2))


def test_gradients_that_overflow_are_not_applied() -> None:
    moody = Expert(Moody(), (torch.zeros(2, 2),), sgd)
    with pytest.raises(ComputationFailed, match="not finite"):
        moody.backward([(None, [torch.full((3, 2), 3e38)], [torch.full((3, 2), 3e38)])])
    assert torch.equal(moody.module.weight, torch.ones(2))  # type: ignore[arg-type]


def test_a_schedule_is_stepped() -> None:
    learning = expert(
        optimizer=sgd,
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    )
    for one in passes(3):
        learning.backward([one])
    assert learning.optimizer is not None
    assert learning.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(1, 6), (), (torch.zeros(0, 6),), (3,), (torch.zeros(1, 6), torch.zeros(2, 6))]
)
def test_wrong_sample_inputs_are_refused(wrong: Any) -> None:
    with pytest.raises((UsageError, TypeError)):
        Expert(network(), wrong)


def test_a_server_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    uid = ExpertUid.parse("ffn.3")
    adam = torch.optim.Adam
    first = expert(optimizer=adam)
    checkpoints = ExpertCheckpoints(tmp_path, {uid: first})
    assert checkpoints.load() == []
    first.backward(passes(1))
    assert checkpoints.save() == 1
    assert checkpoints.save() == 0  # nothing has changed
    second = expert(optimizer=adam)
    assert ExpertCheckpoints(tmp_path, {uid: second}).load() == [uid]
    for learning in (first, second):
        learning.backward(passes(1, seed=5))
    assert second.version == first.version == 2
    assert all(
        torch.equal(one, other)
        for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True)
    )
    assert saved_names(tmp_path) == [uid]


def newest(folder: Path, uid: ExpertUid) -> Path:
    """Return the newest checkpoint of an expert."""
    return Checkpoints(folder / str(uid)).newest_first()[0]


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", b"PK\x03\x04", None],
    ids=["empty", "nonsense", "zip", "one-bit"],
)
def test_a_damaged_checkpoint_costs_its_expert_one_generation_and_nothing_else(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, sound = ExpertUid.parse("ffn.3"), ExpertUid.parse("ffn.4")
    experts = {uid: expert(optimizer=torch.optim.Adam) for uid in (damaged, sound)}
    checkpoints = ExpertCheckpoints(tmp_path, experts)
    for seed in range(4):
        for one in experts.values():
            one.backward(passes(1, seed))
        assert checkpoints.save() == 2
    file = newest(tmp_path, damaged)
    raw = bytearray(file.read_bytes())
    raw[-20] ^= 1
    file.write_bytes(bytes(raw) if content is None else content)
    again = {uid: expert(optimizer=torch.optim.Adam) for uid in experts}
    assert ExpertCheckpoints(tmp_path, again).load() == [damaged, sound]
    assert [one.version for one in again.values()] == [3, 4]
    assert "a checkpoint of ffn.3 is left out" in caplog.text
    assert len(list((tmp_path / "ffn.3").glob("*.safetensors"))) == 2, "generations are bounded"


def test_a_state_that_is_not_finite_replaces_no_checkpoint(tmp_path: Path) -> None:
    uid, learning = ExpertUid.parse("ffn.3"), expert(optimizer=sgd)
    checkpoints = ExpertCheckpoints(tmp_path, {uid: learning})
    learning.backward(passes(1))
    assert checkpoints.save() == 1
    learning.backward(passes(1, seed=1))
    next(learning.module.parameters()).data[0] = float("nan")
    assert checkpoints.save() == 0
    assert ExpertCheckpoints(tmp_path, {uid: expert(optimizer=sgd)}).load() == [uid]


def test_an_interrupted_write_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid, learning = ExpertUid.parse("ffn.3"), expert(optimizer=sgd)
    checkpoints = ExpertCheckpoints(tmp_path, {uid: learning})
    checkpoints.save()
    learning.backward(passes(1))

    def fail(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("averaging.optim.state.checkpoint.save_file", fail)
    with pytest.raises(SwarmError, match="disk full"):
        checkpoints.save()
    monkeypatch.undo()
    assert len([path for path in (tmp_path / "ffn.3").iterdir() if path.is_file()]) == 1
    assert ExpertCheckpoints(tmp_path, {uid: expert(optimizer=sgd)}).load() == [uid]


@pytest.mark.parametrize(
    "optimizer",
    [sgd, torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)],
    ids=["sgd", "adam", "momentum"],
)
def test_a_step_that_would_not_be_finite_is_undone(optimizer: Any) -> None:
    """Regression: parameters became infinite, or Adam's second moment did, and stayed so."""
    hurt, spared = (expert(optimizer=optimizer) for _ in range(2))
    for one in (hurt, spared):
        one.backward(passes(1))
    assert hurt.optimizer is not None
    (group,) = hurt.optimizer.param_groups
    rate, group["lr"] = group["lr"], float("inf")
    with pytest.raises(ComputationFailed, match="so it was undone"):
        hurt.backward(passes(1, seed=1))
    group["lr"] = rate
    assert hurt.version == spared.version == 1
    for one in (hurt, spared):
        one.backward(passes(1, seed=2))
    assert all(
        torch.equal(one, other)
        for one, other in zip(hurt.module.parameters(), spared.module.parameters(), strict=True)
    )


def test_a_step_that_sixteen_bits_cannot_hold_is_undone() -> None:
    narrow = Expert(network().to(torch.float16), (torch.zeros(1, 6, dtype=torch.float16),), sgd)
    assert narrow.optimizer is not None
    narrow.optimizer.param_groups[0]["lr"] = 1e6
    before = [one.clone() for one in (*narrow.module.parameters(), *narrow.averaged_tensors())]
    x = torch.ones(4, 6, dtype=torch.float16)
    with pytest.raises(ComputationFailed, match="so it was undone"):
        narrow.backward([(None, [x], [x])])
    assert all(map(torch.equal, before, [*narrow.module.parameters(), *narrow.averaged_tensors()]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_experts_learn_as_float32_does(dtype: torch.dtype) -> None:
    """Regression: Adam destroyed float16 experts in the first step, and bfloat16 lost small steps."""

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-4)

    narrow = Expert(network().to(dtype), (torch.zeros(1, 6, dtype=dtype),), adam)
    exact = expert(optimizer=adam)
    losses = []
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(3))
    for _ in range(300):
        for one in (narrow, exact):
            (y,) = one.forward([x.to(one.schema.input_leaves[0].dtype)])
            losses.append(float((y.float() - x).square().mean()))
            one.backward([(None, [x.to(y.dtype)], [(2 * (y.float() - x) / x.numel()).to(y.dtype)])])
    assert losses[-1] < 0.9 * losses[1]
    assert losses[-2] == pytest.approx(losses[-1], rel=0.02)
    assert all(one.dtype == torch.float32 for one in narrow.averaged_tensors())
    again = Expert(network().to(dtype), (torch.zeros(1, 6, dtype=dtype),), adam)
    again.load_state(narrow.state().blob, narrow.lineage)
    assert all(map(torch.equal, narrow.averaged_tensors(), again.averaged_tensors()))
    assert all(map(torch.equal, narrow.module.parameters(), again.module.parameters()))


def test_a_checkpoint_of_another_expert_raises_an_error_that_names_it(tmp_path: Path) -> None:
    uid = ExpertUid.parse("ffn.3")
    ExpertCheckpoints(tmp_path, {uid: Expert(network(4), (torch.zeros(1, 4),))}).save()
    with pytest.raises(UsageError, match="another schema"):
        ExpertCheckpoints(tmp_path, {uid: expert()}).load()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_as_torch_does_and_leaves_the_schema_as_it_is(dtype: torch.dtype) -> None:
    module = network()
    learning = expert(copy.deepcopy(module), optimizer=sgd, autocast=dtype)
    assert learning.schema.digest == expert(copy.deepcopy(module)).schema.digest
    ((name, inputs, gradients),) = passes(1)
    x = inputs[0].clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        y = module(x)
    assert y.dtype == dtype
    (found,) = learning.forward(inputs)
    assert torch.equal(found, y.to(torch.float32))
    assert not torch.equal(found, expert(copy.deepcopy(module)).forward(inputs)[0])
    y.to(torch.float32).backward(gradients[0])
    ((of_x,),) = learning.backward([(name, inputs, gradients)])
    assert x.grad is not None
    assert of_x is not None
    assert torch.equal(of_x, x.grad)
    sgd(module.parameters()).step()
    assert all(
        torch.equal(one, other)
        for one, other in zip(learning.module.parameters(), module.parameters(), strict=True)
    )
    assert all(parameter.dtype == torch.float32 for parameter in learning.module.parameters())


def test_autocast_keeps_integers_and_kept_activations() -> None:
    sample = (torch.zeros(1, dtype=torch.int64), {"used": torch.zeros(1, 4), "ignored": torch.zeros(1)})
    learning = Expert(Nested(), sample, sgd, autocast=torch.bfloat16, keep_activations_bytes=10_000)
    inputs = [torch.tensor([1, 2]), torch.zeros(2), torch.ones(2, 4)]
    ids, used, total = learning.forward_keeping("x", inputs)
    assert (ids.dtype, used.dtype, total.dtype) == (torch.int64, torch.float32, torch.float32)
    ((_, of_used),) = learning.backward([("x", inputs, [None, torch.ones(2, 4)])])
    assert of_used is not None
    assert torch.equal(of_used, torch.ones(2, 4))


def test_autocast_accepts_only_half_precision_dtypes() -> None:
    for wrong in (torch.float32, "bfloat16", torch.int8):
        with pytest.raises(UsageError, match=r"autocast is torch\.bfloat16, torch\.float16 or None"):
            expert(autocast=wrong)


class Moved(Exception):
    """A module that records where it was moved to."""


class Movable(torch.nn.Module):
    def to(self, device: torch.device) -> Any:  # type: ignore[override]
        raise Moved(device)


@pytest.mark.parametrize(
    ("device", "index"), [("cuda", 2), ("cuda:1", 1), (torch.device("cuda"), 2), (torch.device("cuda", 0), 0)]
)
def test_a_cuda_device_has_an_index_from_the_start(
    monkeypatch: pytest.MonkeyPatch, device: Any, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    with pytest.raises(Moved) as moved:
        expert(Movable(), device=device)
    assert moved.value.args == (torch.device("cuda", index),)
    with pytest.raises(UsageError, match="device cuda:7 was given, but this machine has cuda:0 to cuda:2"):
        expert(Movable(), device="cuda:7")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_device_raises_a_usage_error() -> None:
    with pytest.raises(UsageError, match="device cuda was given, but "):
        expert(device="cuda")


@pytest.fixture
def other_defaults() -> Iterator[None]:
    """Change torch's defaults as a user's script may, for every thread or for one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(before)


def test_defaults_of_torch_do_not_change_answers(request: pytest.FixtureRequest) -> None:
    learning = [expert(optimizer=sgd, clip_norm=0.1) for _ in range(2)]
    (one, (name, inputs, gradients)) = passes(2)
    many = [one, (name, inputs, [None]), (name, inputs, gradients)]

    def answers(of: Expert) -> list[torch.Tensor | None]:
        return [
            *of.forward(inputs),
            *(part for parts in of.backward(many) for part in parts),
            *of.forward(inputs),
        ]

    expected = answers(learning[0])
    request.getfixturevalue("other_defaults")
    for found, before in zip(answers(learning[1]), expected, strict=True):
        assert found is not None
        assert before is not None
        assert found.dtype == before.dtype
        assert torch.equal(found, before)


def test_out_of_memory_and_a_lost_device_are_not_the_modules_fault() -> None:
    """The computing thread must be able to tell them from errors of the module."""
    moody = Raising()
    made = Expert(moody, (torch.zeros(1, 2),))
    for error, expected in (
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), torch.cuda.OutOfMemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceFailed),
        (RuntimeError("shapes differ"), ComputationFailed),
    ):
        moody.error = error
        with pytest.raises(expected):
            made.forward([torch.zeros(1, 2)])


class Raising(torch.nn.Module):
    error: Exception | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize(
    "layer",
    [torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3, momentum=None)],
    ids=["moving average", "mean of all"],
)
def test_the_statistics_of_batch_normalization_count_a_forward_and_backward_pass_once(
    layer: torch.nn.Module,
) -> None:
    """Regression: the backward pass computes forward again, and counted the batch a second time."""
    local = torch.nn.Sequential(torch.nn.Linear(3, 3), copy.deepcopy(layer))
    module = copy.deepcopy(local)
    sample = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    hosted = Expert(module.eval(), (sample,), lambda some: torch.optim.SGD(some, lr=0.1))
    module.train()
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for seed in range(5):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        hosted.forward([x])
        hosted.backward([(seed, [x], [torch.ones(8, 3)])])
        optimizer.zero_grad()
        local(x).backward(torch.ones(8, 3))
        optimizer.step()
    for found, wanted in zip(module.buffers(), local.buffers(), strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)
    for one, other in zip(module.parameters(), local.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
