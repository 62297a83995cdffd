"""Files of models and data sets that a run's file names: from the Hugging Face hub at a commit, or from the
user's folder of models. Every file is verified against a hash before it is used.

Names come from strangers. A model is named by one or two plain words, never by a path, and only files of a
few known names are read. Files of the hub stay in the user's cache of the hub (`HF_HOME`).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from swarm.core.errors import NetworkError, SwarmError, UsageError
from swarm.core.files import replace_durably
from swarm.core.home import home
from swarm.core.wording import size
from swarm.core.working import Update, working

HUB_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_TOKENIZER = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"}
)
_WEIGHTS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_DATA = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/){0,4}[A-Za-z0-9_][A-Za-z0-9_.-]*\.(?:parquet|jsonl|txt)")
_JSON_BYTES_MAX = 64 << 20  # of a tokenizer
_CONFIG_BYTES_MAX = 256 << 10
_PARTS_MAX = 4096  # layers or experts of a model
_HUB_TIMEOUT_S = 20.0
_READ_BYTES = 1 << 20


class ModelFiles(Protocol):
    """The files of one model."""

    downloads: tuple[str, ...]  # downloads from outside the swarm, as sentences for users

    def config(self) -> Path:
        """Return the path of the verified configuration."""
        ...

    def folder(self) -> Path:
        """Download missing files, and return the folder of all verified files."""
        ...


def model_files(name: str, revision: str | None, digest: str | None, *, weights: bool) -> ModelFiles:
    """Return the files of a model. `weights`: whether its weights are needed, not only its configuration and
    tokenizer.
    """
    if revision is None:
        return FolderFiles(home() / "models" / name, name, digest, weights=weights)
    return HubFiles("model", name, revision, weights=weights)


def _is_used(name: str, *, weights: bool) -> bool:
    return (
        name == _CONFIG
        or name in _TOKENIZER
        or (weights and (name == _INDEX or bool(_WEIGHTS.fullmatch(name))))
    )


class FolderFiles:
    """A folder in the user's folder of models, whose files together have a digest."""

    downloads: tuple[str, ...] = ()

    def __init__(self, path: Path, name: str, digest: str | None, *, weights: bool) -> None:
        """Raise UsageError if the folder is missing or has another digest."""
        self._path = path
        if not path.is_dir():
            raise UsageError(
                f"the run trains the model {name!r}, which its owner distributes: put its files into {path}"
            )
        used = sorted(one for one in path.iterdir() if one.is_file() and _is_used(one.name, weights=weights))
        whole = hashlib.sha256()
        for one in used:
            whole.update(f"{_hash_of(one, hashlib.sha256())}  {one.name}\n".encode())
        if digest is None:
            raise UsageError(
                f'the folder {path} needs a digest in task.settings: digest = "{whole.hexdigest()}"'
            )
        if whole.hexdigest() != digest:
            raise UsageError(
                f"the files in {path} are not those of the run (digest {whole.hexdigest()[:16]}…, not "
                f"{digest[:16]}…): replace them by those that the run's owner distributes"
            )
        check_files(path)

    def config(self) -> Path:
        return self._path / _CONFIG

    def folder(self) -> Path:
        return self._path


class HubFiles:
    """The files of a model or a data set on the hub, at one commit."""

    def __init__(
        self,
        kind: Literal["model", "dataset"],
        name: str,
        revision: str,
        *,
        weights: bool = True,
        pattern: str = "",
        bytes_max: int = 0,
    ) -> None:
        """Ask the hub what the commit has. Raise NetworkError if the hub does not answer."""
        self._kind, self._name, self._revision = kind, name, revision
        listed, licence = _hub_files(kind, name, revision)
        if kind == "model":
            self._files = [one for one in listed if _is_used(one.name, weights=weights)]
        else:
            self._files = _chosen_data(listed, pattern, bytes_max)
        if not self._files:
            raise UsageError(
                f"{name} at {revision[:12]} has no file that can be read: {kind}s are read from "
                + ("safetensors" if kind == "model" else "parquet, JSON lines and text")
            )
        whole = size(sum(one.size for one in self._files))
        known = f"licence {licence}" if licence else "its model card names no licence"
        self.downloads: tuple[str, ...] = (f"{name}: {whole} from the Hugging Face hub ({known})",)

    def config(self) -> Path:
        for one in self._files:
            if one.name == _CONFIG and one.size <= _CONFIG_BYTES_MAX:
                return self._fetch(one)
        raise UsageError(f"{self._name} at {self._revision[:12]} has no {_CONFIG}")

    def folder(self) -> Path:
        path = self.config().parent
        for one in self._files:
            self._fetch(one)
        check_files(path)
        return path

    def paths(self) -> list[Path]:
        """Return the paths of all files, verified."""
        return [self._fetch(one) for one in self._files]

    def _fetch(self, one: HubFile) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            with working(f"downloading {one.name} of {self._name}", unit="bytes") as update:
                path = Path(
                    hf_hub_download(
                        self._name,
                        one.name,
                        repo_type=self._kind,
                        revision=self._revision,
                        tqdm_class=_bar_for(update),
                    )
                )
        except (OSError, ValueError) as error:
            raise NetworkError(
                f"{one.name} of {self._name} could not be downloaded: {_line(error)}"
            ) from error
        if one.sha256 is not None:
            intact = _hash_of(path, hashlib.sha256()) == one.sha256
        else:
            intact = _hash_of(path, hashlib.sha1(f"blob {path.stat().st_size}\0".encode())) == one.git_hash
        if not intact:
            raise SwarmError(
                f"{path} does not have the hash that {self._name} has for it: remove it and try again"
            )
        return path


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it. Large files have a SHA-256, small ones the hash of a git blob."""

    name: str
    size: int
    sha256: str | None
    git_hash: str


def _hub_files(kind: str, name: str, revision: str) -> tuple[list[HubFile], str]:
    """Return the files of a repository at a commit, and the licence that its card names; empty if it names
    none.

    The hub is asked once for each commit, which never changes: later starts need no network.
    """
    from huggingface_hub import HfApi

    known = home() / "hub" / kind / f"{name.replace('/', '--')}@{revision}.json"
    if known.exists():
        table = read_json(known, _JSON_BYTES_MAX)
        return [HubFile(**one) for one in table["files"]], table["licence"]
    try:
        info = HfApi().repo_info(
            name, repo_type=kind, revision=revision, files_metadata=True, timeout=_HUB_TIMEOUT_S
        )
    except (OSError, ValueError) as error:
        raise NetworkError(
            f"the hub could not be asked for {name} at {revision[:12]}: {_line(error)}"
        ) from error
    if info.sha != revision:
        raise SwarmError(f"the hub has another commit of {name} than {revision[:12]}")
    files = [
        HubFile(one.rfilename, one.size or 0, one.lfs["sha256"] if one.lfs else None, one.blob_id or "")
        for one in info.siblings or []
    ]
    licence = str((info.card_data or {}).get("license") or "")[:60]
    known.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"files": [asdict(one) for one in files], "licence": licence})
    replace_durably(known, lambda temporary: temporary.write_text(content, encoding="utf-8"))
    return files, licence


def data_files(name: str, revision: str, split: str, bytes_max: int) -> HubFiles:
    """Return the files of a data set that belong to a split, up to `bytes_max`."""
    return HubFiles("dataset", name, revision, pattern=split, bytes_max=bytes_max)


def _chosen_data(listed: list[HubFile], split: str, bytes_max: int) -> list[HubFile]:
    named = [one for one in listed if _DATA.fullmatch(one.name) and split in re.split(r"[/._-]", one.name)]
    chosen: list[HubFile] = []
    for one in sorted(named, key=lambda one: one.name):
        if sum(other.size for other in chosen) >= bytes_max:
            break
        chosen.append(one)
    return chosen


def check_files(folder: Path) -> None:
    """Raise UsageError if the files of a model need code, or name files elsewhere."""
    if (folder / "adapter_config.json").exists():
        raise UsageError(f"{folder} has an adapter: name the model that it belongs to")
    for name in (_CONFIG, "tokenizer_config.json"):
        if (folder / name).exists():
            check_config(read_json(folder / name, _JSON_BYTES_MAX), folder / name)
    if (folder / _INDEX).exists():
        weights = read_json(folder / _INDEX, _JSON_BYTES_MAX).get("weight_map")
        if not isinstance(weights, dict) or not all(
            isinstance(one, str) and _WEIGHTS.fullmatch(one) for one in weights.values()
        ):
            raise UsageError(f"{folder / _INDEX} names files that are not weights in safetensors")


def check_config(config: dict[str, Any], where: Path) -> None:
    """Raise UsageError if a configuration needs custom code, or exceeds the limits of size."""
    for key in ("auto_map", "custom_pipelines", "quantization_config", "trust_remote_code"):
        if config.get(key):
            raise UsageError(f"{where} has {key}: models that need custom code are not supported")
    for key, value in config.items():
        # Each layer is a Python object even in a model without values, so the number is limited.
        if ("layer" in key or "expert" in key) and isinstance(value, int) and value > _PARTS_MAX:
            raise UsageError(f"{where}: {key} = {value} is more than is supported")


def read_json(path: Path, bytes_max: int) -> dict[str, Any]:
    """Return the table in a JSON file. Raise UsageError if it is not one, or is larger than `bytes_max`."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(bytes_max + 1)
        table = json.loads(raw) if len(raw) <= bytes_max else None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {_line(error)}") from error
    if not isinstance(table, dict):
        raise UsageError(f"{path} is not a table of JSON, or larger than {bytes_max >> 10} KiB")
    return table


def _bar_for(update: Update) -> type[Any]:
    """Return a class with which the hub's library reports a download, instead of a bar of its own."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **{**options, "disable": True})  # it prints nothing, and counts nothing
            self._done = int(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            update(self._done, int(self.total or 0))

    return Bar


def _hash_of(path: Path, digest: Any) -> str:
    """Return the digest, after updating it with the content of a file."""
    done, total = 0, path.stat().st_size
    with working(f"checking {path.name}", unit="bytes") as update, path.open("rb") as stream:
        while part := stream.read(_READ_BYTES):
            digest.update(part)
            done += len(part)
            update(done, total)
    return str(digest.hexdigest())


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:200]
