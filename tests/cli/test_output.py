"""Renderers print JSON lines and sentences without control characters; the demo computes its summary."""

from __future__ import annotations

import concurrent.futures
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

import pytest
from rich.console import Console

from swarm.cli.demo_state import DemoState
from swarm.cli.render.demo import ChildEvent, DemoPresentation, DemoStatus, closing, headline
from swarm.cli.render.live import LiveOutput
from swarm.cli.render.output import JsonOutput, Output, PlainOutput, printable
from swarm.cli.render.text import sparkline
from swarm.cli.render.volunteer import VolunteerPresentation
from swarm.core.wording import counted, size
from swarm.core.working import Work
from swarm.run import events

EPOCH = events.EpochDone(
    epoch=3,
    loss=2.5,
    validation_loss=2.6,
    samples=40,
    samples_per_s=50.0,
    swarm_samples_per_s=150.0,
    peers=3,
    sent_bytes=1_200_000,
    round_s=0.1,
    digest="ab",
    state_digest=None,
    drift=None,
)
FINISHED = events.Finished(
    reason="the run ended at epoch 3",
    epoch=3,
    samples=120,
    rounds=3,
    failed_rounds=0,
    loss_first=5.5,
    loss_last=2.5,
    validation_first=5.6,
    validation_loss=2.6,
    seconds=3.0,
    sent_bytes=3_600_000,
    digest="ab",
    digest_epoch=3,
)


def test_printable_removes_control_characters() -> None:
    assert printable("a\x1b[31mred\x07\u202etxt\nb") == "a[31mredtxt\nb"


def test_plain_lines_have_no_control_characters() -> None:
    stream = io.StringIO()
    output = PlainOutput(VolunteerPresentation(), stream)
    for event in (
        EPOCH,
        FINISHED,
        events.Notice(text="evil\x1b]0;title\x07"),
        events.RoundFailed(epoch=1, reason="alone\x1b[2J"),
    ):
        output.emit(event)
    text = stream.getvalue()
    assert all(character == "\n" or character.isprintable() for character in text)
    assert (
        "epoch 3: loss 2.500  held out 2.600  50 of 150 samples/s  3 peers  sent 1.2 MB  round 0.10 s" in text
    )
    assert "Held-out loss 5.600 -> 2.600. Contributed 120 samples in 3 rounds; sent 3.6 MB." in text


def test_work_in_progress_is_a_line_now_and_then_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Standard output has the results only, for pipes and programs."""
    results = io.StringIO()
    output = PlainOutput(VolunteerPresentation(), results)
    for seconds in (1.0, 1.5, 2.0, 10.9, 11.0, 11.5):
        output.show_work(Work(what="loading torch", seconds=seconds))
    output.show_work(Work(what="loading torch", seconds=12.0, is_over=True))
    assert capsys.readouterr().err.splitlines() == ["loading torch: 1.0 s", "loading torch: 11 s"]
    JsonOutput(results).show_work(Work(what="loading torch", seconds=1.0))
    assert results.getvalue() == ""


def test_work_in_progress_is_a_bar_below_the_picture_of_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=90, highlight=False)
    output = LiveOutput(VolunteerPresentation(), console)
    work = Work(what="downloading the state", seconds=2.0, done=120, total=480, unit="bytes")
    output.show_work(work)
    output.emit(events.Notice(text="a line above"))
    output.show_work(replace(work, is_over=True))
    text = stream.getvalue()
    assert "downloading the state: 120 bytes of 480 bytes, 2.0 s" in text
    assert "━" in text
    assert "a line above" in text
    output.emit(EPOCH)  # no picture before `Joined`
    output.show_work(replace(work, what="saving epoch 3"))
    output.emit(FINISHED)
    output.close()
    assert "saving epoch 3" in stream.getvalue()


def test_json_lines_name_their_event_and_contain_only_json_numbers() -> None:
    stream = io.StringIO()
    JsonOutput(stream).emit(
        events.TrainingProgress(
            epoch=1, loss=math.nan, samples_per_s=1.0, swarm_samples=3, swarm_samples_per_s=math.inf, peers=1
        )
    )
    line = json.loads(stream.getvalue(), parse_constant=pytest.fail)
    assert (line["event"], line["loss"], line["swarm_samples_per_s"]) == ("progress", None, None)


@pytest.mark.parametrize(
    "make",
    [JsonOutput, lambda stream: PlainOutput(VolunteerPresentation(), stream)],
    ids=["json", "plain"],
)
def test_a_line_is_one_write_so_that_lines_of_several_threads_do_not_mix(
    make: Callable[[TextIO], Output],
) -> None:
    pieces: list[str] = []

    class Recorded(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    make(Recorded()).emit(events.Notice(text="one"))
    assert len(pieces) == 1
    assert pieces[0].endswith("\n")


def test_only_the_main_thread_fails_when_the_reader_of_the_output_is_gone() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    output = JsonOutput(Closed())
    with concurrent.futures.ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(output.emit, events.Notice(text="a checkpoint is written")).result()
    with pytest.raises(BrokenPipeError):
        output.emit(events.Notice(text="the command ends"))


def test_the_summary_shows_measured_memory_beside_the_estimate() -> None:
    taken = replace(FINISHED, memory_bytes=900_000_000, memory_peak_bytes=700_000_000)
    assert (
        VolunteerPresentation()
        .sentence(taken)
        .endswith("sent 3.6 MB. Memory: 700 MB at the peak, 900 MB estimated.")
    )
    on_cuda = replace(
        taken,
        device_memory_bytes=3_000_000_000,
        device_memory_peak_bytes=2_500_000_000,
        device_memory_reserved_bytes=2_800_000_000,
    )
    assert (
        VolunteerPresentation()
        .sentence(on_cuda)
        .endswith("; of the CUDA device 2.5 GB (2.8 GB with torch's reserve), 3.0 GB estimated.")
    )


def test_a_long_epoch_has_a_line_now_and_then_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [0.0]
    monkeypatch.setattr("swarm.cli.render.volunteer.time.monotonic", lambda: clock_s[0])
    stream = io.StringIO()
    output = PlainOutput(VolunteerPresentation(), stream)
    progress = events.TrainingProgress(
        epoch=1, loss=1.0, samples_per_s=1.0, swarm_samples=1234, swarm_samples_per_s=1.0, peers=1
    )
    for clock_s[0] in (1.0, 9.0, 11.0, 12.0, 20.0, 22.0):
        output.emit(progress)
    assert stream.getvalue().splitlines() == ["epoch 2 so far: 1,234 samples by 1 peer, loss 1.000"] * 2


def test_a_download_of_the_state_after_a_lag_has_a_sentence() -> None:
    assert (
        VolunteerPresentation().sentence(
            events.Resynchronised(epoch=4, loaded=True, reason="fell behind", seconds=0.5)
        )
        == "resynchronised with epoch 4 in 0.50 s: fell behind"
    )


def test_a_live_view_draws_progress_and_prints_other_events_above_it() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=200)
    joined = events.Joined(
        peer_id="p", run_id="r", join_line="swarm join x", device="cpu", data="text", start_s=1.0
    )
    with LiveOutput(VolunteerPresentation(), console) as output:
        output.emit(EPOCH)
        assert stream.getvalue() == "", "there is no picture before training begins"
        output.emit(joined)
        output.emit(EPOCH)
        output.emit(FINISHED)
    text = stream.getvalue()
    assert (
        text.index("training on cpu")
        < text.index("Ctrl-C leaves")
        < text.index("Held-out loss 5.600 -> 2.600")
    )
    assert "epoch 3: loss" not in text, "epochs are only drawn"


def test_the_demo_prints_its_status_every_few_seconds_and_json_shows_only_events() -> None:
    status = DemoStatus(state=DemoState(["founder"]), elapsed_s=2.0)
    child = ChildEvent(name="founder", fields={"event": "notice", "text": "hello"})
    plain, lines = io.StringIO(), io.StringIO()
    for output in (PlainOutput(DemoPresentation(), plain), JsonOutput(lines)):
        for event in (status, child, status):
            output.emit(event)
    assert plain.getvalue().count("no epoch complete yet") == 1
    assert [json.loads(line) for line in lines.getvalue().splitlines()] == [
        {"from": "founder", "event": "notice", "text": "hello"}
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1500, "1.5 kB"),
        (123_456, "123 kB"),
        (2.5e9, "2.5 GB"),
        (3e12, "3.0 TB"),
    ],
)
def test_byte_counts_are_shown_with_a_unit(count: float, text: str) -> None:
    assert size(count) == text


def test_counts_have_a_noun_in_its_number_and_a_separator_of_thousands() -> None:
    assert [counted(number, "peer") for number in (0, 1, 2, 1200)] == [
        "0 peers",
        "1 peer",
        "2 peers",
        "1,200 peers",
    ]


def test_sparklines_show_the_whole_series() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([3.0], 5) == "▁"
    assert sparkline([1, 2, 3], 5) == "▁▅█" or sparkline([1, 2, 3], 5) == "▁▄█"
    assert len(sparkline([float(n) for n in range(1000)], 40)) == 40


def line(event: events.Event) -> dict[str, object]:
    value: dict[str, object] = json.loads(event.json_line())
    return value


def test_the_summary_of_the_demo_is_computed_from_its_events() -> None:
    state = DemoState(["founder", "volunteer 2"])
    for name, loss, digest in (("founder", 2.0, "aa"), ("volunteer 2", 3.0, "aa")):
        state.apply(name, line(events.Listening(peer_id=f"12D3{name}", addresses=["/x"], reach="direct")))
        state.apply(name, {**line(EPOCH), "epoch": 1, "loss": 5.5, "digest": "first"})
        state.apply(name, {**line(EPOCH), "loss": loss, "digest": digest})
    assert state.loss_history() == [5.5, 2.5]
    summary = state.summary(12.0)
    assert (summary.loss_first, summary.loss_last, summary.epochs, summary.validation_loss) == (
        5.5,
        2.5,
        3,
        2.6,
    )
    assert (summary.digests_compared, summary.digests_equal) == (2, True)
    assert [peer["samples"] for peer in summary.peers] == [80, 80]
    assert "loss 5.500 -> 2.500" in closing(summary)
    assert "equal on all peers" in closing(summary)
    assert headline(state).startswith("epoch 3: loss 2.500")


def test_different_digests_are_reported() -> None:
    state = DemoState(["founder", "volunteer 2"])
    state.apply("founder", line(EPOCH))
    state.apply("volunteer 2", {**line(EPOCH), "digest": "other"})
    assert not state.summary(1.0).digests_equal
    assert "NOT EQUAL" in closing(state.summary(1.0))


def test_a_failed_child_is_reported_once_with_its_own_error() -> None:
    state = DemoState(["founder", "volunteer 2"])
    state.apply("volunteer 2", {"event": "error", "text": "too little memory"})
    state.ended("volunteer 2", "swarm: too little memory")
    state.ended("founder", None)
    state.ended("bootstrap", "it ended with exit code -9 and printed no error")
    assert state.problems == [
        "volunteer 2: too little memory",
        "bootstrap: it ended with exit code -9 and printed no error",
    ]
    assert state.peers["volunteer 2"].status == "failed"


def test_on_a_terminal_the_user_chooses_a_number_and_is_asked_again_for_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter(["3", "x", "2"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    console = Console(file=io.StringIO(), force_terminal=True)
    with LiveOutput(VolunteerPresentation(), console) as output:
        assert output.choose("Which one?", 2) == 2
    assert list(answers) == []
    assert PlainOutput(VolunteerPresentation(), io.StringIO()).choose("Which one?", 2) is None


def test_a_volunteer_reads_size_licence_memory_and_traffic_before_a_download() -> None:
    found = events.RunFound(
        name="smollm",
        run_id="1a2b",
        version=1,
        members="open",
        created=False,
        summary="LoRA of rank 8 on owner/model (134,515,008 parameters) on text",
        sample="512 tokens of text",
        parameters=2_442_240,
        memory_bytes=3_000_000_000,
        memory_free_bytes=20_000_000_000,
        device_memory_bytes=None,
        target_batch_size=512,
        batch_size=8,
        round_bytes=4_900_000,
        traffic_bytes_per_hour=88e6,
        peers=2,
        downloads=["owner/model: 271 MB from the Hugging Face hub (licence apache-2.0)"],
    )
    text = VolunteerPresentation().sentence(found)
    assert "  download  owner/model: 271 MB from the Hugging Face hub (licence apache-2.0)\n" in text
    assert "  memory    about 3.0 GB; 20.0 GB are free\n" in text
    assert "  traffic   about 88.0 MB per hour each way (4.9 MB per epoch)\n" in text
