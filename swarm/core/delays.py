"""How long something usually takes: the one estimator of lateness and of answer times."""

from __future__ import annotations

from dataclasses import dataclass

_DEVIATIONS = 4.0  # deviations above the mean that delays rarely exceed


@dataclass(slots=True)
class DelayEstimate:
    """A running mean of delays and of their deviations from it, in seconds, as TCP estimates round trips (RFC
    6298).
    """

    mean_s: float
    deviation_s: float

    @classmethod
    def of_first(cls, delay_s: float) -> DelayEstimate:
        """Return the estimate after one delay, with half of the delay as its deviation: the first delay may
        include other times, such as that to connect.
        """
        return cls(delay_s, delay_s / 2.0)

    def observe(self, delay_s: float, weight: float) -> None:
        """Take a delay into the means, with this `weight` between 0 and 1."""
        error_s = delay_s - self.mean_s
        self.mean_s += weight * error_s
        self.deviation_s += weight * (abs(error_s) - self.deviation_s)

    @property
    def rarely_exceeded_s(self) -> float:
        """The mean plus four deviations."""
        return self.mean_s + _DEVIATIONS * self.deviation_s
