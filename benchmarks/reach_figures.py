"""The figures about peers that cannot be called directly, and their samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.results import Aim, Failures, Row

ROUND_TRIPS_MS = {50: 1.0, 200: 2.0}  # with the seconds within which a hole is to be punched
CROWD_PEERS, CROWD_MBIT, CROWD_BYTES = 20, 50, 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the section, without its samples."""

    workload: str
    quantity: str
    unit: str = "s"
    most: float | None = None  # the aim
    least: float | None = None

    @property
    def aim(self) -> Aim | None:
        if self.most is not None:
            return Aim(of="ours", sense="at most", value=self.most)
        return None if self.least is None else Aim(of="ours", sense="at least", value=self.least)


_START = "a peer starts behind a router that gives each connection another port"
_CALL = "a peer that others cannot call is called"
_BULK = "{} MiB from one peer to another"
_LOST = "one of two relays is lost; three peers that call each other through relays alone"
_CROWD = f"{CROWD_PEERS} peers send 1 MB each and get it back, through a relay of {CROWD_MBIT} Mbit/s"
FIGURES = {
    "pairs": Figure(
        workload="peers behind no router, full cone, port-preserving, symmetric and relay-only, 25 pairs",
        quantity="pairs of which one calls the other",
        unit="%",
        least=100.0,
    ),
    "verdict": Figure(workload=_START, quantity="until it knows that others cannot call it", most=3.0),
    "reservation": Figure(
        workload=_START,
        quantity="from then until it is announced with a relay, libp2p's import included",
        most=2.0,
    ),
    "memory": Figure(
        workload=_START,
        quantity="memory, more than of a peer that is called directly",
        unit="bytes",
        most=60e6,
    ),
    "idle": Figure(
        workload="a peer that nothing is asked of, with reservations at two relays",
        quantity="processor time, more than of a peer that is called directly",
        unit="%",
        most=0.5,
    ),
    "first-relayed": Figure(workload=_CALL, quantity="first call, through a relay", most=0.15),
    "punched": Figure(
        workload=_CALL,
        quantity="from the first call until a direct connection stands; routers keep ports",
        most=1.0,
    ),
    "call-relayed": Figure(workload=_CALL, quantity="a later call, through a relay"),
    "call-punched": Figure(workload=_CALL, quantity="a later call, over the punched connection"),
    "call-direct": Figure(workload="a peer with an open port is called", quantity="a later call"),
    "rate-relayed": Figure(workload=_BULK, quantity="through a relay", unit="MB/s", least=20.0),
    "rate-punched": Figure(workload=_BULK, quantity="over a punched connection", unit="MB/s", least=60.0),
    "rate-direct": Figure(workload=_BULK, quantity="to an open port", unit="MB/s"),
    "processor-relay": Figure(
        workload=_BULK, quantity="processor time of the relay for a megabyte", unit="ms/MB", most=30.0
    ),
    "processor-ends-relayed": Figure(
        workload=_BULK,
        quantity="processor time of an end for a megabyte, through a relay, gRPC included",
        unit="ms/MB",
        most=15.0,
    ),
    "processor-ends-punched": Figure(
        workload=_BULK,
        quantity="processor time of an end for a megabyte, over a punched connection, gRPC included",
        unit="ms/MB",
        most=15.0,
    ),
    "trainer": Figure(
        workload="a peer behind a router trains, and another one fetches 5 MB/s of it through a relay",
        quantity="training steps a second, fewer than without the fetch",
        unit="%",
        most=3.0,
    ),
    "killed": Figure(
        workload=_LOST,
        quantity="it is killed: until the next call is answered, the slowest of three",
        most=1.0,
    ),
    "unplugged": Figure(
        workload=_LOST,
        quantity="its cable is cut: until the next call is answered, the slowest of three",
        most=5.0,
    ),
    **{
        f"{name}-{milliseconds}": Figure(
            workload=f"{_CALL}, {milliseconds} ms of round trip between any two networks",
            quantity=quantity,
            most=most,
        )
        for milliseconds, punched_s in ROUND_TRIPS_MS.items()
        for name, quantity, most in (
            # three round trips of the way over the relay, which is twice as long
            ("first-relayed", "first call, through a relay", 0.15 + 6e-3 * milliseconds),
            (
                "punched",
                "from the relayed connection until a direct one stands; routers keep ports",
                punched_s,
            ),
        )
    },
    "crowd": Figure(
        workload=_CROWD,
        quantity="per cent of the relay's link",
        unit="%",
    ),
    "crowd-evenness": Figure(
        workload=_CROWD,
        quantity="time of the first that has ended, of that of the last",
        unit="%",
    ),
}


@dataclass(slots=True)
class Samples(Failures):
    """The samples of all figures, by their names."""

    found: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, *values: float) -> None:
        """Add samples of one figure."""
        self.found.setdefault(name, []).extend(values)

    def rows(self, mebibytes: int) -> list[Row]:
        """Return a row for each figure that has samples. `mebibytes`: how much one peer has sent another."""
        return [
            Row(
                identifier=f"reach-{name}",
                workload=figure.workload.format(mebibytes),
                quantity=figure.quantity,
                ours=self.series_of(f"swarm: {name}", self.found[name], figure.unit),
                peer=None,
                aim=figure.aim,
                limit="round trips are not in it, since links have no delay here"
                if figure.unit == "s" and "of round trip" not in figure.workload
                else "",
            )
            for name, figure in FIGURES.items()
            if name in self.found
        ]
