"""Checkpoints: a read returns what was written, or an error that says why not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from averaging.history.chain import Chain
from averaging.history.encoding import CHAIN_BYTES_MAX, encode_chain
from averaging.history.lineage import Lineage
from averaging.optim.state import checkpoint
from averaging.optim.state.checkpoint import Checkpoints, names_of, public_names
from averaging.optim.state.snapshot import read_header
from averaging.optim.state.training_state import TrainingState, past_of_header
from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.ids import PeerId
from tests.averaging.history.peers import PEERS, RUN, certificate, upon


def made(seed: int) -> tuple[torch.nn.Module, TrainingState, list[str]]:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    inner = torch.optim.AdamW(
        [{"params": list(net[2].parameters()), "lr": 0.05}, {"params": list(net[:2].parameters())}], lr=0.1
    )
    state = TrainingState(inner, list(net.buffers()), torch.optim.lr_scheduler.StepLR(inner, 2, 0.5))
    return net, state, names_of(net, inner)


def train(net: torch.nn.Module, state: TrainingState, steps: int) -> list[float]:
    generator, losses = torch.Generator().manual_seed(state.epoch), []
    for _ in range(steps):
        state.inner.zero_grad()
        loss = net(torch.randn(16, 4, generator=generator)).square().mean()
        loss.backward()
        with state.lock:
            state.inner.step()
            assert state.scheduler is not None
            state.scheduler.step()
            state.agree_extras()
            state.mark_changed(state.epoch + 1)
        losses.append(float(loss.detach()))
    return losses


def test_resuming_from_a_file_continues_bit_for_bit(tmp_path: Path) -> None:
    net, state, names = made(1)
    train(net, state, 5)
    kept = Checkpoints(tmp_path / "run")
    path = kept.save(state.view(), names, {"run": "x"})
    expected = train(net, state, 5)
    other, resumed, _ = made(2)
    found, wrong = kept.newest_good()
    assert found is not None
    assert (found.path, found.epoch, wrong) == (path, 5, [])
    resumed.load(found.blob)
    assert resumed.epoch == 5
    assert train(other, resumed, 5) == expected


def test_a_file_keeps_the_head_of_the_history_that_its_state_belongs_to(tmp_path: Path) -> None:
    net, state, names = made(1)
    train(net, state, 2)
    root = Chain(
        head=b"h" * 32, electors=(PeerId(bytes(32)),), certificates=(), root_epoch=2, root_line=b"l" * 32
    )
    with state.lock:
        state.mark_changed(2, root=root)
    kept = Checkpoints(tmp_path)
    kept.save(state.view(), names)
    found, _ = kept.newest_good()
    assert found is not None
    _, resumed, _ = made(2)
    resumed.load(found.blob)
    assert resumed.root == root


def history_of(rounds: int) -> Chain:
    """Return the certificates of a run of three peers."""
    lineage = Lineage(RUN, PEERS[0])
    for _ in range(rounds):
        lineage.extend(certificate(upon(lineage, PEERS[:3]), PEERS[:3]))
    return lineage.chain()


def test_a_file_keeps_the_certificates_that_lead_to_its_head_and_nothing_else(tmp_path: Path) -> None:
    """Regression test: files kept the head alone, and the dictionaries of torch the certificates, too."""
    past = history_of(4)
    _, state, names = made(1)
    with state.lock:
        state.mark_changed(4, root=past.end)
    kept = Checkpoints(tmp_path)
    kept.save(state.view(past=past), names)
    found, _ = kept.newest_good()
    assert found is not None
    header = read_header(found.blob)[0]
    assert past_of_header(header) == past
    assert past.valid_part(RUN) is past
    assert past.valid_part("another run") == past.end
    longer = history_of(5)
    assert "past" not in state.view(past=longer).header, "it leads to another head"
    with state.lock:
        state.mark_changed(4, root=replace(past.end, root_line=b"x" * 32))  # as a lying donor declares it
    assert "past" not in state.view(past=past).header, "no checkpoint could be loaded"
    assert "past" not in state.view().header, "donors give no certificates with a state"
    for wrong in (encode_chain(longer), b"x", "text", bytes(CHAIN_BYTES_MAX + 1)):
        with pytest.raises(PeerError):
            past_of_header(header | {"past": wrong})


def test_a_file_is_plain_safetensors_under_the_models_names(tmp_path: Path) -> None:
    net, state, names = made(1)
    train(net, state, 2)
    path = Checkpoints(tmp_path).save(state.view(), names)
    tensors = safetensors.torch.load_file(path)
    parameters = {
        key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")
    }
    assert parameters.keys() == dict(net.named_parameters()).keys()
    assert all(torch.equal(value, dict(net.named_parameters())[key]) for key, value in parameters.items())
    kept = state.inner.state[net[0].weight]  # type: ignore[index]
    assert torch.equal(tensors["optimizer.0.weight.exp_avg"], kept["exp_avg"])


def test_a_damaged_checkpoint_is_skipped_with_a_reason(tmp_path: Path) -> None:
    net, state, names = made(1)
    kept = Checkpoints(tmp_path)
    paths = []
    for _ in range(3):
        train(net, state, 1)
        paths.append(kept.save(state.view(), names))
    paths[1].write_bytes(paths[1].read_bytes()[:-5])
    raw = bytearray(paths[2].read_bytes())
    raw[-3] ^= 1
    paths[2].write_bytes(raw)  # one bit of the last tensor
    found, wrong = kept.newest_good()
    assert found is not None
    assert found.path == paths[0]
    assert "is damaged: its contents are not what was written" in wrong[0]
    assert "cannot be read" in wrong[1]
    paths[0].write_bytes(b"")
    assert kept.newest_good()[0] is None
    paths[0].unlink()
    paths[0].mkdir()
    assert f"{paths[0]} cannot be read: Is a directory" in kept.newest_good()[1]


def test_every_damage_raises_peer_error(tmp_path: Path) -> None:
    net, state, names = made(1)
    train(net, state, 1)
    path = Checkpoints(tmp_path).save(state.view(), names, {"run": "a name"})
    whole = path.read_bytes()
    described = 8 + int.from_bytes(whole[:8], "little")
    for at in [*range(described), *range(described, len(whole), 97)]:
        raw = bytearray(whole)
        raw[at] ^= 0x55
        path.write_bytes(raw)
        try:
            checkpoint.read(path)
        except PeerError:
            continue
        pytest.fail(
            f"byte {at} of {len(whole)} was changed, and nobody noticed: {whole[max(at - 20, 0) : at + 20]!r}"
        )


def test_old_checkpoints_are_deleted_and_no_partial_file_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, state, names = made(1)
    kept = Checkpoints(tmp_path, kept_max=2)
    for _ in range(4):
        train(net, state, 1)
        kept.save(state.view(), names)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch-0000000003.safetensors",
        "epoch-0000000004.safetensors",
    ]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    train(net, state, 1)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SwarmError, match="No space left"):
        kept.save(state.view(), names)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2, "the temporary file is gone, the others are there"


def at_epoch(state: TrainingState, epoch: int, line: bytes = b"") -> TrainingState:
    root = Chain(head=b"h" * 32, electors=(), certificates=(), root_epoch=epoch, root_line=line)
    with state.lock:
        state.mark_changed(epoch, root=root)
    return state


def test_a_checkpoint_just_written_is_never_removed(tmp_path: Path) -> None:
    """Regression test: the highest epochs were kept, so that a run that had begun again saved nothing."""
    _, state, names = made(1)
    kept = Checkpoints(tmp_path, kept_max=2)
    for epoch in (40, 50, 1, 2):
        path = kept.save(at_epoch(state, epoch).view(), names)
        assert path.exists()
        found, _ = kept.newest_good()
        assert found is not None
        assert (found.path, found.epoch) == (path, epoch)
        assert kept.newest_epoch() == epoch
    assert len(list(tmp_path.iterdir())) == 2
    for path in tmp_path.iterdir():  # as after the clock was set back by an hour
        os.utime(path, ns=(path.stat().st_mtime_ns + 3600 * 10**9,) * 2)
    path = kept.save(at_epoch(state, 3).view(), names)
    assert kept.newest_first()[0] == path


def test_each_line_of_history_keeps_its_own_checkpoints(tmp_path: Path) -> None:
    _, state, names = made(1)
    kept = Checkpoints(tmp_path, kept_max=2)
    for line in (b"", b"\xab" * 32, b"\xcd" * 32):
        for epoch in (7, 8, 9):
            kept.save(at_epoch(state, epoch, line).view(), names)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"epoch-000000000{epoch}-{line * 8}.safetensors" for epoch in (8,) for line in ("ab", "cd")),
        "epoch-0000000008.safetensors",
        *(f"epoch-000000000{epoch}-{line * 8}.safetensors" for epoch in (9,) for line in ("ab", "cd")),
        "epoch-0000000009.safetensors",
    ]
    for number in range(12):
        kept.save(at_epoch(state, 9, bytes([number]) * 32).view(), names)
    assert len(list(tmp_path.iterdir())) == 8, "the lines that nobody has written to for the longest time go"


def test_archived_checkpoints_stay_in_a_folder_of_their_own(tmp_path: Path) -> None:
    net, state, names = made(1)
    kept = Checkpoints(tmp_path / "run")
    assert kept.archive() is None
    train(net, state, 1)
    kept.save(state.view(), names)
    aside = kept.archive()
    assert aside is not None
    assert len(Checkpoints(aside).newest_first()) == 1
    assert kept.newest_first() == []


def test_two_tensors_under_one_name_are_refused() -> None:
    assert public_names(["p.0", "p.1", "x.0"], ["weight"]) == ["model.weight", "model.1", "extra.0"]
    with pytest.raises(UsageError, match="one name"):
        public_names(["p.0", "p.1"], ["weight", "weight"])


def test_half_written_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    net, state, names = made(1)
    train(net, state, 1)
    left = tmp_path / ".epoch-0000000009.safetensors.77.tmp"
    left.write_bytes(b"half")
    path = Checkpoints(tmp_path).save(state.view(), names)
    assert list(tmp_path.iterdir()) == [path]
