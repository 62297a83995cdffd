"""The task `digits`: a convolutional network that reads handwritten digits of 8 × 8 pixels.

Shape suffixes: B samples, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import swarm

if TYPE_CHECKING:
    import torch

    from swarm_digits.model import DigitsData

IMAGES = 1797
PIXELS = 64
CLASSES = 10


class Settings(BaseModel):
    """The table [task.settings] of a run file. A stranger may have written it: everything has bounds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    channels: Annotated[int, Field(ge=1, le=1024)] = 16


class Digits:
    """The task of telling which digit an image shows. Importing this module does not import torch."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raise UsageError if the settings are not valid."""
        try:
            self.settings = Settings.model_validate(dict(settings))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise swarm.UsageError(f"task.settings.{key}: {first['msg']}") from error

    def describe(self, batch_size: int) -> swarm.TaskDescription:
        channels = self.settings.channels
        shapes = (
            (channels, 1, 3, 3),
            (channels,),
            (2 * channels, channels, 3, 3),
            (2 * channels,),
            (CLASSES, 8 * channels),
            (CLASSES,),
        )
        parameters = 9 * channels + channels + 18 * channels * channels + 2 * channels
        parameters += 8 * channels * CLASSES + CLASSES
        # float32 values per sample: both convolutions with their activations and gradients
        values = batch_size * channels * 8 * PIXELS
        return swarm.TaskDescription(
            summary=f"a convolutional network of {channels} channels that reads digits",
            parameters=parameters,
            shapes=shapes,
            sample="an image of 8 × 8 pixels",
            memory_bytes=4 * (parameters + values + IMAGES * PIXELS),
        )

    def build_model(self, seed: int) -> torch.nn.Module:
        from swarm_digits.model import build_model

        return build_model(self.settings.channels, seed)

    def load_data(self, folder: Path | None, device: torch.device) -> DigitsData:
        from swarm_digits.model import DigitsData

        if folder is not None:
            raise swarm.UsageError(
                "the images of the task digits come with its package: start without --data"
            )
        return DigitsData(device)
