"""The commands and their options. The work is in the modules that the bodies import, so that help costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from swarm import __version__
from swarm.core.device import DEVICE_NAMES, check_device_name
from swarm.core.errors import UsageError

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def _device_name(context: click.Context, option: click.Parameter, value: str) -> str:
    """Refuse a name that is no device. Whether this machine has the device is checked by the command, since
    that takes torch.
    """
    try:
        return check_device_name(value)
    except UsageError as error:
        raise click.BadParameter(f"{error}.", context, option) from error


_listen = click.option(
    "--listen", metavar="HOST:PORT", default=None, help="Where to listen; port 0 picks a free one."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON lines, one per event.")
_device = click.option(
    "--device",
    metavar="DEVICE",
    callback=_device_name,
    default="auto",
    show_default=True,
    help=f"Where to compute: {DEVICE_NAMES}; auto is CUDA where there is one, else the CPU.",
)
_data = click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=None,
    help="Train on the text files of this folder.",
)
_name = click.option(
    "--name", default="", help="What those who watch the run may call this machine; at most 40 characters."
)
_yes = click.option("--yes", "-y", is_flag=True, help="Do not ask before training begins.")
_parent = click.option(
    "--exit-with-parent", is_flag=True, hidden=True, help="Leave when standard input ends."
)
_upload = click.option(
    "--upload",
    metavar="MBIT",
    type=click.FloatRange(min=0.1),
    default=None,
    help="Send no faster, in Mbit/s.",
)
_download = click.option(
    "--download",
    metavar="MBIT",
    type=click.FloatRange(min=0.1),
    default=None,
    help="Receive no faster, in Mbit/s.",
)
_hours = click.option(
    "--hours",
    metavar="FROM-TO",
    multiple=True,
    help="Train in these hours only (local time): 22-7. Repeatable.",
)
_memory = click.option(
    "--memory",
    metavar="SIZE",
    default=None,
    help="Take no more memory than this: 4G. Leaves before it takes more.",
)
_resume = click.option(
    "--resume", is_flag=True, help="Go on from the newest good checkpoint on this machine."
)
_from = click.option(
    "--from",
    "addresses",
    metavar="ADDRESS",
    multiple=True,
    help="A peer of the run; may be given several times.",
)


def _training(every: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """The options of who trains; the state is saved as often as `every` unless they say otherwise."""
    text = "Save the state so often: 90s, 10m, 2h; 0 for never."
    saving = click.option("--checkpoint-every", metavar="TIME", default=every, show_default=True, help=text)
    options = (
        saving,
        _resume,
        _upload,
        _download,
        _hours,
        _memory,
        _listen,
        _device,
        _data,
        _name,
        _json,
        _parent,
    )

    def add(command: Callable[..., object]) -> Callable[..., object]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__, "--version", message="swarm %(version)s")
def swarm() -> None:
    """Strangers train one neural network together, with no master.

    \b
      swarm demo                            watch four peers train a model on this machine
      swarm start examples/bytelm.toml      found a run; prints the line with which others join
      swarm join ADDRESS                    volunteer for it
      swarm serve --experts 'ffn.[0:4]'     host experts that others call
      swarm monitor ADDRESS                 watch it
    """


@swarm.command(context_settings=_CONTEXT, short_help="Watch several peers train a model on this machine.")
@click.option(
    "--volunteers",
    type=click.IntRange(1, 16),
    default=3,
    show_default=True,
    help="How many train, the founder included.",
)
@click.option(
    "--seconds",
    type=click.IntRange(5, 3600),
    default=60,
    show_default=True,
    help="How long they train together.",
)
@click.option(
    "--web",
    metavar="HOST:PORT",
    default=None,
    help="Also a monitor, with its page there; port 0 picks a free one.",
)
@_json
@_parent
def demo(volunteers: int, seconds: int, web: str | None, as_json: bool, exit_with_parent: bool) -> int:
    """Train a small language model with several peers on this machine.

    A bootstrap peer and some volunteers, each a process of its own, learn the Python standard library's
    sources byte by byte. Nothing leaves this machine, and nothing is left running.

    \b
    Examples:
      swarm demo
      swarm demo --volunteers 5 --seconds 120
      swarm demo --web 127.0.0.1:8080
      swarm demo --json > demo.jsonl
    """
    from swarm.cli.demo import run_demo

    return run_demo(
        volunteers=volunteers, seconds=seconds, web=web, as_json=as_json, exit_with_parent=exit_with_parent
    )


@swarm.command(context_settings=_CONTEXT, short_help="Found a run and train as its first volunteer.")
@click.argument("file", metavar="RUN.toml", type=click.Path(path_type=Path))
@click.option(
    "--bootstrap",
    metavar="ADDRESS",
    multiple=True,
    help="A peer of an existing swarm; may be given several times.",
)
@click.option(
    "--identity",
    metavar="FILE",
    default=None,
    help="The owner's identity; `new` for one that is forgotten. [default: this user's]",
)
@_training(every="10m")
def start(
    file: Path, bootstrap: tuple[str, ...], identity: str | None, listen: str | None, **options: object
) -> int:
    """Found a run and train as its first volunteer.

    Publishes the run's signed specification and prints the line with which others join. Started again with
    the same file and identity while others still train, it takes part in what they have reached; with a
    changed file, it publishes the change.

    \b
    Examples:
      swarm start examples/bytelm.toml
      swarm start examples/bytelm.toml --listen 0.0.0.0:4000
      swarm start examples/bytelm.toml --resume
      swarm start RUN.toml --bootstrap /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
    """
    from swarm.cli.train import TrainChoices, found_and_train

    return found_and_train(
        file, TrainChoices.of(bootstrap=bootstrap, identity=identity, listen=listen, **options)
    )


@swarm.command(context_settings=_CONTEXT, short_help="Volunteer for a run.")
@click.argument("address", metavar="ADDRESS")
@click.option(
    "--run",
    "run",
    metavar="NAME",
    default=None,
    help="Which run, where the swarm has several: NAME, NAME@ID or ID.",
)
@click.option(
    "--identity", metavar="FILE", default=None, help="An identity to keep; without it, a new one each time."
)
@_yes
@_training(every="0")
def join(address: str, run: str | None, identity: str | None, listen: str | None, **options: object) -> int:
    """Volunteer for the run at ADDRESS.

    Says what will be trained, what memory it takes and what traffic to expect, asks, downloads the current
    state and trains until Ctrl-C.

    \b
    Examples:
      swarm join /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
      swarm join ADDRESS --run bytelm --yes
      swarm join ADDRESS --device cuda:1 --data ~/texts
      swarm join ADDRESS --upload 20 --download 50 --hours 22-7 --memory 4G
    """
    from swarm.cli.train import TrainChoices, join_and_train

    return join_and_train(
        run, TrainChoices.of(bootstrap=(address,), identity=identity, listen=listen, **options)
    )


@swarm.command(context_settings=_CONTEXT, short_help="Host experts for others to call.")
@click.argument("address", metavar="[ADDRESS]", required=False)
@click.option(
    "--experts",
    metavar="PATTERN",
    multiple=True,
    required=True,
    help="Their names, as a pattern: 'ffn.[0:4].[0:4]', or one name.",
)
@click.option(
    "--num-experts",
    type=click.IntRange(1, 4096),
    default=None,
    help="Only so many, in places of the grid that are free.",
)
@click.option(
    "--expert-class",
    default="ffn",
    show_default=True,
    help="ffn, transformer, causal_transformer, nop, or one of your own.",
)
@click.option(
    "--module",
    metavar="FILE.py",
    type=click.Path(path_type=Path),
    default=None,
    help="Your own file; --expert-class is a function in it.",
)
@click.option(
    "--hidden-dim", type=click.IntRange(1), default=1024, show_default=True, help="Width of the experts."
)
@click.option(
    "--sequence-length",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Of experts that take sequences.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["adam", "adamw", "sgd", "none"]),
    default="adam",
    show_default=True,
    help="none: frozen.",
)
@click.option("--lr", type=click.FloatRange(0), default=1e-3, show_default=True, help="Learning rate.")
@click.option(
    "--clip-norm",
    type=click.FloatRange(0, min_open=True),
    default=None,
    help="Scale gradients down to this norm.",
)
@click.option(
    "--warmup-steps",
    type=click.IntRange(0),
    default=0,
    help="Steps over which the learning rate rises to its full value.",
)
@click.option(
    "--training-steps",
    type=click.IntRange(1),
    default=None,
    help="Step at which the learning rate has fallen to zero.",
)
@_device
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of the experts.",
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Samples in one batch, and in one request.",
)
@click.option(
    "--checkpoint",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=None,
    help="Resume from this folder, save to it.",
)
@click.option(
    "--keep-activations-mb",
    type=click.IntRange(0),
    default=0,
    help="Keep activations for backward instead of recomputing them.",
)
@click.option(
    "--average-s",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Between averages with replicas elsewhere; 0: never.",
)
@click.option(
    "--identity", metavar="FILE", default=None, help="An identity to keep; without it, a new one each time."
)
@_listen
@_json
@_parent
def serve(**options: object) -> int:
    """Host experts: layers that others call forward and backward, and that learn from it.

    Declares them in the swarm at ADDRESS, or founds a swarm of its own and prints its address. Experts that
    somebody else hosts, too, are replicas: callers use either, and their parameters are averaged. Ctrl-C
    finishes what is being computed and takes the experts back.

    \b
    Examples:
      swarm serve --expert-class ffn --hidden-dim 1024 --experts 'ffn.[0:4].[0:4]'
      swarm serve ADDRESS --experts 'ffn.[0:32].[0:32]' --num-experts 16 --checkpoint ~/experts
      swarm serve ADDRESS --experts 'block.[0:12]' --expert-class causal_transformer --device cuda --dtype bfloat16
      swarm serve ADDRESS --experts 'mine.[0:8]' --module mine.py --expert-class make_mine --optimizer adamw --lr 3e-4
    """
    from swarm.cli.serve import ServeChoices, serve_experts

    return serve_experts(ServeChoices.of(**options))


@swarm.command(context_settings=_CONTEXT, short_help="Let what trains on this machine pause.")
@click.argument("run", metavar="[RUN]", required=False)
@_json
def pause(run: str | None, as_json: bool) -> int:
    """Let the volunteers of this user on this machine pause: all, or those of RUN (a name, an id, a PeerID or
    a process id).

    A volunteer that pauses leaves the run's rounds at once, so that nobody waits for it, and keeps the model
    in memory.

    \b
    Examples:
      swarm pause
      swarm pause bytelm
    """
    from swarm.cli.admin import pause as work

    return work(run, paused=True, as_json=as_json)


@swarm.command(context_settings=_CONTEXT, short_help="Let what was paused train again.")
@click.argument("run", metavar="[RUN]", required=False)
@_json
def resume(run: str | None, as_json: bool) -> int:
    """Let volunteers go on after `swarm pause`. They fetch what the swarm has reached meanwhile.

    \b
    Examples:
      swarm resume
      swarm resume bytelm
    """
    from swarm.cli.admin import pause as work

    return work(run, paused=False, as_json=as_json)


@swarm.command(context_settings=_CONTEXT, short_help="Change a run that you own while others train it.")
@click.argument("run", metavar="RUN")
@_from
@click.option("--identity", metavar="FILE", default=None, help="The owner's identity. [default: this user's]")
@click.option(
    "--target-batch-size",
    type=click.IntRange(1),
    default=None,
    help="Samples of the whole swarm in one epoch.",
)
@click.option(
    "--pause/--resume",
    "paused",
    default=None,
    help="Let nobody train for a while; members stay and keep the state.",
)
@click.option("--end/--reopen", "ended", default=None, help="The run is over for everybody.")
@click.option(
    "--ban",
    metavar="PEERID",
    multiple=True,
    help="Let nobody deal with this peer; may be given several times.",
)
@click.option("--unban", metavar="PEERID", multiple=True, help="Let a banned peer in again.")
@_json
def change(run: str, addresses: tuple[str, ...], identity: str | None, as_json: bool, **asked: object) -> int:
    """Change a run that you own: publishes the next version of its signed specification, which those who
    train follow within seconds.

    RUN is a name, NAME@ID or an id. Without --from it is reached through a volunteer of this user on this
    machine.

    \b
    Examples:
      swarm change bytelm --target-batch-size 4096
      swarm change bytelm --pause
      swarm change bytelm --ban 12D3KooW... --from /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
    """
    from swarm.cli.admin import Where
    from swarm.cli.admin import change as work

    return work(Where(run=run, addresses=addresses, identity=identity), asked, as_json=as_json)


@swarm.command(context_settings=_CONTEXT, short_help="Write a run's model to a file.")
@click.argument("run", metavar="RUN")
@_from
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    help="The safetensors file to write.",
)
@click.option(
    "--optimizer", is_flag=True, help="With the optimizer's statistics, as `optimizer.NAME.STATISTIC`."
)
@_json
def export(run: str, addresses: tuple[str, ...], output: Path, optimizer: bool, as_json: bool) -> int:
    """Write a run's model to a safetensors file: what torch's load_state_dict takes.

    From the newest good checkpoint on this machine, or with --from as the run's peers have it now.

    \b
    Examples:
      swarm export bytelm -o bytelm.safetensors
      swarm export bytelm -o bytelm.safetensors --from /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
    """
    from swarm.cli.admin import Where
    from swarm.cli.admin import export as work

    return work(Where(run=run, addresses=addresses), output, optimizer=optimizer, as_json=as_json)


@swarm.command(context_settings=_CONTEXT, short_help="Be a long-lived entry point that trains nothing.")
@click.option(
    "--identity",
    metavar="FILE",
    default=None,
    help="Its identity file; `new` for one that is forgotten. [default: one of its own]",
)
@click.option(
    "--bootstrap",
    metavar="ADDRESS",
    multiple=True,
    help="Another entry point of the same swarm; may be given several times.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="0.0.0.0:4000",
    show_default=True,
    help="Where to listen; port 0 picks a free one.",
)
@_json
@_parent
def bootstrap(
    identity: str | None, bootstrap: tuple[str, ...], listen: str, as_json: bool, exit_with_parent: bool
) -> int:
    """Be a long-lived entry point: a peer that others join by, and that trains nothing.

    Its identity stays the same between starts, so its address does. It needs no torch.

    \b
    Examples:
      swarm bootstrap
      swarm bootstrap --listen 0.0.0.0:4001 --identity ~/entry.identity
    """
    from swarm.cli.bootstrap import run_bootstrap

    return run_bootstrap(
        identity=identity,
        bootstrap=bootstrap,
        listen=listen,
        as_json=as_json,
        exit_with_parent=exit_with_parent,
    )


@swarm.command(context_settings=_CONTEXT, short_help="Watch a run; train nothing.")
@click.argument("address", metavar="ADDRESS")
@click.option(
    "--run",
    "run",
    metavar="NAME",
    default=None,
    help="Which run, where the swarm has several: NAME, NAME@ID or ID.",
)
@click.option("--web", metavar="HOST:PORT", default=None, help="Serve a page; port 0 picks a free one.")
@click.option(
    "--prometheus", metavar="HOST:PORT", default=None, help="Serve metrics for Prometheus (docs/metrics.md)."
)
@click.option(
    "--experts",
    metavar="GRID",
    multiple=True,
    help="Of experts show those of this grid only: ffn. Repeatable.",
)
@click.option(
    "--save",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=None,
    help="Keep checkpoints of the run there.",
)
@click.option(
    "--every", metavar="TIME", default="10m", show_default=True, help="How often to save: 90s, 10m, 2h."
)
@click.option(
    "--keep", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many checkpoints to keep."
)
@click.option(
    "--log",
    metavar="FILE.jsonl",
    type=click.Path(path_type=Path),
    default=None,
    help="Append events and views to a file.",
)
@click.option(
    "--history",
    metavar="FILE",
    default=None,
    help="Where to keep what was seen; `none` for nowhere. [default: a file for each run]",
)
@click.option("--once", is_flag=True, help="Look once, print, and end.")
@_json
@_parent
def monitor(address: str, **options: object) -> int:
    """Watch the run at ADDRESS: a peer that trains nothing and that nobody has to trust.

    Shows progress, loss, throughput, every peer, the last rounds with the reasons of those that failed, and
    what happens. What is old is shown as old. ADDRESS is any live peer's; when it goes, the monitor goes on
    through the others.

    \b
    Examples:
      swarm monitor /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
      swarm monitor ADDRESS --web 127.0.0.1:8080
      swarm monitor ADDRESS --run bytelm --prometheus 0.0.0.0:9464 --log run.jsonl
      swarm monitor ADDRESS --save checkpoints --every 30m
      swarm monitor ADDRESS --once --json
    """
    from swarm.cli.monitor import MonitorChoices, run_monitor

    return run_monitor(MonitorChoices.of(address=address, **options))


@swarm.command(context_settings=_CONTEXT, short_help="Show or make an identity.")
@click.option("--identity", metavar="FILE", default=None, help="The identity file. [default: this user's]")
@click.option("--create", is_flag=True, help="Make the file if there is none.")
@_json
def identity(identity: str | None, create: bool, as_json: bool) -> int:
    """Show or make an identity: the key that says who a peer is and which runs it owns.

    \b
    Examples:
      swarm identity
      swarm identity --create
      swarm identity --create --identity ~/other.identity
    """
    from swarm.cli.identity import show_identity

    return show_identity(identity, create=create, as_json=as_json)
