"""A peer that averages known vectors with hivemind's averager. Runs in hivemind's environment."""

from __future__ import annotations

import time
from typing import Any

import hivemind  # type: ignore[import-not-found,unused-ignore]

from benchmarks.reference_vectors import delivered, fill, tensors_of
from benchmarks.worker_channel import WorkerChannel, wait_until
from benchmarks.workers.hivemind_peer import joined

STAGE_POLL_S = 0.002
CODECS = {"float16": "Float16Compression", "float32": "NoCompression", "int8": "Uniform8BitQuantization"}


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    maddrs = [f"/ip4/{settings['host']}/tcp/0"]
    dht = joined(channel, host_maddrs=maddrs)
    averager = hivemind.averaging.DecentralizedAverager(
        tensors_of(settings["elements"], settings["tensors"]),
        dht,
        start=True,
        prefix="benchmark",
        target_group_size=settings["target_group_size"],
        compression=getattr(hivemind.compression, CODECS[settings["codec"]])(),
    )
    channel.send("ready")
    while True:
        order = channel.receive()
        if order["do"] == "prepare":
            with averager.get_tensors() as tensors:
                fill(tensors, settings["rank"])
            channel.send("prepared")
        elif order["do"] == "round":
            channel.send("done", **_round(averager, order["at_s"], order["timeout_s"]))
        elif order["do"] == "check":
            with averager.get_tensors() as tensors:
                fraction, worst = delivered(tensors, settings["peers"], settings["codec"], order.get("lost"))
            channel.send("checked", delivered=fraction, worst=worst)


def _round(averager: Any, at_s: float, timeout_s: float) -> dict[str, Any]:
    running = hivemind.averaging.control.AveragingStage.RUNNING_ALLREDUCE
    wait_until(at_s)
    control = averager.step(wait=False, timeout=timeout_s, allow_retries=False)
    grouped_s = None
    while not control.done():
        if grouped_s is None and control.stage == running:
            grouped_s = time.monotonic()
            break
        time.sleep(STAGE_POLL_S)
    failure = control.exception(timeout_s)
    end_s = time.monotonic()
    if failure is not None:
        return {
            "ok": False,
            "reason": f"{type(failure).__name__}: {failure}"[:200],
            "end_s": end_s,
            "grouped_s": grouped_s,
            "group": 0,
        }
    gathered = control.result()
    return {
        "ok": gathered is not None,
        "reason": "",
        "end_s": end_s,
        "grouped_s": grouped_s,
        "group": len(gathered or ()),
    }


if __name__ == "__main__":
    main()
