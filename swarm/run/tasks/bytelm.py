"""The task `bytelm`: a byte-level transformer language model on text.

The default text is the source of the Python standard library, which every machine has. This module does not
import torch until a model is built, so that a run can be described while torch is still being imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm.core.errors import UsageError
from swarm.run.owned import explain
from swarm.run.task import TaskDescription
from swarm.run.tasks.corpus import VALIDATION_SAMPLES, VOCABULARY

if TYPE_CHECKING:
    import torch

    from swarm.run.task import TaskData

_DATA_BYTES_MAX = 32 << 20


class Settings(BaseModel):
    """Shape of the model and of a sample."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: Annotated[int, Field(ge=8, le=16384)] = 96
    layers: Annotated[int, Field(ge=1, le=256)] = 2
    heads: Annotated[int, Field(ge=1, le=256)] = 4
    context: Annotated[int, Field(ge=2, le=1 << 16)] = 128  # predicted bytes per sample
    # experts of each feed-forward layer, which is then a mixture; 0: one layer for all bytes
    experts: Annotated[int, Field(ge=0, le=1024)] = 0
    experts_per_byte: Annotated[int, Field(ge=1, le=16)] = 2
    # upper bound of the bytes that are read
    data_bytes: Annotated[int, Field(ge=1 << 10, le=1 << 34)] = _DATA_BYTES_MAX

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Settings:
        if self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads})")
        return self


class ByteLanguageModel:
    """The task of predicting the next byte of a text."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raise UsageError if the settings are not valid."""
        try:
            self.settings = Settings.model_validate(dict(settings))
        except ValidationError as error:
            raise UsageError("\n".join(explain(error, "task.settings"))) from error

    def describe(self, batch_size: int) -> TaskDescription:
        shape = self.settings
        width = shape.width
        norm = [(width,), (width,)]
        feed = [(4 * width, width), (width, 4 * width)]
        gate = [(shape.experts, width), (shape.experts,)] if shape.experts else []
        block = [*norm, (3 * width, width), (width, width), *norm, *gate, *max(1, shape.experts) * feed]
        shapes = [
            (VOCABULARY, width),
            (shape.context, width),
            *shape.layers * block,
            *norm,
            (VOCABULARY, width),
        ]
        parameters = sum(math.prod(one) for one in shapes)
        # float32 values per token in a training step: activations of each block, temporaries of one block,
        # and the logits with their softmax and gradient. In validation: one block and the logits.
        used = min(shape.experts, shape.experts_per_byte)  # each has activations, and an output in the sum
        step = batch_size * shape.context * ((shape.layers + 1) * (20 + 14 * used) * width + 3 * VOCABULARY)
        held_out = VALIDATION_SAMPLES * shape.context * ((12 + 14 * used) * width + 3 * VOCABULARY)
        of_experts = f", {used} of {shape.experts} experts in each" if used else ""
        return TaskDescription(
            summary=f"a byte-level transformer ({shape.layers} layers of width {width}{of_experts}) on text",
            parameters=parameters,
            shapes=tuple(shapes),
            sample=f"{shape.context} bytes of text",
            memory_bytes=4 * (parameters + max(step, held_out)) + shape.data_bytes,
            data_bytes=shape.data_bytes,
        )

    def build_model(self, seed: int) -> torch.nn.Module:
        from swarm.run.tasks.bytelm_model import ByteExperts, ByteTransformer

        shape = self.settings
        return ByteTransformer(
            width=shape.width,
            layers=shape.layers,
            heads=shape.heads,
            context=shape.context,
            seed=seed,
            experts=ByteExperts(count=shape.experts, per_byte=shape.experts_per_byte),
        )

    def load_data(self, folder: Path | None, device: torch.device) -> TaskData:
        from swarm.run.tasks.bytelm_model import ByteData
        from swarm.run.tasks.corpus import read_corpus

        corpus = read_corpus(
            folder, bytes_max=self.settings.data_bytes, sample_bytes=self.settings.context + 1
        )
        return ByteData(corpus, context=self.settings.context, device=device)
