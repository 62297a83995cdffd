"""Learn to read handwritten digits with a layer whose experts are hosted and trained by other processes.

Alone:              python examples/experts_digits.py                (hosts the experts itself)
With servers:       swarm serve --expert-class ffn --hidden-dim 32 --experts 'digits.[0:2].[0:4]' --lr 0.003
                    python examples/experts_digits.py INVITE         (the invite that the server prints)

More servers can join with `swarm serve INVITE …`.
"""

from __future__ import annotations

import contextlib
import gzip
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import swarm

GRID = "digits.[0:2].[0:4]"
WIDTH = 32
BATCH = 64
STEPS = 400
LEARNING_RATE = 3e-3
HELD_OUT = 297


class Digits:
    """Images as float32 [samples, 64] from 0 to 1, and their digits. The last images are held out."""

    def __init__(self) -> None:
        with gzip.open(
            Path(__file__).parent / "digits_task" / "swarm_digits" / "digits.csv.gz", "rt"
        ) as lines:
            table = torch.tensor([[int(field) for field in line.split(",")] for line in lines])
        images, labels = table[:, :64].float() / 16.0, table[:, 64]
        self.images, self.labels = images[:-HELD_OUT], labels[:-HELD_OUT]
        self.held_out = images[-HELD_OUT:], labels[-HELD_OUT:]


class Classifier(nn.Module):
    """A linear layer, a mixture of experts with a residual connection, and another linear layer."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.before, self.mixture, self.after = nn.Linear(64, WIDTH), mixture, nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.before(images))
        logits: torch.Tensor = self.after(hidden + self.mixture(hidden))
        return logits


def train(
    make_mixture: Callable[[], nn.Module], steps: int, log: Callable[[str], None] = print
) -> tuple[float, float]:
    """Train for `steps` steps and return (loss, accuracy) on the held-out images.

    `make_mixture` makes the module in the middle, which maps float32 [batch, WIDTH] to the same shape.
    """
    torch.manual_seed(0)
    digits, model = Digits(), Classifier(make_mixture())
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        chosen = torch.randint(len(digits.images), (BATCH,), generator=draw)
        loss = functional.cross_entropy(model(digits.images[chosen]), digits.labels[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 0:
            log(f"step {step}: loss {loss.item():.3f}")
    images, labels = digits.held_out
    with torch.no_grad():
        logits = model(images)
    accuracy = (logits.argmax(dim=1) == labels).float().mean().item()
    return functional.cross_entropy(logits, labels).item(), accuracy


def make_expert() -> swarm.Expert:
    """Make an expert like those of `swarm serve --expert-class ffn`."""
    module = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return swarm.Expert(module, (torch.zeros(1, WIDTH),), partial(torch.optim.Adam, lr=LEARNING_RATE))


def main() -> None:
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(swarm.Node(bootstrap=sys.argv[1:], listen="127.0.0.1:0"))
        if len(sys.argv) == 1:
            host = stack.enter_context(swarm.Node(bootstrap=node.addresses, listen="127.0.0.1:0"))
            names = [f"digits.{row}.{column}" for row in range(2) for column in range(4)]
            stack.enter_context(swarm.ExpertServer(host, {name: make_expert() for name in names}))
        loss, accuracy = train(lambda: swarm.RemoteMixtureOfExperts(node, WIDTH, grid=GRID, k_best=2), STEPS)
        print(f"held out: loss {loss:.3f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
