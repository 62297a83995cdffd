"""The task `causal-lm`: a language model of the Hugging Face ecosystem, trained as a whole, from scratch, or
with LoRA. It needs the extra `swarm-train[hf]`.

A run's file names files by their hashes and settings within bounds. Weights are read from safetensors only,
no code of a model is run, and no name in a run's file is a path (`swarm.run.tasks.model_files`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm.core.errors import UsageError
from swarm.run.owned import explain
from swarm.run.task import TaskDescription
from swarm.run.tasks.model_files import HUB_NAME, ModelFiles, data_files, model_files

if TYPE_CHECKING:
    import torch

    from swarm.run.task import TaskData

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$"
# Additional memory of a process compared with the task bytelm: 113 MB were measured with a tiny model.
_LIBRARIES_BYTES = 120 << 20
_NEEDED = ("transformers", "peft", "safetensors", "pyarrow", "huggingface_hub")


class Lora(BaseModel):
    """Low-rank adapters: only these are trained and averaged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: Annotated[int, Field(ge=1, le=1024)] = 8
    alpha: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] = 16.0
    # names of the layers with adapters, as in PEFT; empty: all linear layers but the output
    targets: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,64}$")], ...], Field(max_length=64)
    ] = ()


class LanguageModelSettings(BaseModel):
    """Model, data and method of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # "owner/name": of the hub, with `revision`; "name": in the user's folder of models, with `digest`
    model: Annotated[str, Field(pattern=_NAME)]
    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = None  # the commit's hash
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None  # of the folder's files
    method: Literal["lora", "full", "from-scratch"] = "lora"
    lora: Lora = Lora()
    # a data set of the hub, with its revision; None: the folder of --data, or the Python standard library
    data: Annotated[str, Field(pattern=HUB_NAME)] | None = None
    data_revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = None
    split: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")] = "train"
    column: Annotated[str, Field(min_length=1, max_length=64)] = "text"  # of JSON lines and of data sets
    data_bytes: Annotated[int, Field(ge=1 << 10, le=1 << 34)] = (
        16 << 20
    )  # upper bound of the text that is read
    sequence_length: Annotated[int, Field(ge=8, le=1 << 17)] = 512  # tokens of one sample
    # True: samples are cut from the concatenated documents; False: each is the beginning of one document
    packing: bool = True
    # dtype of the computation; parameters and averages are float32. auto: bfloat16 if the GPU supports it
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    gradient_checkpointing: bool = False  # saves memory, takes a third more time
    # interval of text samples in epochs; 0: never
    sample_every_epochs: Annotated[int, Field(ge=0, le=1 << 20)] = 20
    prompt: Annotated[str, Field(min_length=1, max_length=500)] = "The"

    @model_validator(mode="after")
    def _what_is_downloaded_is_pinned(self) -> LanguageModelSettings:
        if "/" in self.model and self.revision is None:
            raise ValueError(
                "a model of the hub needs revision, the hash of a commit (40 hexadecimal digits)"
            )
        if "/" not in self.model and self.revision is not None:
            raise ValueError("revision is for a model of the hub; a folder has a digest")
        if (self.data is None) != (self.data_revision is None):
            raise ValueError("data and data_revision belong together")
        return self


class CausalLanguageModel:
    """The task of predicting the next token of a text."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raise UsageError if the settings are not valid, a package is missing, or the model's folder is not
        the one in the settings.
        """
        missing = [name for name in _NEEDED if find_spec(name) is None]
        if missing:
            raise UsageError(
                f"the task 'causal-lm' needs {', '.join(missing)}: "
                "install them with: pip install 'swarm-train[hf]'"
            )
        try:
            self.settings = LanguageModelSettings.model_validate(dict(settings))
        except ValidationError as error:
            raise UsageError("\n".join(explain(error, "task.settings"))) from error
        chosen = self.settings
        self.files: ModelFiles = model_files(
            chosen.model, chosen.revision, chosen.digest, weights=chosen.method != "from-scratch"
        )

    @cached_property
    def _config(self) -> Any:
        from swarm.run.tasks.causal_lm_model import read_config

        return read_config(self.files)

    def describe(self, batch_size: int) -> TaskDescription:
        """Return size and memory. Of a model on the hub, only the configuration is downloaded."""
        from swarm.run.tasks.causal_lm_model import activation_values, skeleton

        chosen = self.settings
        model = skeleton(self._config, chosen)
        trained = [tuple(one.shape) for one in model.parameters() if one.requires_grad]
        elements = sum(one.numel() for one in model.parameters() if one.requires_grad)
        everything = sum(one.numel() for one in model.parameters())
        how = {
            "lora": f"LoRA of rank {chosen.lora.rank} on",
            "full": "all parameters of",
            "from-scratch": "from scratch:",
        }[chosen.method]
        values = activation_values(self._config, checkpointing=chosen.gradient_checkpointing)
        downloads = self.files.downloads
        if chosen.data is not None and chosen.data_revision is not None:
            downloads += data_files(
                chosen.data, chosen.data_revision, chosen.split, chosen.data_bytes
            ).downloads
        return TaskDescription(
            summary=f"{how} {chosen.model} ({everything:,} parameters) on text",
            parameters=elements,
            shapes=tuple(trained),
            sample=f"{chosen.sequence_length} tokens of text",
            memory_bytes=_LIBRARIES_BYTES
            + 4 * (everything + batch_size * chosen.sequence_length * values)
            + 3 * chosen.data_bytes,
            data_bytes=3 * chosen.data_bytes,
            downloads=downloads,
        )

    def build_model(self, seed: int) -> torch.nn.Module:
        from swarm.run.tasks.causal_lm_model import build

        return build(self._config, self.files, self.settings, seed)

    def load_data(self, folder: Path | None, device: torch.device) -> TaskData:
        from swarm.run.tasks.causal_lm_data import TextData
        from swarm.run.tasks.causal_lm_model import load_tokenizer
        from swarm.run.tasks.documents import documents_of

        return TextData(
            documents_of(folder, self.settings), load_tokenizer(self.files), self.settings, device
        )

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        """Write a PEFT adapter, or a folder for `from_pretrained`."""
        from swarm.run.tasks.causal_lm_model import export

        export(model, self.files, self.settings, folder)
