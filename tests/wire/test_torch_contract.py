"""`swarm.Optimizer` as a torch optimizer, in every mode: each habit of a training loop against the same
loop in plain torch.

There is one peer, alone; test_modes.py has several. The plain side is a sequential implementation of each
mode, of a few lines.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from averaging.averager import Averager
from averaging.optim.optimizer import Optimizer
from swarm.core.errors import UsageError
from swarm.node import Node
from tests.wire.plain_torch import (
    BATCH,
    CLOSE,
    MODES,
    STEPS,
    TARGET,
    Both,
    adamw,
    batch,
    build,
    loss_of,
    next_run,
)
from tests.wire.trainers import QUICK


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(listen="127.0.0.1:0") as one:
        yield one


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_ordinary_loop_with_a_schedule(node: Node, mode: str) -> None:
    with Both(node, mode, scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)) as both:
        both.train()
        assert both.opt.param_groups[0]["lr"] == both.plain.inner.param_groups[0]["lr"] == 0.0025


@pytest.mark.parametrize("target", ["outer", "inner"])
def test_a_learning_rate_from_a_scheduler_that_is_not_the_runs_is_refused(
    node: Node, mode: str, target: str
) -> None:
    with Both(node, mode) as both:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(
            both.opt if target == "outer" else both.opt.inner, 0.9
        )
        both.train()
        scheduler.step()
        before = [p.detach().clone() for p in both.net.parameters()]
        for _ in range(2):
            with pytest.raises(UsageError, match="scheduler=lambda inner"):
                both.opt.step(1)
        assert all(map(torch.equal, before, both.net.parameters())), "no step is made with another rate"


def test_a_scheduler_that_keeps_the_rate_constant_is_allowed(node: Node, mode: str) -> None:
    with Both(node, mode) as both:
        scheduler = torch.optim.lr_scheduler.LambdaLR(both.opt, lambda step: 1.0)
        both.train(3)
        scheduler.step()
        both.train(3, start=3)


@pytest.mark.parametrize("target", ["outer", "inner"])
def test_first_step_says_that_a_scheduler_of_torch_is_not_the_runs(
    node: Node, mode: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Both(node, mode) as both:
        torch.optim.lr_scheduler.StepLR(both.opt if target == "outer" else both.opt.inner, 1000)
        reasons = [report.reason for report in both.train(3)]
        assert "scheduler=lambda inner" in reasons[0]
        assert reasons[1:] == ["", ""], "it is said once"
        assert "scheduler=lambda inner" in caplog.text


def test_step_says_that_a_learning_rate_was_changed_by_hand(node: Node, mode: str) -> None:
    with Both(node, mode, scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)) as both:
        assert not any(report.reason for report in both.train(5))
        both.opt.param_groups[0]["lr"] *= 0.1
        both.plain.inner.param_groups[0]["lr"] *= 0.1
        reasons = [report.reason for report in both.train(2, start=5)]
        assert "hyperparameter was changed" in reasons[0]
        assert not reasons[1]


def test_clipped_gradients_train_as_without_swarm(node: Node, mode: str) -> None:
    with Both(node, mode) as both:
        both.train(before_step=lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05))


def test_clipping_in_a_pre_hook_of_the_inner_optimizer_trains_as_without_swarm(node: Node, mode: str) -> None:
    def clipped(net: torch.nn.Module) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(net.parameters(), lr=0.5)
        inner.register_step_pre_hook(
            lambda *_: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05) and None
        )
        return inner

    with Both(node, mode, clipped) as both:
        both.train()


def test_an_overflow_under_grad_scaler_and_autocast_skips_the_step(node: Node, mode: str) -> None:
    with Both(node, mode) as both:
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4) for _ in range(2)]
        reports = []
        for seed in range(STEPS):
            before = [p.clone() for p in both.net.parameters()]
            for net, scaler in zip((both.plain_net, both.net), scalers, strict=True):
                net.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(net, batch(seed))
                scaler.scale(loss).backward()
                if seed == 5:
                    next(net.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
            if seed != 5:
                scalers[0].unscale_(both.plain.inner)
                both.plain.step()
            scalers[0]._per_optimizer_states.clear()
            reports.append(scalers[1].step(both.opt))
            scalers[1].update()
            scalers[0].update(scalers[1].get_scale())
            both.check(1e-5)
            if seed == 5:
                assert reports[-1] is None, (
                    "GradScaler skips the step: these samples are not counted, and nothing moves"
                )
                assert all(torch.equal(a, b) for a, b in zip(before, both.net.parameters(), strict=True))
        assert sum(report is None for report in reports) == 1
        assert scalers[1].get_scale() not in (64.0, 0.0)


@pytest.mark.parametrize("fused", [False, True])
def test_unscaled_gradients_that_overflowed_are_reported_by_the_step_itself(
    node: Node, mode: str, fused: bool
) -> None:
    """The recipe with clipping: unscale, clip, step without the scaler, update it."""
    with Both(node, mode, lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)) as both:
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4) for _ in range(2)]
        for seed in range(STEPS):
            for net, scaler, optimizer in zip(
                (both.plain_net, both.net), scalers, (both.plain.inner, both.opt), strict=True
            ):
                net.zero_grad()
                scaler.scale(loss_of(net, batch(seed))).backward()
                if seed == 5:
                    net[0].weight.grad[0, 0] = float("inf")  # type: ignore[index,union-attr]
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            if seed != 5:
                both.plain.step()
            report = both.opt.step()
            for scaler in scalers:
                scaler.update()
            if seed == 5:
                assert (report.samples, report.dropped) == (0, BATCH)
                assert report.reason.startswith("non-finite gradients: parameter 0")
            else:
                assert (report.samples, report.dropped, report.reason) == (BATCH, 0, "")
            assert scalers[0].get_scale() == scalers[1].get_scale()
            both.check(1e-5)
        assert scalers[1].get_scale() not in (64.0, 0.0)


def test_gradients_of_several_backward_passes_add_up_before_a_step(node: Node, mode: str) -> None:
    with Both(node, mode) as both:
        for seed in range(0, STEPS, 2):
            for net, step in ((both.plain_net, both.plain.step), (both.net, both.opt.step)):
                net.zero_grad()
                for part in (seed, seed + 1):
                    (loss_of(net, batch(part)) / 2).backward()
                step(2 * BATCH)
            both.check()


def test_steps_with_a_closure_equal_those_without_swarm(node: Node, mode: str) -> None:
    with Both(node, mode) as both:
        for seed in range(STEPS):

            def closure(net: torch.nn.Module, seed: int = seed) -> torch.Tensor:
                net.zero_grad()
                loss = loss_of(net, batch(seed))
                loss.backward()
                return loss

            expected = closure(both.plain_net)
            both.plain.step()
            report = (
                both.opt.step(lambda: closure(both.net))
                if seed % 2
                else both.opt.step(BATCH, lambda: closure(both.net))
            )
            torch.testing.assert_close(report.loss, expected, **CLOSE)
            both.check()


def test_resuming_gives_the_same_losses_as_not_having_stopped(node: Node, mode: str) -> None:
    def schedule(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(inner, 7)

    with Both(node, mode, scheduler=schedule) as first, Both(node, mode, scheduler=schedule) as second:
        first.train(10)
        saved = copy.deepcopy((first.net.state_dict(), first.opt.state_dict()))
        losses: list[list[float]] = [[], []]
        second.net.load_state_dict(saved[0])
        second.opt.load_state_dict(saved[1])
        assert second.opt.epoch == first.opt.epoch == 3
        for seed in range(10, 24):
            for net, opt, found in ((first.net, first.opt, losses[0]), (second.net, second.opt, losses[1])):
                opt.zero_grad()
                loss = loss_of(net, batch(seed))
                loss.backward()
                opt.step()
                found.append(float(loss.detach()))
        assert losses[0] == losses[1]
        assert first.opt.state_digest() == second.opt.state_digest()
        plain = {key: value for key, value in saved[1].items() if key != "swarm"}
        second.opt.load_state_dict(plain)  # of the inner optimizer alone


def test_a_state_dict_survives_torch_save(node: Node, mode: str, tmp_path: Any) -> None:
    with Both(node, mode) as both:
        both.train(7)
        torch.save(both.opt.state_dict(), tmp_path / "checkpoint.pt")
        both.opt.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
        both.train(4, start=7)


def test_parameter_groups_and_a_learning_rate_changed_on_the_way(node: Node, mode: str) -> None:
    def grouped(net: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": net[0].parameters()},
                {"params": net[2].parameters(), "lr": 0.05, "weight_decay": 0.0},
            ],
            lr=0.01,
        )  # type: ignore[index]

    with Both(node, mode, grouped) as both:
        both.train(5)
        for group in (both.opt.param_groups[1], both.plain.inner.param_groups[1]):
            group["lr"] = 0.001
        both.train(6, start=5)


def test_optimizer_hooks_run_once_per_inner_step(node: Node, mode: str) -> None:
    with Both(node, mode) as both:
        seen: list[str] = []
        both.opt.register_step_pre_hook(lambda *_: seen.append("before"))
        both.opt.register_step_post_hook(lambda *_: seen.append("after"))
        both.opt.register_state_dict_post_hook(lambda _, state: seen.append("saved"))
        both.train(6)
        both.opt.state_dict()
        inner_steps = 2 if mode in ("gradients", "delayed") else 6
        assert seen == ["before", "after"] * inner_steps + ["saved"]


class Tied(torch.nn.Module):
    """A model whose embedding shares its weight with the output layer, with a frozen layer, and one that no
    gradient reaches.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = torch.nn.Linear(6, 6, bias=False)
        self.leave = torch.nn.Linear(6, 6, bias=False)
        self.leave.weight = self.enter.weight
        self.fixed = torch.nn.Linear(6, 1).requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed(self.leave(self.enter(x).tanh()))  # type: ignore[no-any-return]


def test_shared_frozen_and_unused_parameters(node: Node, mode: str) -> None:
    with Both(node, mode, model=Tied) as both:
        fixed = both.net.fixed.weight.clone()  # type: ignore[union-attr,operator]
        both.train()
        assert both.net.enter.weight is both.net.leave.weight  # type: ignore[union-attr]
        assert torch.equal(both.net.fixed.weight, fixed)  # type: ignore[union-attr,arg-type]
        # no gradient: not stepped, weight decay included
        assert torch.equal(both.net.unused, torch.ones(3))  # type: ignore[arg-type]


def test_bfloat16_parameters_train_as_without_swarm(node: Node, mode: str) -> None:
    def half(net: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    with Both(node, mode, half, model=lambda: build().to(torch.bfloat16)) as both:
        for seed in range(STEPS):
            x, y = batch(seed)
            for net, step in ((both.plain_net, both.plain.step), (both.net, both.opt.step)):
                net.zero_grad()
                loss_of(net, (x.to(torch.bfloat16), y)).backward()
                step()
            # an outer step that falls on the other side of a rounding moves by one of bfloat16's
            both.check(2e-2)
        assert all(p.dtype == torch.bfloat16 for p in both.net.parameters())


def test_batchnorm_buffers_train_as_without_swarm(node: Node, mode: str) -> None:
    def normed() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 1))

    def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
        # Adam makes steps of gradients that are nothing but rounding
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    with Both(node, mode, sgd, model=normed) as plain:
        net = normed()
        run = next_run()
        options: dict[str, Any] = {
            "target_batch_size": TARGET,
            "batch_size_per_step": BATCH,
            "config": QUICK,
            "state_sync_epochs": 2,
        }
        with Optimizer(
            sgd(net), node=node, run=run, mode=MODES[mode], extra_tensors=tuple(net.buffers()), **options
        ) as opt:
            for seed in range(STEPS):
                for one, step in ((plain.plain_net, plain.plain.step), (net, opt.step)):
                    one.zero_grad()
                    loss_of(one, batch(seed)).backward()
                    step()
            for ours, theirs in zip(net.buffers(), plain.plain_net.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            assert opt.state_digest()[0] == plain.plain.epoch


def test_a_compiled_model_trains_as_without_swarm(node: Node, mode: str) -> None:
    with Both(node, mode) as both:
        compiled = torch.compile(both.net, backend="eager")
        assert isinstance(compiled, torch.nn.Module)
        for seed in range(6):
            for one, step in ((both.plain_net, both.plain.step), (compiled, both.opt.step)):
                one.zero_grad()
                loss_of(one, batch(seed)).backward()
                step()
            both.check()


def test_a_fused_optimizer_trains_as_without_swarm(node: Node, mode: str) -> None:
    with Both(node, mode, lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)) as both:
        both.train()


def test_offloading_keeps_results_and_puts_averaged_tensors_on_the_host(
    node: Node, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaged: list[torch.Tensor] = []
    make = Averager.__init__

    def noted(averager: Averager, at: Node, tensors: Sequence[torch.Tensor], **options: Any) -> None:
        averaged.extend(tensors)
        make(averager, at, tensors, **options)

    monkeypatch.setattr(Averager, "__init__", noted)
    with Both(node, mode, offload=True) as both:
        both.train()
    assert averaged
    assert all(tensor.device.type == "cpu" for tensor in averaged)


def test_joining_never_changes_weights_by_itself(node: Node, mode: str) -> None:
    net = build()
    before = copy.deepcopy(net.state_dict())
    inner = adamw(net)
    with Optimizer(
        inner, node=node, run=next_run(), target_batch_size=TARGET, mode=MODES[mode], config=QUICK
    ) as opt:
        assert opt.load_state_from_peers(timeout_s=5).alone
        opt.state_digest()
        opt.zero_grad()
        assert opt.step(batch_size=1).reason == "no parameter has a gradient"
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not inner.state, "not even statistics were made"


def test_an_error_of_the_inner_optimizer_loses_no_samples(node: Node, mode: str) -> None:
    """Regression test: with delayed gradients the samples of the epoch were lost."""
    with Both(node, mode) as both:
        errors = [RuntimeError("out of memory")]

        def fail_once(*_: Any) -> None:
            if errors and both.opt.epoch:
                raise errors.pop()

        both.opt.inner.register_step_pre_hook(fail_once)
        reports, samples = list[Any](), 0
        for seed in range(STEPS):
            both.net.zero_grad()
            loss_of(both.net, batch(seed)).backward()
            try:
                reports.append(both.opt.step())
            except RuntimeError:
                # the gradients were taken, unless a local step is what failed
                samples += BATCH * (mode in ("gradients", "delayed"))
        assert not errors
        samples += sum(one.samples for one in reports)
        assert sum(one.contributed for one in reports) + reports[-1].accumulated == samples


def test_a_scheduler_at_its_end_leaves_the_state_in_the_epoch_of_its_step(node: Node, mode: str) -> None:
    """Regression test: parameters were stepped again and again in one epoch, whose certificate was undone."""

    def one_cycle(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(inner, 0.01, total_steps=2, cycle_momentum=False)

    net = build()
    options: dict[str, Any] = {"node": node, "run": next_run(), "mode": MODES[mode], "scheduler": one_cycle}
    with Optimizer(adamw(net), target_batch_size=BATCH, **options) as opt:
        for seed in range(5):
            net.zero_grad()
            loss_of(net, batch(seed)).backward()
            if seed < 2:
                opt.step(BATCH)
            else:
                with pytest.raises(ValueError, match="number of total steps"):
                    opt.step(BATCH)
            assert opt.epoch == seed + 1


def test_a_layer_that_is_unfrozen_later_is_refused(node: Node, mode: str) -> None:
    """Regression test: each peer stepped it with the gradients of its own last batch."""
    with Both(node, mode, model=Tied) as both:
        both.train(3)
        both.net.fixed.requires_grad_(True)  # type: ignore[union-attr,operator]
        loss_of(both.net, batch(3)).backward()
        with pytest.raises(UsageError, match="has a gradient, although it was frozen"):
            both.opt.step()
        both.net.fixed.zero_grad()  # type: ignore[union-attr,operator]
        both.opt.step()


def test_a_step_while_another_thread_makes_one_is_refused(node: Node, mode: str) -> None:
    """Regression test: samples were counted twice, and rounds had two owners."""
    with Both(node, mode) as both:
        both.train(3)
        errors = list[UsageError]()

        def step_beside() -> None:
            try:
                both.opt.step()
            except UsageError as error:
                errors.append(error)

        def meet(*_: Any) -> None:
            beside = threading.Thread(target=step_beside)
            beside.start()
            beside.join(30)

        both.opt.inner.register_step_pre_hook(meet)
        both.train(3, start=3)
        assert errors
        assert all("another thread" in str(error) for error in errors)


def test_a_closure_that_closes_the_optimizer_is_refused(node: Node, mode: str) -> None:
    with Both(node, mode) as both, pytest.raises(UsageError, match="closed"):
        both.opt.step(BATCH, both.opt.close)


@pytest.mark.parametrize("saved_in", ["gradients", "diloco"])
def test_state_dict_of_another_mode_leaves_the_inner_optimizer_as_it_was(node: Node, saved_in: str) -> None:
    """Regression test: its statistics and learning rates were loaded before the mode refused the rest."""
    with Both(node, saved_in) as both:
        saved = both.opt.state_dict()
    with Both(node, "diloco" if saved_in == "gradients" else "gradients") as both:
        both.opt.param_groups[0]["lr"] = 0.5
        with pytest.raises(UsageError, match="this was not saved in a mode"):
            both.opt.load_state_dict(saved)
        assert both.opt.param_groups[0]["lr"] == 0.5
