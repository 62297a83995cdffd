"""The time for which a peer that trains alone keeps its epoch open for peers that load its state. Pure."""

from __future__ import annotations

from typing import Final

# Share of the time in which a lone peer's epochs may exceed the target number of samples. Too small:
# newcomers join minutes later; too large: strangers that never join reduce the number of steps
_SHARE_MAX: Final = 0.2
# seconds in a full account. Too small: a newcomer on a slow link has not loaded the state at the end of the
# epoch
_FULL_S: Final = 20.0
_BEGIN_S: Final = _FULL_S / 2  # least balance for a wait; many short waits would let no newcomer in


class NewcomerWait:
    """The account of waits for newcomers. Times are a monotonic clock's, in seconds.

    Peers that are alone make epochs as short as their samples allow. A newcomer that needs longer than such
    an epoch to load a state, or only to report that it has it, would be behind forever.
    """

    def __init__(self, now_s: float) -> None:
        self._account_s, self._paid_s, self._waits = _FULL_S, now_s, False

    def empty(self) -> None:
        """Empty the account: no wait continues or begins until half of it is paid in again."""
        self._account_s, self._waits = 0.0, False

    def waits(self, now_s: float, *, newcomers: bool) -> bool:
        """Return whether to keep the full epoch open at this time. `newcomers`: whether peers are known that
        load a state, or have just done so. The time since the last call is charged if that call returned
        True.
        """
        elapsed_s, self._paid_s = max(now_s - self._paid_s, 0.0), now_s
        charged_s = elapsed_s if self._waits else 0.0
        self._account_s = min(self._account_s + _SHARE_MAX * elapsed_s - charged_s, _FULL_S)
        self._waits = newcomers and self._account_s > (0.0 if self._waits else _BEGIN_S)
        return self._waits
