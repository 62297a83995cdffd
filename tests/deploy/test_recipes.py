"""The recipes in deploy/: their structure, and that every swarm command in them is one that swarm accepts."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from swarm.cli.commands import swarm
from swarm.net.bulk_server import PORTS_APART
from swarm.run.specification import RunSpecification

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OBJECTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
WORKLOADS = [one for one in OBJECTS if one["kind"] in ("StatefulSet", "Deployment")]
SHELL = [
    *(one["command"][0] for one in COMPOSE["services"].values()),
    *(
        container["args"][0]
        for one in WORKLOADS
        for container in one["spec"]["template"]["spec"]["containers"]
        if "args" in container
    ),
    *(yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())[key] for key in ("setup", "run")),
    (DEPLOY / "slurm.sh").read_text(),
]
SWARM_COMMAND = re.compile(r"\bswarm ((?:bootstrap|start|join)\b[^;|&>]*)")


@pytest.mark.parametrize("script", SHELL)
def test_shell_scripts_have_no_syntax_error(script: str) -> None:
    checked = subprocess.run(
        ["bash", "-n"], input=script.replace("$$", "$"), text=True, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_every_swarm_command_of_the_recipes_is_accepted() -> None:
    found = [line for script in SHELL for line in SWARM_COMMAND.findall(script.replace("\\\n", " "))]
    assert len(found) == 8
    for line in found:
        name, *arguments = shlex.split(line.replace("$$", "$"))
        command = swarm.get_command(click.Context(swarm), name)
        assert command is not None
        command.make_context(name, arguments, resilient_parsing=False)


def test_recipes_install_the_clone_because_no_index_has_the_package() -> None:
    recipes = "\n".join(path.read_text() for path in DEPLOY.iterdir() if path.is_file())
    assert "not on the package index yet" in (DEPLOY.parent / "README.md").read_text()
    assert "swarm-train" not in recipes
    assert yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())["workdir"] == "."


def test_the_run_of_the_recipes_is_a_specification() -> None:
    specification = RunSpecification.from_file(DEPLOY / "run.toml")
    joining = [one for one in SHELL if "swarm join" in one and "$RUN" not in one]
    assert len(joining) == 2
    assert all(f"--run {specification.name}" in one for one in joining)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one["metadata"]["name"])
def test_workloads_of_kubernetes_select_their_pods_and_mount_what_they_declare(
    workload: dict[str, Any],
) -> None:
    spec = workload["spec"]
    assert workload["apiVersion"] == "apps/v1"
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    pod = spec["template"]["spec"]
    declared = {one["name"] for one in pod["volumes"]}
    declared |= {one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", ())}
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        assert {one["name"] for one in container["volumeMounts"]} <= declared
        assert re.fullmatch(r"swarm(:cuda)?", container["image"])
    for container in pod["containers"]:
        assert {"requests", "limits"} <= container["resources"].keys()
    assert pod["securityContext"]["runAsUser"] != 0
    assert pod["terminationGracePeriodSeconds"] >= 30  # time to say goodbye
    if workload["kind"] == "StatefulSet":
        services = {one["metadata"]["name"]: one["spec"] for one in OBJECTS if one["kind"] == "Service"}
        assert services[spec["serviceName"]]["clusterIP"] == "None"


def test_services_of_compose_mount_declared_volumes_and_depend_on_services() -> None:
    for service in COMPOSE["services"].values():
        assert set(service.get("depends_on", ())) <= COMPOSE["services"].keys()
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists()


def test_the_dockerfile_pins_its_base_copies_what_exists_and_does_not_run_as_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    instructions = [line.split(maxsplit=1) for line in lines]
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL"}
    assert {name for name, _ in instructions} <= known | {"ENTRYPOINT", "CMD"}
    for name, rest in instructions:
        if name == "FROM":
            assert re.match(r"\S+:\d[\w.-]+", rest), "an image without a version"
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (DEPLOY.parent / source).exists(), source
        if name == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest
    assert [rest for name, rest in instructions if name == "USER"][-1] not in ("root", "0")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_images_are_built_as_the_dockerfile_says_where_docker_is_at_hand() -> None:
    root = DEPLOY.parent
    shown = subprocess.run(
        ["make", "--dry-run", "images"], cwd=root, capture_output=True, text=True, check=True
    )
    builds = [line for line in shown.stdout.splitlines() if line.startswith("docker build")]
    said = re.findall(r"^#   (docker build .*?\.)(?:  |$)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert builds == said
    assert len(builds) == 2
    assert "make images" in (root / ".ci" / "run").read_text()


def test_the_address_of_an_entry_point_is_read_from_its_events(tmp_path: Path) -> None:
    file = tmp_path / "entry.jsonl"
    program = [sys.executable, str(DEPLOY / "entry_address.py"), str(file)]
    assert subprocess.run(program, capture_output=True, check=False).returncode == 1
    file.write_text(
        '{"event": "listening", "addresses": ["/ip4/127.0.0.1/tcp/4000/tls/http/p2p/12D3KooWx", '
        '"/ip4/10.1.2.3/tcp/4000/tls/http/p2p/12D3KooWx"]}\n'
    )
    for extra, expected in (
        ([], "/ip4/10.1.2.3/tcp/4000/tls/http/p2p/12D3KooWx"),
        (["swarm-entry"], "/dns/swarm-entry/tcp/4000/tls/http/p2p/12D3KooWx"),
    ):
        printed = subprocess.run([*program, *extra], capture_output=True, text=True, check=True)
        assert printed.stdout.strip() == expected


def test_recipes_that_expose_the_port_expose_the_bulk_port_too() -> None:
    for name in ("Dockerfile", "kubernetes.yaml", "skypilot.yaml"):
        text = (DEPLOY / name).read_text()
        assert str(4000 + PORTS_APART) in text, name
    both = {4000, 4000 + PORTS_APART}
    assert both <= set(yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())["resources"]["ports"])
    for document in OBJECTS:
        if document["kind"] == "Service":
            assert both <= {port["port"] for port in document["spec"]["ports"]}
