"""Three volunteers train a tiny language model with LoRA over loopback; its adapter loads in PEFT."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("peft", reason="needs the extra hf")

import torch

from averaging.optim.state.checkpoint import write
from swarm.core.errors import UsageError
from swarm.node import Node
from swarm.run import events
from swarm.run.exporting import export, read_checkpoint
from swarm.run.task import make_task
from swarm.testing.tiny_model import write_tiny_model
from tests.wire.volunteers import HERE, VolunteerThread, created_run

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def settings_of(folder: Path) -> dict[str, Any]:
    (folder / "texts").mkdir()
    lines = "".join(f"{number} times two is {2 * number}.\n" for number in range(2000))
    (folder / "texts" / "numbers.txt").write_text(lines)
    write_tiny_model(folder / "models" / "tiny")
    with pytest.raises(UsageError) as refused:
        make_task("causal-lm", {"model": "tiny"})
    digest = str(refused.value).rpartition('digest = "')[2].rstrip('"')
    return {"model": "tiny", "digest": digest, "sequence_length": 32, "sample_every_epochs": 3}


def test_three_volunteers_lower_the_held_out_loss_and_their_adapter_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    task = {"name": "causal-lm", "settings": settings_of(tmp_path)}
    more = {"target_batch_size": 24, "optimizer": {"learning_rate": 1e-2}}
    with created_run(task=task, **more) as (node, _, signed):
        joining = [Node(bootstrap=node.addresses, listen=HERE) for _ in range(2)]
        try:
            data = tmp_path / "texts"
            peers = [VolunteerThread(node, signed, new=True, data=data)]
            peers += [VolunteerThread(one, signed, new=False, data=data) for one in joining]
            for one in peers:
                one.wait(events.EpochDone, lambda event: event.peers == 3)
            place = peers[0].wait(events.EpochDone, lambda event: event.validation_loss is not None)
            before = cast(events.EpochDone, peers[0].events[place]).validation_loss or 0.0
            place = peers[0].wait(
                events.EpochDone, lambda event: (event.validation_loss or 9.0) < before - 0.1
            )
            assert cast(events.EpochDone, peers[0].events[place]).metrics["perplexity"] < math.exp(before)
            peers[0].wait(events.TextSample)
            fetched = peers[0].volunteer.training.optimizer.state_view()
            model = peers[0].volunteer.training.model
            names = [name for name, one in model.named_parameters() if one.requires_grad]
            write(fetched, tmp_path / "state.safetensors", names)
            fetched.close()
            for one in peers:
                one.stop.set()
            for one in peers:
                one.end()
        finally:
            for other in joining:
                other.close()
    out = tmp_path / "adapter"
    export(signed, read_checkpoint(tmp_path / "state.safetensors"), out, optimizer=False)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "tiny", local_files_only=True)
    adapted = PeftModel.from_pretrained(base, out)
    loaded = make_task("causal-lm", task["settings"]).load_data(data, torch.device("cpu"))
    assert loaded.validation_loss(adapted) < before - 0.05
