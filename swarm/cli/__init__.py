"""The `swarm` command. Importing it loads click and nothing heavy, so that `swarm --help` answers at once.

Every error that a user or a peer can cause arrives here as a SwarmError or a click exception. It is printed
as one sentence on standard error, with exit code 1 (failed) or 2 (usage), never as a traceback. Any other
exception is a bug and shows its traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

FAILED = 1
USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Without arguments, as the installed script calls it, this function ends the process itself.
    """
    # By default torch's CPU threads (GNU OpenMP) spin for milliseconds while they wait for one another. On a
    # busy machine this takes most of a step. With this setting they sleep soon, which costs little on an idle
    # machine. It is read when torch is imported; a value that the user has set is kept.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    code = _run(arguments)
    if arguments is None:
        # Everything is closed. Skip the interpreter's shutdown: unloading torch takes a second on a busy
        # machine.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    import click

    from swarm.cli.commands import swarm
    from swarm.cli.render import shown_work
    from swarm.cli.render.output import report_error
    from swarm.core.errors import SwarmError, UsageError

    _set_up_logging()
    asked = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with shown_work(asked):
            code = swarm.main(args=asked, prog_name="swarm", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except click.ClickException as error:
        hint = (
            f" See `{error.ctx.command_path} --help`."
            if isinstance(error, click.UsageError) and error.ctx
            else ""
        )
        report_error(error.format_message() + hint, as_json="--json" in asked)
        return USAGE
    except UsageError as error:
        report_error(str(error), as_json="--json" in asked)
        return USAGE
    except SwarmError as error:
        report_error(str(error), as_json="--json" in asked)
        return FAILED
    except (KeyboardInterrupt, click.Abort):
        report_error("stopped", as_json=False)
        return FAILED
    except BrokenPipeError:
        # The reader of the output has closed it. Without this, the interpreter would report an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code if isinstance(code, int) else 0


def _set_up_logging() -> None:
    """Show the library's log only from the level in SWARM_LOG (error by default; info or debug for more)."""
    import logging

    level = os.environ.get("SWARM_LOG", "error").upper()
    known = level if level in logging.getLevelNamesMapping() else "ERROR"
    logging.basicConfig(
        level=known, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
