"""hivemind's codecs, one tensor at a time on one thread. Runs in hivemind's environment."""

from __future__ import annotations

import time

import torch
from hivemind.compression import (  # type: ignore[import-not-found,unused-ignore]
    deserialize_torch_tensor,
    serialize_torch_tensor,
)
from hivemind.proto.runtime_pb2 import CompressionType  # type: ignore[import-not-found,unused-ignore]

from benchmarks.codec_values import VALUES, relative_error
from benchmarks.worker_channel import WorkerChannel


def main() -> None:
    channel = WorkerChannel()
    torch.set_num_threads(1)
    values = {name: make(channel.configuration["elements"]) for name, make in VALUES.items()}
    channel.send("ready")
    while True:
        order = channel.receive()
        if order["do"] != "round":
            continue
        given = values["N(0, 1)"]
        kind = CompressionType.Value(order["codec"])
        started_s = time.perf_counter()
        message = serialize_torch_tensor(given, kind)
        encoded_s = time.perf_counter()
        deserialize_torch_tensor(message)
        done_s = time.perf_counter()
        errors = {}
        if order["errors"]:
            errors = {
                name: relative_error(deserialize_torch_tensor(serialize_torch_tensor(tensor, kind)), tensor)
                for name, tensor in values.items()
            }
        channel.send(
            "done",
            encode_s=encoded_s - started_s,
            decode_s=done_s - encoded_s,
            bits=8 * len(message.buffer) / given.numel(),
            errors=errors,
        )


if __name__ == "__main__":
    main()
