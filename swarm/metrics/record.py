"""The metrics of one peer: a small signed record in the DHT, renewed periodically. Anyone may read it, and
its content is not verified.

A run's records are spread over a few keys, so that no replica carries a whole large run. A record contains
unverified claims of its writer: `swarm.monitor.logic.model` compares the claims of all writers.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import Key, PeerId
from swarm.dht.logic.records import encode_value
from swarm.dht.logic.run_rules import METRICS, METRICS_BYTES_MAX

SHARDS = 16  # keys of one run: a constant of the protocol
NAME_CHARACTERS_MAX = 40
OWN_MAX = 16
ROUNDS_MAX = 4
BLAME_MAX = 4
_DETAIL_CHARACTERS_MAX = 160
_REASON_CHARACTERS_MAX = 100
_MARK_BYTES = 8  # bytes of a digest or a group's id: 64 bits distinguish honest ones
_OWN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{0,31}")
_OWN_VALUE_MAX = 1e300

Blame = tuple[tuple[str, str], ...]  # (PeerID, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """The result of a round as its writer reports it."""

    kind: str  # "epoch" for a mode's average, "state" for a state transfer
    epoch: int
    at_s: float  # swarm time of its end
    seconds: float
    bytes: int  # sent and received by the writer
    members: int
    group: str = ""  # hex, the same for all members
    digest: str = ""  # hex, of the averaged bytes
    reason: str = ""  # one word; "": it did not fail
    detail: str = ""
    left: Blame = ()  # members that dropped out
    accused: Blame = ()  # members that the writer's own audit found lying

    def encode(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "k": self.kind,
            "e": self.epoch,
            "t": round(self.at_s, 2),
            "s": round(self.seconds, 3),
            "b": self.bytes,
            "n": self.members,
        }
        value |= {
            name: raw
            for name, raw in (("g", _mark(self.group)), ("d", _mark(self.digest)), ("r", self.reason[:16]))
            if raw
        }
        if self.detail and self.reason:
            value["x"] = self.detail[:_DETAIL_CHARACTERS_MAX]
        for name, blame in (("l", self.left), ("a", self.accused)):
            if blame:
                value[name] = [[peer, why[:_REASON_CHARACTERS_MAX]] for peer, why in blame[:BLAME_MAX]]
        return value

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> RoundReport:
        """Decode a value that has passed the schema."""
        return cls(
            kind=_clean(value["k"]),
            epoch=value["e"],
            at_s=float(value["t"]),
            seconds=float(value["s"]),
            bytes=value["b"],
            members=value["n"],
            group=value.get("g", b"").hex(),
            digest=value.get("d", b"").hex(),
            reason=_clean(value.get("r", "")),
            detail=_clean(value.get("x", "")),
            left=_blame(value.get("l", ())),
            accused=_blame(value.get("a", ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The metrics that one peer publishes. Times are swarm time in Unix seconds."""

    at_s: float
    since_s: float  # when it began to take part
    every_s: float  # renewal interval: a reader calls the record stale after several of these
    epoch: int
    samples_per_s: float
    # Seconds since a participating peer last trained, because it is paused or stuck; None: it trains.
    idle_s: float | None = None
    name: str = ""
    device: str = ""
    # "direct": it can be called; "relay …": through that; "hidden"; "unknown"; "none": it does not listen
    reach: str = ""
    agent: str = ""
    samples: int = 0  # samples contributed to committed rounds
    loss: float | None = None  # training loss
    validation_loss: float | None = None
    contributed_epoch: int | None = None  # the last epoch that it contributed to
    contributed_at_s: float | None = None
    bytes_up: int = 0  # in rounds and state transfer, since it began
    bytes_down: int = 0
    head: str = ""  # hex, of its state's history; "": its mode has none
    line: str = ""  # hex, the head after the last break of that history; "": there was none
    epochs_given_up: int = 0  # epochs that it discarded because its history lost a reunion
    drift: float | None = None  # relative distance of its parameters from the last canonical state's average
    rounds_done: int = 0
    rounds_failed: int = 0
    own: Mapping[str, float] = field(default_factory=dict)  # metrics that the user reports
    broken: tuple[str, ...] = ()  # names of user metrics whose value was not a finite number
    rounds: tuple[RoundReport, ...] = ()  # the latest rounds, the newest last

    def encode(self) -> dict[str, Any]:
        """Encode as a value of the DHT. Unknown fields are omitted, and so are the oldest rounds if they do
        not fit.
        """
        value: dict[str, Any] = {
            "at": self.at_s,
            "since": self.since_s,
            "every": self.every_s,
            "epoch": self.epoch,
            "rate": self.samples_per_s,
            "samples": self.samples,
            "up": self.bytes_up,
            "down": self.bytes_down,
            "done": self.rounds_done,
            "failed": self.rounds_failed,
        }
        optional = {
            "idle": self.idle_s,
            "name": self.name[:NAME_CHARACTERS_MAX] or None,
            "device": self.device[:60] or None,
            "reach": self.reach or None,
            "agent": self.agent[:40] or None,
            "loss": self.loss,
            "validation": self.validation_loss,
            "given_epoch": self.contributed_epoch,
            "given_at": self.contributed_at_s,
            "head": _mark(self.head) or None,
            "line": _mark(self.line) or None,
            "given_up": self.epochs_given_up or None,
            "drift": self.drift,
            "own": dict(self.own) or None,
            "broken": list(self.broken) or None,
            "rounds": [report.encode() for report in self.rounds[-ROUNDS_MAX:]] or None,
        }
        value |= {name: item for name, item in optional.items() if item is not None}
        while value.get("rounds") and len(encode_value(value)) > METRICS_BYTES_MAX:
            value["rounds"] = value["rounds"][1:]
        return value

    @classmethod
    def decode(cls, value: Any) -> Metrics:
        """Decode a peer's value. Raises PeerError that says what is wrong with it."""
        refusal = METRICS.refusal(value)
        if refusal:
            raise PeerError(f"metrics of a peer: the value {refusal}")
        return cls(
            at_s=float(value["at"]),
            since_s=float(value["since"]),
            every_s=float(value["every"]),
            epoch=value["epoch"],
            samples_per_s=float(value["rate"]),
            idle_s=value.get("idle"),
            name=_clean(value.get("name", "")),
            device=_clean(value.get("device", "")),
            reach=_clean(value.get("reach", "")),
            agent=_clean(value.get("agent", "")),
            samples=value.get("samples", 0),
            loss=value.get("loss"),
            validation_loss=value.get("validation"),
            contributed_epoch=value.get("given_epoch"),
            contributed_at_s=value.get("given_at"),
            bytes_up=value.get("up", 0),
            bytes_down=value.get("down", 0),
            head=value.get("head", b"").hex(),
            line=value.get("line", b"").hex(),
            epochs_given_up=value.get("given_up", 0),
            drift=value.get("drift"),
            rounds_done=value.get("done", 0),
            rounds_failed=value.get("failed", 0),
            own={
                name: float(number)
                for name, number in value.get("own", {}).items()
                if _OWN_NAME.fullmatch(name)
            },
            broken=tuple(name for name in value.get("broken", ()) if _OWN_NAME.fullmatch(name)),
            rounds=tuple(RoundReport.decode(report) for report in value.get("rounds", ())),
        )


def metrics_key(run_id: str, peer: PeerId) -> Key:
    """Return the key of a peer's metrics."""
    return Key(f"run.{run_id}", f"metrics.{peer.dht_id % SHARDS}")


def metrics_keys(run_id: str) -> list[Key]:
    """Return all keys with metrics of a run."""
    return [Key(f"run.{run_id}", f"metrics.{shard}") for shard in range(SHARDS)]


def check_own(name: str, value: Any, known: Sequence[str]) -> float | None:
    """Return a user's metric as a number; None when it is not finite, which is reported and not an error.

    Raises UsageError for a value that is not a number, an invalid name, and more names than a record takes.
    """
    if not _OWN_NAME.fullmatch(name):
        raise UsageError(
            f"a metric's name is a letter and up to 31 letters, digits or _ . / -, not {name!r:.60}"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise UsageError(f"the metric {name!r} is a number, not {value!r:.60}") from None
    except OverflowError:
        number = math.inf
    if name not in known and len(known) >= OWN_MAX:
        raise UsageError(
            f"at most {OWN_MAX} user metrics can be reported; there are {', '.join(sorted(known))}"
        )
    return number if math.isfinite(number) and abs(number) <= _OWN_VALUE_MAX else None


def _mark(hexadecimal: str) -> bytes:
    digits = hexadecimal[: 2 * _MARK_BYTES]
    return bytes.fromhex(digits[: len(digits) // 2 * 2])


def _blame(value: Sequence[Sequence[str]]) -> Blame:
    return tuple((_clean(item[0]), _clean(item[1])) for item in value if len(item) == 2)


def _clean(text: str) -> str:
    """Remove control and direction characters, with which a stranger's text could manipulate a terminal."""
    return "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
