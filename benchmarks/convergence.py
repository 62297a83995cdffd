"""The convergence section: loss and bytes of every mode and codec with four peers.

They are compared with one machine and with synchronous float32. Every finished training is stored in
`convergence.json` next to the figures, so an interrupted section continues with the same command. A training
is repeated when the scale or the settings of its setup have changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import four_peers
from benchmarks.environments import OWN_PYTHON
from benchmarks.four_peers import PEERS, Data, PeerHistory, RoundsFailed, StartingPoint
from benchmarks.hostile import one_thread
from benchmarks.launch import Launch, LaunchFailed, Worker
from benchmarks.results import Aim, Row, Series
from benchmarks.training_setups import SEEDS, SETUPS, SYNCHRONOUS, Outcome, Say, Scale, TrainingSetup

WITHIN = 1.02  # a loss within this factor of the synchronous run's final loss counts as reached
WHOLE = "one machine, the batches of all four"
QUARTER = "one machine, its own batches only"
READY_S = 180.0
TRAINING_S_MAX = 3600.0
_ALONE = {WHOLE: PEERS, QUARTER: 1}


class OutcomeStore:
    """Outcomes on disk, in one file that is replaced atomically. Without a path nothing is stored."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.outcomes: list[Outcome] = []
        if path is not None and path.exists():
            self.outcomes = [_read(one) for one in json.loads(path.read_text(encoding="utf-8"))]

    def get(self, name: str, seed: int, settings: dict[str, Any]) -> Outcome | None:
        return next(
            (one for one in self.outcomes if (one.setup, one.seed, one.settings) == (name, seed, settings)),
            None,
        )

    def add(self, outcome: Outcome) -> None:
        self.outcomes = [
            one for one in self.outcomes if (one.setup, one.seed) != (outcome.setup, outcome.seed)
        ] + [outcome]
        if self._path is not None:
            partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            partial.write_text(
                json.dumps([dataclasses.asdict(one) for one in self.outcomes], indent=1) + "\n",
                encoding="utf-8",
            )
            partial.replace(self._path)


def _read(record: dict[str, Any]) -> Outcome:
    outcome = Outcome(**record)
    outcome.curve = [(int(step), float(loss), float(sent)) for step, loss, sent in record["curve"]]
    return outcome


class FourProcesses:
    """Four peers, each in a process, that run one training after the other. A context manager; starts them on
    first use.
    """

    def __init__(self, scale: Scale, text: Path | None = None) -> None:
        self._scale, self._text = scale, text
        self._stack = contextlib.ExitStack()
        self._launch: Launch | None = None
        self._trained = 0

    def __enter__(self) -> FourProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, setup: TrainingSetup, start: StartingPoint, seed: int) -> list[PeerHistory]:
        """Run one training and return the history of each peer.

        Raises RoundsFailed when the peers fail; the next call then starts new processes.
        """
        self._trained += 1
        try:
            with tempfile.TemporaryDirectory(prefix="swarm-four-") as folder:
                path = Path(folder) / "start"
                torch.save({"model": start.model, "inner": start.inner}, path)
                launch = self._open()
                launch.send(
                    "train", setup=setup.name, seed=seed, run=f"convergence {self._trained}", start=str(path)
                )
                launch.receive("open", READY_S)
                launch.send("go")
                replies = [_trained(worker) for worker in launch.workers]
        except (RoundsFailed, LaunchFailed) as failure:
            self._stack.close()
            self._launch = None
            raise RoundsFailed(str(failure)) from failure
        return [
            PeerHistory(
                rounds=one["rounds"],
                missing=one["missing"],
                curve=[(step, loss, sent) for step, loss, sent in one["curve"]],
            )
            for one in replies
        ]

    def _open(self) -> Launch:
        if self._launch is None:
            shape = {"scale": self._scale.settings, "text": None if self._text is None else str(self._text)}
            launch = Launch(
                "four peers",
                python=OWN_PYTHON,
                module="benchmarks.workers.swarm_convergence",
                configurations=[shape] * PEERS,
            )
            self._launch = self._stack.enter_context(launch)
            launch.receive("ready", READY_S)
        return self._launch


def _trained(worker: Worker) -> dict[str, Any]:
    replies = worker.receive("trained", time.monotonic() + TRAINING_S_MAX)
    if replies["failed"]:
        raise RoundsFailed(replies["failed"])
    return replies


Four = Callable[[TrainingSetup, StartingPoint, int], list[PeerHistory]]


class Section:
    """All trainings of one scale."""

    def __init__(
        self,
        store: OutcomeStore,
        data: Data,
        scale: Scale,
        say: Say,
        setups: Sequence[TrainingSetup] = SETUPS,
    ) -> None:
        self._store, self._scale, self._say, self._setups, self._data = store, scale, say, setups, data
        self._begun: dict[int, StartingPoint] = {}

    def rows(self, four: Four) -> Iterator[list[Row]]:
        """Yield rows as they are measured: every setup with its first seed, then the headlines' other seeds.

        `four` makes the four peers train.
        """
        with one_thread():
            yield from self._rows(four)

    def _rows(self, four: Four) -> Iterator[list[Row]]:
        def together(setup: TrainingSetup) -> Callable[[int], Outcome]:
            return lambda seed: self.train_together(four, setup, seed)

        settings = {**self._scale.settings, **SYNCHRONOUS.settings}
        for seeds_max in sorted({1, *(len(setup.seeds) for setup in self._setups)}):
            seeds = SYNCHRONOUS.seeds[:seeds_max]
            reference, reasons = self._measured(SYNCHRONOUS.name, seeds, settings, together(SYNCHRONOUS))
            if not reference:
                raise RoundsFailed(
                    f"the synchronous run failed, with which all others are compared: {'; '.join(reasons)}"
                )
            yield [self._loss_row(SYNCHRONOUS.name, reference, reference, reasons)]
            for setup in self._setups:
                if setup is not SYNCHRONOUS and (seeds_max == 1 or len(setup.seeds) > 1):
                    found, reasons = self._measured(
                        setup.name,
                        setup.seeds[:seeds_max],
                        {**self._scale.settings, **setup.settings},
                        together(setup),
                    )
                    yield [
                        self._loss_row(setup.name, found, reference, reasons),
                        self._bytes_row(setup, found, reference),
                    ]
            if seeds_max == 1:
                for name in _ALONE:
                    alone = functools.partial(self.train_alone, name)
                    found, _ = self._measured(name, SEEDS[:1], self._scale.settings, alone)
                    yield [self._loss_row(name, found, reference, ())]

    def _from(self, seed: int) -> StartingPoint:
        if seed not in self._begun:
            self._begun[seed] = four_peers.common_start(self._data, self._scale, seed)
        return self._begun[seed]

    def train_together(self, four: Four, setup: TrainingSetup, seed: int) -> Outcome:
        start, began_s = self._from(seed), time.monotonic()
        histories = four(setup, start, seed)
        return Outcome(
            setup=setup.name,
            seed=seed,
            settings={**self._scale.settings, **setup.settings},
            parameters=sum(tensor.numel() for tensor in start.model.values()),
            rounds=histories[0].rounds,
            missing=max(history.missing for history in histories),
            seconds=time.monotonic() - began_s,
            curve=four_peers.mean_curve(histories),
        )

    def _measured(
        self, name: str, seeds: Sequence[int], settings: dict[str, Any], train: Callable[[int], Outcome]
    ) -> tuple[list[Outcome], list[str]]:
        """Return the stored outcomes, training the missing ones, and the reasons of failed trainings."""
        found, reasons = [], []
        for seed in seeds:
            outcome = self._store.get(name, seed, settings)
            if outcome is None:
                try:
                    outcome = train(seed)
                except RoundsFailed as failure:
                    reasons.append(str(failure))
                    self._say(
                        f"convergence, {name}, seed {seed} failed, and is made again by the next call: "
                        f"{failure}"
                    )
                    continue
                self._store.add(outcome)
                sent = (
                    f", {outcome.sent_bytes / 1e6:.2f} MB sent by each in {outcome.rounds} rounds"
                    if outcome.rounds
                    else ""
                )
                sent += (
                    f", of one of which {outcome.missing:.3g} was missing" if outcome.missing > 1e-6 else ""
                )
                self._say(
                    f"convergence, {name}, seed {seed}: {outcome.loss:.3f} nats per byte{sent}, "
                    f"{outcome.seconds:.0f} s"
                )
            found.append(outcome)
        return found, reasons

    def train_alone(self, name: str, seed: int) -> Outcome:
        start, began_s = self._from(seed), time.monotonic()
        outcome = Outcome(setup=name, seed=seed, settings=self._scale.settings)

        def on_evaluation(step: int, loss: float, sent: float) -> None:
            outcome.curve.append((step, loss, sent))

        four_peers.train_alone(
            self._data, start, self._scale, seed, peers=_ALONE[name], on_evaluation=on_evaluation
        )
        outcome.seconds = time.monotonic() - began_s
        return outcome

    def _loss_row(
        self, name: str, found: Sequence[Outcome], reference: Sequence[Outcome], reasons: Sequence[str]
    ) -> Row:
        steps, samples = self._scale.steps, self._scale.samples
        common = f"of which the first {self._scale.common_steps} are one machine's"
        return Row(
            identifier=f"convergence-loss-{slug(name)}",
            workload=(
                f"byte-level model, {PEERS} peers, {steps} steps of {samples} samples each, {common}: {name}"
            ),
            quantity="held-out loss at the end",
            ours=Series(
                name=f"{name}: loss",
                unit="nats/byte",
                samples=tuple(one.loss for one in found),
                failed=len(reasons),
                reasons=tuple(reasons),
            ),
            peer=Series(
                name=f"{SYNCHRONOUS.name}: loss", unit="nats/byte", samples=_of_same_seeds(reference, found)
            ),
            aim=None,
            shown="ours / peer",
            limit=next(
                (repr(setup.mode) for setup in (SYNCHRONOUS, *self._setups) if setup.name == name), ""
            ),
            notes=_missing(found),
        )

    def _bytes_row(self, setup: TrainingSetup, found: Sequence[Outcome], reference: Sequence[Outcome]) -> Row:
        targets = {one.seed: WITHIN * one.loss for one in reference}
        reached = [one.bytes_to(targets[one.seed]) for one in found if one.seed in targets]
        theirs = [
            one.bytes_to(targets[one.seed])
            for one in reference
            if one.seed in {other.seed for other in found}
        ]
        missed = reached.count(None)
        return Row(
            identifier=f"convergence-bytes-{slug(setup.name)}",
            workload=f"byte-level model, {PEERS} peers: {setup.name}",
            quantity="bytes that one peer sends until the loss is within 2 % of the synchronous run's last",
            ours=Series(
                name=f"{setup.name}: bytes",
                unit="bytes sent",
                samples=tuple(sent for sent in reached if sent is not None),
                failed=missed,
                reasons=(f"not reached in {self._scale.steps} steps",) if missed else (),
            ),
            peer=Series(
                name=f"{SYNCHRONOUS.name}: bytes",
                unit="bytes sent",
                samples=tuple(sent for sent in theirs if sent is not None),
            ),
            aim=None
            if setup.fewer_bytes_min is None
            else Aim(of="peer / ours", sense="at least", value=setup.fewer_bytes_min),
            shown="peer / ours",
            limit=f"steps between rounds ({setup.local_steps}) × bits per element",
        )


def _missing(found: Sequence[Outcome]) -> tuple[str, ...]:
    lacking = sum(one.missing for one in found)
    rounds = sum(one.rounds for one in found)
    return (
        (f"values that came too late for their round: {lacking / rounds:.2%} of all",)
        if lacking > 1e-6
        else ()
    )


def _of_same_seeds(reference: Sequence[Outcome], found: Sequence[Outcome]) -> tuple[float, ...]:
    seeds = {one.seed for one in found}
    return tuple(one.loss for one in reference if one.seed in seeds)


def slug(name: str) -> str:
    return "-".join("".join(character if character.isalnum() else " " for character in name).split())


def rows(say: Say, folder: Path | None) -> Iterator[list[Row]]:
    """Measure the section and yield its rows. `folder` stores the trainings; None stores nothing."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    store, scale = OutcomeStore(None if folder is None else folder / "convergence.json"), Scale()
    with FourProcesses(scale) as four:
        yield from Section(store, Data(scale), scale, say).rows(four)
