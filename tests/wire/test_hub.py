"""A model of the hub, which a server on loopback stands in for: described, downloaded, verified, and started
again without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("peft", reason="needs the extra hf")

from swarm.testing.tiny_model import write_tiny_model

COMMIT = "1234567890" * 4
PROGRAM = f"""
from swarm.run.task import make_task
task = make_task("causal-lm", {{"model": "owner/tiny", "revision": "{COMMIT}"}})
print(task.describe(1).downloads[0], flush=True)
print(sum(one.numel() for one in task.build_model(0).parameters()), "values")
"""


DATA_PROGRAM = f"""
from swarm.run.tasks.model_files import data_files
for path in data_files("owner/tiny", "{COMMIT}", "train", 1000).paths():
    print(path.name, path.read_text())
"""


class Hub:
    """A hub with one model, or one data set, at one commit."""

    def __init__(self, files: dict[str, bytes], kind: str = "models") -> None:
        self.files = files
        resolve = f"{'/datasets' if kind == 'datasets' else ''}/owner/tiny/resolve/{COMMIT}/"
        self.served = dict(self.files)  # may be damaged
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append(self.path)
                path = self.path.partition("?")[0]
                if path == f"/api/{kind}/owner/tiny/revision/{COMMIT}":
                    self._send(json.dumps(hub.listing()).encode(), {"Content-Type": "application/json"})
                elif (name := path.removeprefix(resolve)) in hub.served:
                    content = hub.served[name]
                    tag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                    self._send(content, tag)
                else:
                    self.send_error(404)

            do_HEAD = do_GET

            def _send(self, content: bytes, headers: dict[str, str]) -> None:
                self.send_response(200)
                for key, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def listing(self) -> dict[str, object]:
        def entry(name: str, content: bytes) -> dict[str, object]:
            git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            digest = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            large = {"lfs": digest} if name.endswith(".safetensors") else {}
            return {"rfilename": name, "size": len(content), "blobId": git, **large}

        files = [entry(name, content) for name, content in self.files.items()]
        card = {"license": "apache-2.0"}
        return {
            "id": "owner/tiny",
            "modelId": "owner/tiny",
            "sha": COMMIT,
            "siblings": files,
            "cardData": card,
        }

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_tiny_model(tmp_path / "tiny")
    one = Hub({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
    yield one
    one.close()


def build(hub: Hub, folder: Path, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    """Build the model in a process of its own, because the hub's address is read once."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_port}",
        "HF_HOME": str(folder / "hf"),
        "SWARM_HOME": str(folder / "swarm"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_model_of_a_hub_is_downloaded_once_and_starts_without_the_network(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "tiny" / "pytorch_model.bin").write_bytes(b"a pickle")
    hub.files["pytorch_model.bin"] = hub.served["pytorch_model.bin"] = b"a pickle"
    first = build(hub, tmp_path)
    assert first.returncode == 0, first.stderr
    assert "from the Hugging Face hub (licence apache-2.0)" in first.stdout
    assert not [path for path in hub.asked if "pytorch_model" in path], "pickles are not even downloaded"
    hub.close()
    again = build(hub, tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout


def test_model_that_was_changed_on_the_way_is_refused(hub: Hub, tmp_path: Path) -> None:
    name = "model.safetensors"
    hub.served[name] = hub.files[name][:-1] + bytes([hub.files[name][-1] ^ 1])
    done = build(hub, tmp_path)
    assert done.returncode != 0
    assert f"{name} does not have the hash that" in done.stderr


def test_data_set_of_a_hub_is_downloaded_once_and_read_without_the_network(tmp_path: Path) -> None:
    hub = Hub({"data/train-0.txt": b"some text", "data/test-0.txt": b"other text"}, "datasets")
    with contextlib.closing(hub):
        first = build(hub, tmp_path, DATA_PROGRAM)
    assert (first.returncode, first.stdout) == (0, "train-0.txt some text\n"), first.stderr
    assert not [path for path in hub.asked if "test-0" in path]
    again = build(hub, tmp_path, DATA_PROGRAM)
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
