"""Settings of modes that contradict one another are refused."""

from __future__ import annotations

from typing import Any

import pytest

from averaging.optim.epoch_averager import AveragingOptions, check_codec
from averaging.optim.modes.settings import Diloco
from averaging.reduction.lowrank import PowerSgd
from swarm.core.errors import UsageError
from tests.averaging.optim.seats import seat


@pytest.mark.parametrize(
    "settings", [Diloco(streaming=2), Diloco(delayed=True)], ids=["streaming", "delayed"]
)
def test_powersgd_is_refused_where_rounds_average_no_matrices(settings: Diloco) -> None:
    options = AveragingOptions(codec="float16", strategy=PowerSgd(rank=2))
    check_codec(options, seat(Diloco()).mode.traits)
    with pytest.raises(UsageError, match="not matrices: PowerSGD is not for it"):
        check_codec(options, seat(settings).mode.traits)


@pytest.mark.parametrize(
    "settings", [{"delayed": True, "streaming": 2}, {"delay_steps": 2}, {"delayed": True, "delay_steps": -1}]
)
def test_settings_of_rounds_beside_training_that_contradict_one_another_are_refused(
    settings: Any,
) -> None:
    with pytest.raises(UsageError, match="Diloco"):
        Diloco(**settings)
