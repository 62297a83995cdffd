"""`make fuzz`: feed every decoder, every handler of a node and every caller with made input, until the time
is over.

    python -m tests.fuzz.run --seconds 600 --seed 7
    python -m tests.fuzz.run --only 'history' --seed 7 --case 1234     # one case again
    python -m tests.fuzz.run --only nodes --seed 7                     # the same calls of a node's handlers

Every failure prints the line that replays it. The exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from swarm.core.errors import SwarmError
from tests.fuzz.bulk_port import attack_port
from tests.fuzz.decoders import all_decoders, run_decoder
from tests.fuzz.files import FILES, FileCase
from tests.fuzz.making import Maker
from tests.fuzz.messages import message_cases
from tests.fuzz.nodes import fuzz_nodes

CASE_S_MAX = 1.0  # a case that takes longer than this is a failure
_SLICE_S = 0.1  # for one target before it is the next one's turn
_NODES_S_MAX = 60.0
_STARTING_S = 10.0  # to start nodes and to stop them


Case = Callable[[Maker], None]


def targets() -> Iterator[tuple[str, Case]]:
    """Yield the name of every decoder, file and message with the function that runs one case of it."""
    for name, read in {**FILES, **message_cases()}.items():
        yield name, lambda maker, read=read: _read(read, maker)
    for decoder in all_decoders():
        yield decoder.name, lambda maker, decoder=decoder: run_decoder(decoder, maker)
    yield "bulk port", attack_port


def _read(read: FileCase, maker: Maker) -> None:
    with contextlib.suppress(SwarmError):
        read(maker)


def run_case(case: Case, seed: str) -> str:
    """Run one case. Return what went wrong, or an empty text."""
    began_s = time.process_time()
    # the timer counts processor time, so that a busy machine fails no case
    signal.setitimer(signal.ITIMER_PROF, 4 * CASE_S_MAX)
    try:
        case(Maker(seed))
    except (Exception, Hangs):
        return traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    took_s = time.process_time() - began_s
    return f"it took {took_s:.1f} s of processor time" if took_s > CASE_S_MAX else ""


class Hangs(BaseException):
    """A case takes too long. Nothing under test catches it."""


def _hangs(number: int, frame: object) -> None:
    raise Hangs(f"it takes more than {4 * CASE_S_MAX:.0f} s of processor time")


def fuzz_decoders(seed: int, seconds: float, only: str = "", case: int | None = None) -> list[str]:
    """Run cases of all decoders, in turn, for some time. Return one text for each failure."""
    failures: list[str] = []
    chosen = {name: run for name, run in targets() if only in name}
    numbers = dict.fromkeys(chosen, case or 0)
    end_s, cases = time.monotonic() + seconds, 0
    while chosen and time.monotonic() < end_s:
        for name, run in list(chosen.items()):
            slice_end_s = time.monotonic() + _SLICE_S
            while name in chosen:
                number = numbers[name]
                wrong = run_case(run, f"{seed}/{name}/{number}")
                numbers[name], cases = number + 1, cases + 1
                if wrong:
                    del chosen[name]  # one failure of each target is enough
                    line = f"python -m tests.fuzz.run --only '{name}' --seed {seed} --case {number}"
                    failures.append(f"{name}: {wrong}\nagain: {line}")
                if case is not None or time.monotonic() > slice_end_s:
                    break
        if case is not None:
            break
    print(f"{cases:,} cases of {len(numbers)} decoders, messages and files")
    return failures


def fuzz(seed: int, seconds: float) -> list[str]:
    """Give half of the time to decoders and files, and half to nodes, new ones every minute."""
    failures = fuzz_decoders(seed, seconds / 2)
    end_s, number = time.monotonic() + seconds / 2, seed
    while not failures and (left_s := end_s - time.monotonic()) > 0:
        calls, wrong = fuzz_nodes(number, max(5.0, min(_NODES_S_MAX, left_s - _STARTING_S)))
        print(f"{calls:,} calls of handlers of a node, seed {number}", flush=True)
        failures += [
            f"{text}\nagain: python -m tests.fuzz.run --only nodes --seed {number}" for text in wrong
        ]
        number += 1
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=None, help="of all input; without it, a new one")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only", default="", help="targets whose name has this in it")
    parser.add_argument("--case", type=int, default=None, help="one case only")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    logging.getLogger().addHandler(
        logging.NullHandler()
    )  # what peers and files cause is logged for each case
    signal.signal(signal.SIGPROF, _hangs)
    if options.only == "nodes":
        calls, failures = fuzz_nodes(seed, min(_NODES_S_MAX, options.seconds))
        print(f"{calls:,} calls of handlers of a node")
    elif options.only or options.case is not None:
        failures = fuzz_decoders(seed, options.seconds, options.only, options.case)
    else:
        failures = fuzz(seed, options.seconds)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
