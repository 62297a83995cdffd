"""Export the model of a run: as a safetensors file that torch's `load_state_dict` accepts, or as the folder
that its task writes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.files import replace_durably
from swarm.core.working import working
from swarm.run.signed import SignedSpecification
from swarm.run.task import make_task

if TYPE_CHECKING:
    import torch

    from averaging.optim.state.checkpoint import Checkpoint


def newest_checkpoint(folder: Path, run: str) -> Checkpoint:
    """Return the newest valid checkpoint in `folder`. Raise SwarmError if there is none."""
    from averaging.optim.state.checkpoint import Checkpoints

    with working("reading the checkpoint"):
        found, wrong = Checkpoints(folder).newest_good()
    if found is None:
        why = "; ".join(wrong[:3]) or f"nothing was saved in {folder}"
        raise SwarmError(
            f"this machine has no checkpoint of {run}: {why}. "
            "Fetch the state from its peers with --from ADDRESS"
        )
    return found


def export(signed: SignedSpecification, checkpoint: Checkpoint, path: Path, *, optimizer: bool) -> None:
    """Write the model's `state_dict` with its buffers and, if `optimizer` is true, the optimizer's
    statistics; if the task has a format of its own, write it to the folder `path`.

    Raises SwarmError if the checkpoint is of another model or the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from averaging.optim.state.checkpoint import MODEL, STATISTIC

    specification = signed.training
    chosen = specification.task
    task = make_task(chosen.name, chosen.settings, chosen.package)
    with working("building the model"):
        model = task.build_model(specification.seed)
    _load(
        model,
        {name.removeprefix(MODEL): t for name, t in checkpoint.tensors.items() if name.startswith(MODEL)},
    )
    write_folder = getattr(task, "export", None)
    if write_folder is not None:
        if optimizer:
            raise UsageError(f"the task {chosen.name!r} exports a folder, without the optimizer's statistics")
        _write_folder(path, partial(write_folder, model))
        return
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    if optimizer:
        tensors |= {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(STATISTIC)}
    metadata = {
        "format": "pt",
        "run": signed.full_name,
        "epoch": str(checkpoint.epoch),
        "task": specification.task.name,
        "settings": json.dumps(specification.task.settings, sort_keys=True),
    }
    if path.is_dir():
        raise UsageError(f"{path} is a folder: --output names a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with working(f"writing {path.name}"):
            replace_durably(path, lambda temporary: save_file(tensors, temporary, metadata))
    except (OSError, SafetensorError) as error:
        raise SwarmError(f"{path} could not be written: {error}") from error


def _write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Write a folder of the task's own format. It appears under its name when it is complete."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists already: --output names a new folder for this task")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
            complete = Path(temporary) / path.name
            complete.mkdir()
            with working(f"writing {path.name}"):
                write(complete)
            complete.replace(path)
    except OSError as error:
        raise SwarmError(f"{path} could not be written: {error}") from error


def _load(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    import torch

    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if parameters.keys() != tensors.keys() or any(
        parameters[name].shape != tensor.shape for name, tensor in tensors.items()
    ):
        raise SwarmError("the checkpoint is of another model than the run's specification describes")
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a downloaded state as a checkpoint. Raise SwarmError if the file is not valid."""
    from averaging.optim.state.checkpoint import read

    try:
        with working("checking the state"):
            return read(path)
    except PeerError as error:
        raise SwarmError(str(error)) from error
