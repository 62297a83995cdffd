"""`swarm new-task`: write a package with a task, to start from."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import click

from swarm.cli import options
from swarm.cli.render import print_result
from swarm.core.errors import SwarmError, UsageError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_NAME_CHARACTERS_MAX = 40
# file of the template -> where it is written; my_task is replaced by the name of the module
_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "run.toml.txt": "run.toml",
    "task.py.txt": "my_task/__init__.py",
    "test_task.py.txt": "tests/test_task.py",
}


@click.command(context_settings=options.CONTEXT)
@click.argument("name")
@options.as_json
def new_task(name: str, as_json: bool) -> int:
    """Write a small package with a task of your own, its test and a run file, into the folder NAME.

    The task runs without changes: it learns a sine. Replace its model and its data by your own.

    \b
    Examples:
      swarm new-task my-task
    """
    if not _NAME.fullmatch(name) or len(name) > _NAME_CHARACTERS_MAX:
        raise UsageError(
            f"{name!r} is not a valid name for a package: use a-z, 0-9 and single hyphens, such as my-task, "
            f"and at most {_NAME_CHARACTERS_MAX} characters"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or find_spec(module) is not None:
        raise UsageError(f"Python has a module {module} already: choose another name")
    folder = Path(name)
    if folder.exists():
        raise UsageError(f"{folder} exists already: choose another name, or remove it")
    written = _write(folder, name)
    print_result(
        "task",
        {"name": name, "path": str(folder), "files": [str(path) for path in written]},
        f"{folder} is a package with the task {name}: {', '.join(str(path) for path in written)}\n"
        f"next: cd {folder} && pip install -e '.[test]' && python -m pytest && swarm start run.toml",
        as_json=as_json,
    )
    return 0


def _write(folder: Path, name: str) -> list[Path]:
    """Write the files of the template, with the name of the task in them. Return their paths."""
    module = name.replace("-", "_")
    names = {"my_task": module, "my-task": name}
    names |= {f"My{part}": _class_name(name, part) for part in ("Task", "Data")}
    written = []
    try:
        for source, target in _FILES.items():
            text = files("swarm.cli").joinpath("task_template", source).read_text(encoding="utf-8")
            for old, new in names.items():
                text, target = text.replace(old, new), target.replace(old, new)
            path = folder / target
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(Path(target))
    except OSError as error:
        raise SwarmError(f"{folder} could not be written: {error.strerror or error}") from error
    return written


def _class_name(name: str, part: str) -> str:
    words = "".join(word.capitalize() for word in name.split("-"))
    return words.removesuffix("Task") + part
