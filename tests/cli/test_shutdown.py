"""How commands end at Ctrl-C: without a traceback, also when it comes at a bad moment."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.cli import main

# The interruption of a blocked main thread arrives in the callback of a weak reference: Python ignores it.
LOST = """
import signal, threading, weakref
from swarm.cli.shutdown import Shutdown

class Something: pass

blocked = threading.Event()
with Shutdown(interrupt_s=0.1, abandon_s=60.0):
    signal.raise_signal(signal.SIGINT)
    something = Something()
    reference = weakref.ref(something, lambda _: blocked.wait(60.0))
    del something
    blocked.wait(60.0)
print("ended")
"""


# The second Ctrl-C is lost in the same way, before the main thread is interrupted once.
LOST_BEFORE = """
import signal, threading, weakref
from swarm.cli.shutdown import Shutdown

class Something: pass

blocked = threading.Event()
with Shutdown(interrupt_s=0.1, abandon_s=60.0):
    try:
        signal.raise_signal(signal.SIGINT)
        something = Something()
        reference = weakref.ref(something, lambda _: signal.raise_signal(signal.SIGINT))
        del something
        blocked.wait(60.0)
    finally:
        blocked.wait(0.5)
        print("cleaned up")
"""


# The signal comes to another thread, so it does not wake the main thread, as one just before its wait.
NOT_WAKING = """
import signal, threading, time
from swarm.cli.shutdown import Shutdown

def signal_here():
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

with Shutdown() as shutdown:
    threading.Thread(target=signal_here).start()
    began_s = time.monotonic()
    print(shutdown.requested.wait(60.0), time.monotonic() - began_s < 30.0, shutdown.reason)
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="sends a POSIX signal to one thread")
def test_a_signal_that_does_not_wake_the_main_thread_ends_its_wait() -> None:
    """Regression: such a signal was noticed at the end of the wait, after 5 s by `swarm bootstrap`."""
    command = [sys.executable, "-c", NOT_WAKING]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=90.0)
    assert ended.stdout == "True True SIGTERM\n"


@pytest.mark.parametrize(
    ("script", "printed"),
    [(LOST, "ended\n"), (LOST_BEFORE, "cleaned up\n")],
    ids=["the interruption", "a second Ctrl-C before it"],
)
def test_an_interruption_that_python_ignores_is_repeated_once_without_a_traceback(
    script: str, printed: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@pytest.mark.usefixtures("home")
def test_a_second_ctrl_c_before_the_node_is_open_ends_the_command_with_one_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(_: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("swarm.cli.train.check_device_present", pressed)
    file = tmp_path / "run.toml"
    file.write_text('name = "tiny"\ntarget_batch_size = 64\nbatch_size = 8\n[task]\nname = "bytelm"\n')
    assert main(["start", str(file), "--listen", "127.0.0.1:0"]) == 1
    assert capsys.readouterr().err.strip() == "swarm: stopped"
