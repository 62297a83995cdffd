"""A few cases of every target of `make fuzz`, from fixed seeds, and the defects that it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import swarm
from averaging.optim.state import checkpoint
from moe.protocol.names import ExpertUid
from moe.server.checkpoints import ExpertCheckpoints
from swarm.cli.control import Control
from swarm.core.errors import PeerError
from tests.fuzz.files import good_checkpoint, save_expert, with_metadata
from tests.fuzz.making import Maker
from tests.fuzz.run import run_case, targets

CASES = 40


@pytest.mark.parametrize("name", [name for name, _ in targets()])
def test_made_input_is_refused_with_a_sentence(name: str) -> None:
    case = dict(targets())[name]
    for number in range(CASES):
        assert run_case(case, f"1/{name}/{number}") == ""


def test_equal_seeds_make_equal_input() -> None:
    seeds = [bytes(range(200)), b"\x93\x01\x02\x03"]
    first, again = ([Maker(f"{number}").raw(seeds) for number in range(200)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 150


@pytest.mark.parametrize("text", ["[" * 100_000, "[1, 2]", '"text"', "{}", "[[[]]]"])
def test_a_checkpoint_with_a_damaged_description_is_skipped(tmp_path: Path, text: str) -> None:
    file = tmp_path / "epoch-0000000001.safetensors"
    file.write_bytes(with_metadata(good_checkpoint(), {"tensors": text}))
    with pytest.raises(PeerError, match="damaged"):
        checkpoint.read(file)
    found, wrong = checkpoint.Checkpoints(tmp_path).newest_good()
    assert (found, len(wrong)) == (None, 1)
    assert file.exists()


@pytest.mark.parametrize("counts", ["[" * 100_000, "[1, 2]", '{"past": [[1, 2]]}', "{}"])
def test_a_checkpoint_of_an_expert_with_a_damaged_description_is_left_out(
    tmp_path: Path, counts: str
) -> None:
    expert = swarm.Expert(torch.nn.Linear(4, 4), (torch.zeros(1, 4),))
    checkpoints = ExpertCheckpoints(tmp_path, {ExpertUid.parse("ffn.0"): expert})
    file = save_expert(checkpoints.generations(ExpertUid.parse("ffn.0")), expert, counts)
    assert checkpoints.load() == []
    assert file.exists()


@pytest.mark.parametrize("text", ["[" * 16_000, json.dumps({"pid": "x"}), json.dumps([1]), "{}"])
def test_a_damaged_file_of_a_running_command_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "1.json").write_text(text)
    assert Control(tmp_path).running() == []
