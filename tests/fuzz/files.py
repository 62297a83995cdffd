"""Every file that a peer keeps and reads again: damaged ones must end in one sentence, or be left out."""

from __future__ import annotations

import functools
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from nacl.pwhash import argon2id
from nacl.secret import SecretBox

import swarm
from averaging.optim.state import checkpoint
from averaging.optim.state.training_state import TrainingState
from moe.protocol.names import ExpertUid
from moe.server.checkpoints import ExpertCheckpoints
from swarm.cli.control import Control
from swarm.core.files import read_json_copy
from swarm.core.identity import Identity
from swarm.core.passphrase import decrypt
from swarm.membership.ledger import MemberLedger
from swarm.monitor.history import ChartHistory
from swarm.net.peerbook import PeerBook
from swarm.run.membership import load_capability
from swarm.run.signed import sign
from swarm.run.specification import RunSpecification
from swarm.run.specification_store import SpecificationStore
from tests.averaging.history.peers import PEERS, identity
from tests.fuzz.making import Maker
from tests.fuzz.messages import CAPABILITIES, INVITES

FileCase = Callable[[Maker], object]
_FOLDER = tempfile.TemporaryDirectory(prefix="swarm-fuzz-")
_ROOT = Path(_FOLDER.name)
_TABLE = {"name": "fuzz", "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}}


def _identity(maker: Maker) -> object:
    file = _ROOT / "identity"
    file.touch(mode=0o600)
    file.write_bytes(maker.raw([identity(1).encode()]))
    return Identity.read(file)


def _exported(maker: Maker) -> object:
    with mock.patch.object(argon2id, "kdf", return_value=bytes(SecretBox.KEY_SIZE)):  # half a second and more
        return decrypt(b"swarm-secret-1 " + maker.raw([b"AAAA", b"QUJD" * 24]), "a passphrase")


def _peer_book(maker: Maker) -> object:
    item = {
        "peer_id": str(PEERS[1]),
        "addresses": ["/ip4/127.0.0.1/tcp/9/tls/http"],
        "last_seen_s": 1.0,
        "round_trip_s": 0.1,
        "agent": "x",
    }
    return PeerBook(PEERS[0], lambda: 1.0, _json_file(maker, {"format": 1, "peers": [item]}))


def _ledger(maker: Maker) -> object:
    peers = [[one.to_bytes().hex(), 3, 24.0, 1, 1e9, 2] for one in PEERS[1:3]]
    ledger = MemberLedger(PEERS[0])
    read_json_copy(
        _json_file(maker, {"format": 1, "rounds": 3, "peers": peers}), "ledger", 1 << 20, ledger.load
    )
    return ledger.encode()


def _capability(maker: Maker) -> object:
    folder = _ROOT / "runs"
    folder.mkdir(exist_ok=True)
    (folder / f"{INVITES[0].run_id}-{PEERS[1]}.capability").write_bytes(maker.raw(CAPABILITIES))
    return load_capability(folder, INVITES[0].run_id, PEERS[1])


@functools.cache
def _expert() -> swarm.Expert:
    return swarm.Expert(torch.nn.Linear(4, 4), (torch.zeros(1, 4),))


def save_expert(generations: checkpoint.Checkpoints, expert: swarm.Expert, counts: str) -> Path:
    """Write a complete checkpoint in which a text stands for the counts of the expert."""
    view, about = expert.state(), {"schema": expert.schema.digest.hex(), "expert": counts}
    try:
        return generations.save(view, expert.parameter_names, about)
    finally:
        view.close()


def _expert_checkpoint(maker: Maker) -> object:
    folder, uid = _ROOT / "experts", ExpertUid.parse("ffn.0")
    generations = ExpertCheckpoints(folder, {uid: _expert()}).generations(uid)
    counts = maker.changed({"version": 1, "past": [["00" * 16, 1]], "samples": 8})
    file = save_expert(generations, _expert(), _json(counts))
    if maker.rng.random() < 0.5:
        file.write_bytes(maker.mutated(file.read_bytes()))
    try:
        return ExpertCheckpoints(folder, {uid: _expert()}).load()
    finally:
        file.unlink(missing_ok=True)


def _control(maker: Maker) -> object:
    running = {
        "pid": 1,
        "started_s": 1.0,
        "name": "a",
        "run_id": "b",
        "peer_id": str(PEERS[0]),
        "addresses": ["/ip4/127.0.0.1/tcp/9"],
    }
    folder = _ROOT / "live"
    folder.mkdir(exist_ok=True)
    _json_file(maker, running).replace(folder / "1.json")
    return [one.matches("a") for one in Control(folder).running()]


def _json_file(maker: Maker, value: object) -> Path:
    """Write JSON with one value exchanged, or damaged JSON."""
    file = _ROOT / "file.json"
    raw = _json(maker.changed(value)).encode()
    file.write_bytes(raw if maker.rng.random() < 0.7 else maker.raw([raw]))
    return file


def _json(value: object) -> str:
    """Return a value as JSON; for one that JSON does not have, a text that nests too deep."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return "[" * 100_000


def _specification(maker: Maker) -> object:
    signed = sign(RunSpecification.from_table(_TABLE, "fuzz"), identity(1), version=1, created_s=1.0)
    file = _ROOT / "runs" / f"{signed.run_id}.specification"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(maker.raw([signed.blob]))
    return SpecificationStore(file.parent).all()


def _checkpoint(maker: Maker) -> object:
    """Read a checkpoint whose description has one value exchanged, or that is damaged anywhere."""
    good = good_checkpoint()
    metadata = _header(good)["__metadata__"]
    key = maker.rng.choice(sorted(metadata))
    if maker.rng.random() < 0.5:
        value = str(maker.changed(metadata[key]))
    else:
        value = maker.raw([metadata[key].encode()]).decode("utf-8", "replace")
    file = _ROOT / "checkpoint.safetensors"
    file.write_bytes(with_metadata(good, {key: value}) if maker.rng.random() < 0.7 else maker.mutated(good))
    return checkpoint.read(file)


def _header(raw: bytes) -> dict[str, Any]:
    """Return the description at the beginning of a safetensors file."""
    (length,) = struct.unpack_from("<Q", raw)
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return header


def with_metadata(raw: bytes, changes: dict[str, str]) -> bytes:
    """Return a safetensors file with other metadata."""
    header = _header(raw)
    header["__metadata__"].update(changes)
    changed = json.dumps(header).encode()
    return struct.pack("<Q", len(changed)) + changed + raw[8 + struct.unpack_from("<Q", raw)[0] :]


@functools.cache
def good_checkpoint() -> bytes:
    """Return a valid checkpoint."""
    file = _ROOT / "good.safetensors"
    view = TrainingState(torch.optim.Adam([torch.nn.Parameter(torch.ones(3, 2))], lr=0.1)).view()
    checkpoint.write(view, file, ["weight"])
    view.close()
    return file.read_bytes()


@functools.cache
def _good_charts() -> bytes:
    file = _ROOT / "good.sqlite"
    ChartHistory(file, "a run").close()
    return file.read_bytes()


def _charts(maker: Maker) -> object:
    folder = Path(tempfile.mkdtemp(dir=_ROOT))
    file = folder / "charts.sqlite"
    file.write_bytes(maker.raw([_good_charts()]))
    history = ChartHistory(file, "a run")
    try:
        return history.series(0.0, 1e9), history.events(), history.began_s()
    finally:
        history.close()
        for one in folder.iterdir():
            one.unlink()
        folder.rmdir()


FILES: dict[str, FileCase] = {
    "identity file": _identity,
    "exported identity": _exported,
    "peer book": _peer_book,
    "ledger": _ledger,
    "kept capability": _capability,
    "checkpoint of an expert": _expert_checkpoint,
    "file of a running command": _control,
    "kept specification": _specification,
    "checkpoint": _checkpoint,
    "charts of a monitor": _charts,
}
