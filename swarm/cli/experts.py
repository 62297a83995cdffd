"""`swarm experts`: list the experts of a swarm."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from swarm.cli import options
from swarm.cli.finding import given_entry
from swarm.cli.identity import open_entry_identity
from swarm.cli.render import print_result
from swarm.run.entering import enter

if TYPE_CHECKING:
    from moe.client.finding import FoundExpert, FoundReplica


@click.command(context_settings=options.CONTEXT)
@options.entries(required=True)
@click.option(
    "--experts",
    "pattern",
    metavar="PATTERN",
    default="*",
    help="Only these: 'ffn.*', 'ffn.[0:4].*', or one name. [default: all]",
)
@click.option(
    "--timeout-s",
    type=options.BoundedNumber(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds to wait for each answer.",
)
@options.as_json
def experts(addresses: tuple[str, ...], pattern: str, timeout_s: float, as_json: bool) -> int:
    """List the experts of the swarm at ADDRESS: replicas, versions, load.

    The version of an expert counts its optimizer steps and its averages with replicas. The wait is how long
    a request would wait at the server with the shortest queue now. Busy is the fraction of the time in which
    the expert's servers compute, on average; from 70 % on it gets further servers. With --json, every replica
    is listed.

    \b
    Examples:
      swarm experts /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
      swarm experts ADDRESS --experts 'ffn.[0:4].*' --json
    """
    from moe.client.finding import find_experts
    from moe.protocol.finding import ExpertPattern
    from swarm.node import Node

    if pattern != "*":
        ExpertPattern.parse(pattern)  # report a wrong pattern before any peer is called
    entry = given_entry(addresses, None, None, (), role="observe")
    assert entry is not None
    with (
        contextlib.closing(open_entry_identity(entry.identity, entry.bootstrap)) as own,
        Node(bootstrap=entry.bootstrap, listen=None, identity=own) as node,
    ):
        enter(node, entry.bootstrap)
        found = find_experts(node, pattern, timeout_s=timeout_s)
    fields = {"experts": [_fields(expert) for expert in found]}
    print_result("experts", fields, _table(found, pattern), as_json=as_json)
    return 0


def _fields(expert: FoundExpert) -> dict[str, Any]:
    return {
        "name": expert.name,
        "version": expert.version,
        "replicas": [_replica_fields(replica) for replica in expert.replicas],
    }


def _replica_fields(replica: FoundReplica) -> dict[str, Any]:
    return {**asdict(replica), "peer_id": str(replica.peer_id)}


def _table(found: Sequence[FoundExpert], pattern: str) -> str:
    """Return a table with one line for each expert, and the servers that did not answer."""
    if not found:
        return "no expert exists" + ("" if pattern == "*" else f" that {pattern} stands for")
    width = max(len("expert"), *(len(expert.name) for expert in found))
    lines = [f"{'expert':<{width}}  replicas   version     wait   busy  takes and returns"]
    for expert in found:
        answered = [one for one in expert.replicas if not one.failure]
        schema = next((one.schema for one in answered), "no server of it answers")
        wait = f"{min(one.wait_s for one in answered):.2f} s" if answered else "-"
        busy = f"{100 * fmean(one.busy for one in answered):.0f} %" if answered else "-"
        frozen = " (frozen)" if answered and all(one.frozen for one in answered) else ""
        version = "-" if expert.version is None else f"{expert.version:,}"
        numbers = f"{len(answered):>8}  {version:>8}  {wait:>7}  {busy:>5}"
        lines.append(f"{expert.name:<{width}}  {numbers}  {schema}{frozen}")
    failures = {one.peer_id: one.failure for expert in found for one in expert.replicas if one.failure}
    if failures:
        lines.append(f"servers that did not answer: {len(failures)}")
        lines += [f"  {failure}" for failure in failures.values()]
    return "\n".join(lines)
