"""`swarm bootstrap`: a peer that only helps others find each other."""

from __future__ import annotations

from swarm.cli.identity import open_identity
from swarm.cli.paths import bootstrap_identity
from swarm.cli.render import make_output
from swarm.cli.shutdown import Shutdown
from swarm.run.events import Listening, Notice

_LOOK_S = 5.0


def run_bootstrap(
    *, identity: str | None, bootstrap: tuple[str, ...], listen: str, as_json: bool, exit_with_parent: bool
) -> int:
    """Serve until Ctrl-C, SIGTERM, or the end of the parent."""
    from swarm.node import Node

    with Shutdown(exit_with_parent=exit_with_parent) as leaving, make_output(as_json=as_json) as output:
        own = open_identity(identity, bootstrap_identity())
        try:
            with Node(bootstrap=bootstrap, listen=listen, identity=own) as node:
                output.emit(Listening(peer_id=str(node.peer_id), addresses=node.addresses))
                for address in node.addresses:
                    output.emit(Notice(text=f"others enter with: --bootstrap {address}"))
                known = 0
                while not leaving.requested.wait(_LOOK_S):
                    if len(node.peers()) != known:
                        known = len(node.peers())
                        output.emit(Notice(text=f"{known} peer{'s' if known != 1 else ''} known"))
                output.emit(Notice(text=f"leaving: {leaving.why}"))
        finally:
            own.close()
    return 0
