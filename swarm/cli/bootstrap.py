"""`swarm bootstrap`: a peer that only helps others to find each other."""

from __future__ import annotations

from typing import Any

import click

from swarm.cli import options
from swarm.cli.identity import open_identity
from swarm.cli.paths import bootstrap_identity
from swarm.cli.render import make_output
from swarm.cli.render.volunteer import VolunteerPresentation
from swarm.cli.shutdown import Shutdown
from swarm.core.errors import UsageError
from swarm.core.wording import counted
from swarm.run.events import Listening, Notice

_REPORT_S = 5.0  # interval in which the number of known peers is checked


@click.command(context_settings=options.CONTEXT)
@click.option(
    "--identity",
    metavar="FILE",
    default=None,
    help="The identity file of this entry point; `new`: a new one that is not kept. [default: this user's, "
    "for entry points]",
)
@click.option(
    "--bootstrap",
    metavar="ADDRESS",
    multiple=True,
    help="Another entry point of the same swarm. Repeatable.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="0.0.0.0:4000",
    show_default=True,
    help="Where to listen; port 0 picks a free one.",
)
@options.announce
@options.relay_mbit(50.0)
@options.as_json
@options.exit_with_parent
def bootstrap(
    identity: str | None, bootstrap: tuple[str, ...], as_json: bool, exit_with_parent: bool, **where: Any
) -> int:
    """Run a long-lived entry point: a peer through which others join, and that does not train.

    Its identity stays the same between starts, so its address does too. It does not need torch.

    \b
    Examples:
      swarm bootstrap
      swarm bootstrap --listen 0.0.0.0:4001 --identity ~/entry.identity
      swarm bootstrap --announce 203.0.113.7
    """
    from swarm.node import Node, NodeConfig
    from swarm.run.membership import follow_run

    listen, announce = options.listen_at(where["listen"], where["announce"], ()), where["announce"]
    if listen is None:
        raise UsageError("an entry point must accept calls, and --listen none refuses all: leave it out")
    with (
        Shutdown(exit_with_parent=exit_with_parent) as shutdown,
        make_output(VolunteerPresentation(), as_json=as_json) as output,
    ):
        own = open_identity(identity, bootstrap_identity())
        try:
            config = NodeConfig(announce=announce, relay_mbit=where["relay_mbit"])
            with Node(bootstrap=bootstrap, listen=listen, identity=own, config=config) as node:

                def show_addresses() -> None:
                    for address in node.addresses:
                        output.emit(Notice(text=f"others join with: swarm join {address}"))

                def show_reach(sentence: str) -> None:
                    output.emit(Notice(text=sentence))
                    show_addresses()

                follow_run(node)
                output.emit(Listening(peer_id=str(node.peer_id), addresses=node.addresses, reach=node.reach))
                show_addresses()
                output.emit(Notice(text="a new run begins with: swarm start RUN.toml --bootstrap ADDRESS"))
                node.tell_reach(show_reach)
                known = 0
                while not shutdown.requested.wait(_REPORT_S):
                    if len(node.peers()) != known:
                        known = len(node.peers())
                        output.emit(Notice(text=f"{counted(known, 'peer')} known"))
                output.emit(Notice(text=f"leaving: {shutdown.reason}"))
        finally:
            own.close()
    return 0
