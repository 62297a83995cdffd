"""Findings from profiles: what limits a figure that misses its aim, keyed by the row's identifier.

A page shows them only while the aim is missed.
"""

from __future__ import annotations

_PROCESSOR_TIME = (
    "processor time: all peers share the cores, and a round keeps them busy throughout. The bulk path takes "
    "0.55 s of both ends for a GB; the rest is tensor work: encode, reduce, digest and keep (settle), and "
    "the decoding of the result into the caller's tensors (write-back)."
)
_TENSOR_WORK = (
    "tensor work on shared cores: what is added to the transport is one pass each for the finite check, the "
    "message, the weighted sum, the digest, the copy that is kept and the write-back; a machine whose memory "
    "is busy with other work makes each dearer."
)

_DHT_TIME = (
    "processor time: all peers share the cores. Of it, by `perf` with 8 peers, about half is Python "
    "(searches, contacts in answers, the routing table and the peer book for every message), an eighth "
    "Ed25519, a quarter gRPC and the kernel. Every store is signed, and verified at each of five replicas; a "
    "get asks three of the five. hivemind signs nothing, and takes the first replica's answer."
)
_ONE_GET = (
    "three calls to three processes that share two cores, and a signature to verify, where hivemind "
    "trusts the first replica: a read here must see every write that a majority of the replicas accepted "
    "(docs/decisions/0003)."
)

_CODEC_CALLS = (
    "number of calls, not memory: 11 operations of torch for int8, 25 for int2, 3 to 5 µs each over "
    "pieces that fit "
    "the cache (docs/decisions/0014); on an idler machine the same code took a half to a third of the time "
    "(best of 25: 2.5 GB/s for int8, 1.6 for int4)."
)

_IDLE_TCP = (
    "presumably TCP: a connection that was idle begins with ten packets again (traces show 0.16 s of a round "
    "of 1.0 s), which bare TCP shows as well; but here values and averages use two connections, both of "
    "which begin so. Headers take 3.5 %; the last values' way there, their average's way back and the votes "
    "take two round trips, of which bare TCP has the first half (docs/decisions/0015)."
)
_GIGABIT = (
    "processor time, in part: the emulation takes one of two cores with realtime priority, and four peers "
    "that encode, encrypt and reduce share the other (docs/decisions/0015). Besides, a round needs one and a "
    "half round trips that bare TCP does not: half for an average's way back, one for the votes."
)

_EXPERT_CALL = (
    "processor time: 1.2 ms of both ends for a call (0.5 at the server, 0.7 at the caller; 1.5 on 27 "
    "November), most of it Python: checks, framing, reading and decoding of one 4 kB message each way, and "
    "the wake-ups of two event loops and of the computing thread. Nothing large stands out beside the "
    "sockets."
)
_EXPERT_LARGE = (
    "processor time, on cores that all processes share: 32 ms of both ends for a call, 15 at the server and "
    "17 at the caller, of which 4 are the benchmark's own random numbers and comparison. By a profile the "
    "server's event loop takes 9.5 of them: a third in system calls of sockets, a fifth in copies, a tenth "
    "in AES-GCM; its computing thread takes 4 (the no-op's copy, the check for finite numbers). Arriving "
    "messages are decrypted in place since (docs/decisions/0069), which takes 30 ms instead of 32."
)
_EXPERT_PASS = (
    "the module's own arithmetic, which both share: forward, backward and a step of 32 samples take 1.5 "
    "ms of a thread in plain torch, and 2.4 ms in the server (copies from which a step can be undone 0.2 "
    "ms, checks for NaN and the gradient's norm 0.2 ms); four requests in one batch take 5.2 ms instead "
    "of 3.75. The server has one computing thread."
)

_STATE_MOVED = (
    "processor time of two processes and more on two cores, and first writes to new memory. By the "
    "processes' own timers, one donor, in 0.32 s: look-ups 0.03 s; digests 0.06 for the first newcomer "
    "(kept for the next one while the state is unchanged); transfer 0.24, in which the donor takes 0.19 s of "
    "a core and the newcomer 0.25, 0.07 of it to find the memory. That takes up to 1 s where the host under "
    "this machine has to find the pages; check for finite numbers 0.014, copy into place 0.025 "
    "(docs/decisions/0018)."
)
_STALE_FEEDBACK = (
    "error feedback itself: residuals from the time of a high learning rate are sent in the last rounds, "
    "in which the model learns nothing any more (the rate falls to 0), and the outer momentum multiplies "
    "them. The "
    "arithmetic in plain torch, without our rounds, does the same (2.034 nats/byte, here 2.021); without "
    "error feedback int2 reaches the loss sooner, see its row."
)

_CROWD = (
    "found after these measurements, and cured: members read one another's reports less often the more "
    "records of strangers there were, and learned up to a second late that an epoch was full (in virtual "
    "time 0.82 of the epochs, now 1.00); and three quarters of the handshakes at the attacked member were "
    "those of members that reported to identities with its address (docs/decisions/0043). What remains is "
    "the processor time of the attacker's own connections, 128 at once and then one a second."
)
_MEMBERSHIP = (
    "the peers of this run compute nothing: all their processor time is that of the protocol, 0.1 s for an "
    "epoch of 1 s. By a profile a third of the share of membership are the lookups of roles for each call, "
    "each as long as the profiler resolves, and a fifth the members near the keys of the DHT."
)

_NEWCOMERS = (
    "processor time: 33 processes on two cores (profiled with perf, and by counts of calls). Half of it is "
    "Python, a fifth the kernel, a seventh gRPC, a twelfth Python's garbage collector; no function stands "
    "out. Until it has the state a newcomer makes 200 to 260 calls, 100 of them to look up keys and "
    "neighbours in the DHT, and opens 30 connections (2.5 ms of both ends): 0.55 s, while one alone needs "
    "0.1 s. Half of the newcomers then contribute in the first round, of the next epoch, and the last ones "
    "in the one after it; a round costs a member 0.2 s and more."
)

LIMITED_BY: dict[str, str] = {
    **{f"joining-32-{trainers}-contributing": _NEWCOMERS for trainers in (1, 2)},
    **{f"attacks-{members}-1000{of}-pace": _CROWD for members in (2, 4) for of in ("", "-20")},
    "membership-4-own-processor": _MEMBERSHIP,
    "membership-4-processor": _MEMBERSHIP + " The difference of two runs does not resolve a hundredth.",
    "reach-training-relayed": (
        "by timestamps: the values of gradients (2.2 MB through the relay) take 30 to 50 ms, with open ports "
        "20 to 45 ms, since the relay saves the unused rate of a second (docs/decisions/0060; 0.76 before). "
        "The rest is the round over the state at each tenth epoch: parameters and both moments in float32, "
        "13 MB through the relay, 2.1 s of its 50 Mbit/s. The figure is of eight epochs, one with such a "
        "round. A member with an address would reduce instead, and the relay carry no values."
    ),
    **dict.fromkeys(
        ("reach-first-relayed-50", "reach-first-relayed-200"),
        "four round trips of the way over the relay, by count: the circuit with the first half of Noise; "
        "the rest of Noise with TLS's first exchange; the end of TLS with the settings of HTTP/2, for which "
        "gRPC's client waits; the call; docs/decisions/0067. The aim leaves three.",
    ),
    "attacks-empty-streams-lag": (
        "gRPC hands the loop the ends of all calls of broken connections in one turn: 0.2 ms for each."
    ),
    "attacks-experts-memory": (
        "by design: a server of experts keeps the answers to the last passes (up to 128 MiB), so that a pass "
        "that is repeated is applied once, and inputs between forward and backward (256 MiB, 64 MiB of one "
        "caller); docs/decisions/0020"
    ),
    "attacks-half-sent-memory": (
        "gRPC keeps 64 KiB of each stream that the server has not read yet, and the allocator keeps the rest."
    ),
    "attacks-records-memory": (
        "the replica's store: records of strangers take at most 20 MiB, the allocator as much again."
    ),
    "allreduce-64-float16-hivemind": _PROCESSOR_TIME,
    "allreduce-64-float16-hivemind-whole": _PROCESSOR_TIME,
    "allreduce-256-float16-hivemind": _PROCESSOR_TIME,
    "allreduce-256-float16-hivemind-whole": _PROCESSOR_TIME,
    "allreduce-64-float32-bare": _TENSOR_WORK,
    "allreduce-256-float32-bare": _TENSOR_WORK,
    "allreduce-64-float32-gloo": _TENSOR_WORK
    + " gloo does not encrypt and does not survive the failure of a peer.",
    "allreduce-256-float32-gloo": _TENSOR_WORK
    + " gloo does not encrypt and does not survive the failure of a peer.",
    **{f"dht-{peers}-{row}": _DHT_TIME for peers in (8, 16) for row in ("all", "all-bulk", "far")},
    **{f"dht-{peers}-one-get": _ONE_GET for peers in (8, 16)},
    "links-100mbit-50ms-float32-gloo": _IDLE_TCP,
    **{
        f"links-{link}-{codec}-{beside}": _IDLE_TCP
        for link, besides in (
            ("100mbit-50ms", ("tcp", "hivemind", "alone")),
            ("100mbit-50ms-1mib", ("tcp",)),
            ("20mbit-100ms", ("tcp",)),
            ("20mbit-100ms-1mib", ("tcp",)),
            ("one-slow", ("tcp",)),
        )
        for beside in besides
        for codec in ("float32", "float16")
    },
    "links-20mbit-100ms-16mib-float16-tcp": _IDLE_TCP,
    **{
        f"links-1gbit-20ms{size}-{codec}-tcp": _GIGABIT
        for size in ("", "-1mib")
        for codec in ("float32", "float16")
    },
    "links-1gbit-20ms-256mib-float16-tcp": _GIGABIT,
    "experts-small": _EXPERT_CALL,
    "experts-large": _EXPERT_LARGE,
    "experts-train": _EXPERT_PASS,
    "experts-256-nop-512": (
        "processor time, 0.18 s of all processes for a step (0.24 before calls were made together and the "
        "trainer kept torch's objects out of garbage collection): 0.07 s at the trainer, 0.11 s at the four "
        "servers. Two cores need 0.09 s for that if neither ever waits. A quarter of the trainer's network "
        "thread is encryption and sockets, 8 MB a step; the rest is spread over Python and small operations "
        "of torch, 30 µs to prepare and read a call and 0.17 ms to serve it, without a single large part."
    ),
    **{
        f"slowdown-streaming-{cores}": (
            "by the processor time of the trainer's own thread, two thirds of it are work there (the outer "
            "step, copies of fragments); the rest waits for the interpreter's lock, or for the core where "
            "there is one. Rounds are far more frequent here than in use: two a second, ten training steps "
            "apart."
        )
        for cores in ("1-core", "2-cores")
    },
    "state-1-donor": _STATE_MOVED,
    "state-3-donors": _STATE_MOVED,
    "convergence-bytes-diloco-int2-with-error-feedback": _STALE_FEEDBACK,
    "codec-3-int8-1-encode": _CODEC_CALLS,
    "codec-4-int4-1-encode": _CODEC_CALLS,
    "frozen-stall": (
        "the time until a silent member is marked failed (about 1 s with punctual heartbeats, longer on a "
        "machine with overcommitted cores), and the repeated reduction of the "
        "lost quarter."
    ),
    "start-after-import": (
        "torch itself: it imports its compiler (torch._dynamo, about a thousand modules) when the first "
        "optimizer is made, which this figure includes; see the phase “model and AdamW” below and the row "
        "without it."
    ),
}
