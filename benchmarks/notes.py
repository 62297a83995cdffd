"""What limits a figure that misses its aim: from profiles, keyed by the row's identifier. Shown only while the aim is missed."""

from __future__ import annotations

_PROCESSOR_TIME = (
    "processor time: all peers share the cores, and a round keeps them busy throughout. Of the processor seconds of a float16 round "
    "(listed below) about half are gRPC and TLS, as the bare transport shows for twice the bytes; the rest is tensor work (encode, reduce, "
    "settle) and the two passes between the caller's tensors and the flat vector (staging, write-back)."
)
_TENSOR_WORK = (
    "tensor work on shared cores: what is added to the transport is one pass each for staging, the finite check, the message, the weighted "
    "sum, the digest, the result and the write-back; a machine whose memory is busy with other work makes each dearer."
)

_DHT_TIME = (
    "processor time: all peers share the cores. Of it, by `perf` with 8 peers, about half is Python (searches, contacts in answers, the "
    "routing table and the peer book for every message), an eighth Ed25519, a quarter gRPC and the kernel. Every store is signed, and "
    "verified at each of five replicas; every get asks all five. hivemind signs nothing, and a replica answers a get from its own copy."
)
_ONE_GET = "five calls to five processes that share the cores: one replica's answer would do for a value that nobody else may write."

LIMITED_BY: dict[str, str] = {
    "allreduce-64-float16-hivemind": _PROCESSOR_TIME,
    "allreduce-64-float16-hivemind-whole": _PROCESSOR_TIME,
    "allreduce-256-float16-hivemind": _PROCESSOR_TIME,
    "allreduce-256-float16-hivemind-whole": _PROCESSOR_TIME,
    "allreduce-64-float32-bare": _TENSOR_WORK,
    "allreduce-256-float32-bare": _TENSOR_WORK,
    "allreduce-64-float32-gloo": _TENSOR_WORK + " gloo encrypts nothing and survives nobody's death.",
    "allreduce-256-float32-gloo": _TENSOR_WORK + " gloo encrypts nothing and survives nobody's death.",
    **{f"dht-{peers}-{row}": _DHT_TIME for peers in (8, 16) for row in ("all", "all-bulk", "far")},
    **{f"dht-{peers}-one-get": _ONE_GET for peers in (8, 16)},
    "start-after-import": (
        "torch itself: it imports its compiler (torch._dynamo, about a thousand modules) when the first optimizer is made, which this "
        "figure includes; see the phase “model and AdamW” below and the row without it."
    ),
}
