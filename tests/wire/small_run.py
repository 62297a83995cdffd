"""A run that a machine trains in seconds, for tests with real processes."""

from __future__ import annotations

from pathlib import Path

_SPECIFICATION = """
name = "small"
target_batch_size = {target}
batch_size = 4
state_sync_epochs = 3
[task]
name = "bytelm"
[task.settings]
width = {width}
layers = 1
heads = 2
context = {width}
data_bytes = 1000000
[optimizer]
learning_rate = 3e-3
"""


def write_small_run(
    folder: Path, more: str = "", *, target: int = 32, width: int = 32, sections: str = ""
) -> Path:
    """Write the specification, between `more` lines and `sections`, into a folder, and return the path of the
    file.
    """
    path = folder / "run.toml"
    path.write_text(more + _SPECIFICATION.format(target=target, width=width) + sections)
    return path
