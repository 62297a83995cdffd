"""The `swarm` command. Importing it loads click and nothing heavy: `swarm --help` answers at once.

Every error that a person can cause or should know of arrives here as a SwarmError or a click exception and
leaves as one sentence on standard error with exit code 1 (failed) or 2 (usage), never as a traceback. What is
left is a bug, and a bug shows its traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

FAILED = 1
USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Called without arguments, as the installed script does, it
    ends the process itself.
    """
    code = _run(arguments)
    if arguments is None:
        # Everything is closed. What Python would still do is take torch apart, which is a second on a busy
        # machine and longer than anything else about leaving.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    import click

    from swarm.cli.commands import swarm
    from swarm.cli.render.output import report_error
    from swarm.core.errors import SwarmError, UsageError

    _set_up_logging()
    asked = list(sys.argv[1:] if arguments is None else arguments)
    try:
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
        report_error(error.format_message() + hint, json_too="--json" in asked)
        return USAGE
    except UsageError as error:
        report_error(str(error), json_too="--json" in asked)
        return USAGE
    except SwarmError as error:
        report_error(str(error), json_too="--json" in asked)
        return FAILED
    except (KeyboardInterrupt, click.Abort):
        report_error("stopped", json_too=False)
        return FAILED
    except BrokenPipeError:
        # whoever read our output has gone; the interpreter must not complain about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code if isinstance(code, int) else 0


def _set_up_logging() -> None:
    """What a command has to say it says itself; the library's own log is for those who ask for it with
    SWARM_LOG=info (or debug).
    """
    import logging

    level = os.environ.get("SWARM_LOG", "error").upper()
    known = level if level in logging.getLevelNamesMapping() else "ERROR"
    logging.basicConfig(
        level=known, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
