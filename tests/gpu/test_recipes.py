"""The usual ways to train on a GPU work with `swarm.Optimizer`, alone and together: three epochs each, and
the loss falls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from averaging.optim.optimizer import Diloco, Gradients, Optimizer
from benchmarks.cuda.peers import at_once
from swarm.node import Node

EPOCHS, SAMPLES, TARGET = 3, 16, 256
RECIPES: dict[str, set[str]] = {
    "plain": set(),
    "fused": {"fused"},
    "channels last": {"channels_last"},
    "fused, channels last": {"fused", "channels_last"},
    "bfloat16, fused": {"bfloat16", "fused"},
    "bfloat16, channels last, offload": {"bfloat16", "channels_last", "offload"},
    "autocast, scaler": {"autocast", "scaler"},
    "compile": {"compile"},
    "fused, channels last, offload": {"fused", "channels_last", "offload"},
    "autocast, scaler, fused, channels last, compile, offload": {
        "autocast",
        "scaler",
        "fused",
        "channels_last",
        "compile",
        "offload",
    },
    "bfloat16, fused, channels last, compile, offload": {
        "bfloat16",
        "fused",
        "channels_last",
        "compile",
        "offload",
    },
}
GRADIENTS, DILOCO = Gradients(), Diloco(outer_lr=0.7)
CASES = [
    pytest.param(recipe, mode, peers, id=f"{name}, {mode.name}, {peers}")
    for name, recipe in RECIPES.items()
    for mode, peers in ((GRADIENTS, 1), (GRADIENTS, 2), (DILOCO, 1), (DILOCO, 2))
    # compiling takes most of the time
    if "compile" not in recipe or (mode, peers) in ((GRADIENTS, 2), (DILOCO, 1))
]


def network(device: torch.device, recipe: set[str]) -> torch.nn.Module:
    torch.manual_seed(0)
    convolutions = [
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, padding=1),
        torch.nn.ReLU(),
    ]
    net = torch.nn.Sequential(
        *convolutions, torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(64, 4)
    ).to(device)
    if "bfloat16" in recipe:
        net = net.to(torch.bfloat16)
    if "channels_last" in recipe:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's types
    return net


def images(seed: int, recipe: set[str], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Four classes, distinguished by the bright channel or corner."""
    chance = torch.Generator().manual_seed(seed)
    classes = torch.randint(4, (SAMPLES,), generator=chance)
    pictures = 0.1 * torch.randn(SAMPLES, 3, 8, 8, generator=chance)
    for place, one in enumerate(classes.tolist()):
        pictures[place, one % 3, 4 * (one // 3) : 4 + 4 * (one // 3)] += 1.0
    pictures = pictures.to(device, torch.bfloat16 if "bfloat16" in recipe else torch.float32)
    return pictures.contiguous(
        memory_format=torch.channels_last
    ) if "channels_last" in recipe else pictures, classes.to(device)


def trains(
    optimizer: Optimizer, net: torch.nn.Module, recipe: set[str], device: torch.device, seed: int
) -> Callable[[], list[float]]:
    """The loop of one peer; returns its losses."""
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    called: Callable[..., torch.Tensor] = torch.compile(net, backend=backend) if "compile" in recipe else net
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled="scaler" in recipe, init_scale=1024.0)

    def train() -> list[float]:
        losses, number = [], 0
        while optimizer.epoch < EPOCHS:
            pictures, classes = images(1000 * seed + number, recipe, device)
            number += 1
            with torch.autocast(device.type, half, enabled="autocast" in recipe):
                loss = torch.nn.functional.cross_entropy(called(pictures).float(), classes)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            optimizer.step()
            if scaler.is_enabled():
                scaler.update()
            losses.append(float(loss.detach()))
        return losses

    return train


@functools.cache
def compiles(kind: str) -> str:
    """Why torch.compile does not work on this machine; empty when it does."""
    try:
        torch.compile(lambda x: x.sin() + 1, backend="inductor" if kind == "cuda" else "aot_eager")(
            torch.zeros(8, device=kind)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


@pytest.mark.parametrize(("recipe", "mode", "peers"), CASES)
def test_three_epochs_lower_the_loss(
    recipe: set[str], mode: Any, peers: int, nodes: list[Node], device: torch.device
) -> None:
    """The second peer trains without torch.compile, which is not made for two threads at once."""
    if "compile" in recipe and (why := compiles(device.type)):
        pytest.skip(f"torch.compile does not work here: {why}")
    with ExitStack() as stack:
        calls = []
        for seed, node in enumerate(nodes[:peers]):
            net = network(device, recipe)
            inner = torch.optim.AdamW(net.parameters(), lr=0.01, fused="fused" in recipe or None)
            options: dict[str, Any] = {
                "target_batch_size": TARGET,
                "batch_size_per_step": SAMPLES,
                "codec": "float16",
            }
            optimizer = Optimizer(
                inner, node=node, run="recipe", mode=mode, offload="offload" in recipe, **options
            )
            own = recipe if seed == 0 else recipe - {"compile"}
            calls.append(trains(stack.enter_context(optimizer), net, own, device, seed))
        losses = at_once(calls, 100.0)[0]
    third = len(losses) // 3
    assert sum(losses[-third:]) < sum(losses[:third]), losses
