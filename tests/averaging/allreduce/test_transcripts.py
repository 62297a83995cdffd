"""Golden transcripts of the round's machine: the events of one member, and its effects.

`SWARM_REWRITE_TRANSCRIPTS=1 pytest tests/averaging/allreduce/test_transcripts.py` writes the files again; the
difference shows what a change of the machine does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.allreduce.logic.machine import RoundMachine
from averaging.allreduce.logic.values import CallFailure, Inventory, InventoryQuestion, RoundState, Statement
from averaging.allreduce.logic.versions import Version, digest_payload, digest_round, encode_places
from averaging.history.certificate import Certificate, Vote, vote_statement
from swarm.testing.identities import SeededIdentity
from tests.averaging.allreduce.setups import CODEC, NUMEL, round_setup

FOLDER = Path(__file__).parent / "transcripts"
BYTES = CODEC.encoded_bytes(NUMEL)  # of one chunk
DIGESTS = [digest_payload(bytes([chunk])) for chunk in range(8)]


class Recording:
    """A member at place 0 of a group in which everybody contributes and reduces one chunk."""

    def __init__(self, members: int = 3) -> None:
        self.identities = [SeededIdentity(f"transcript {place}") for place in range(members)]
        self.setup = round_setup(self.identities)
        self.everybody = encode_places(range(members), members)
        self.now_s = 0.0
        self.lines: list[str] = []
        self.machine = RoundMachine(self.setup)
        self.log("begin", self.machine.begin())

    # ---- what happens

    def say(self, text: str) -> None:
        """Add a comment."""
        self.lines.append(f"# {text}")

    def step(self, event: on.Event) -> list[do.Effect]:
        effects = self.machine.step(event, self.now_s)
        self.log(self.text(event), effects)
        for effect in effects:
            if isinstance(effect, do.Sign):  # as its driver does
                self.step(on.VoteSigned(self.vote(0, effect.result)))
        return effects

    def ticks(self, until_s: float) -> None:
        """Let time pass; members that are not `silent` answer heartbeats. Only what follows is recorded."""
        while self.now_s < until_s - 1e-9:
            self.now_s = min(self.machine.deadline_s(), until_s)
            effects = self.machine.tick(self.now_s)
            self.now_s = round(self.now_s, 6)
            shown = [effect for effect in effects if not isinstance(effect, do.Ping)]
            if shown:
                self.log("tick", shown)
            for effect in effects:
                if isinstance(effect, do.Ping) and effect.place not in self.silent:
                    answer = on.PingAnswered(effect.place, RoundState.RUNNING, "", 0.01)
                    shown = self.machine.step(answer, self.now_s)
                    if shown:
                        self.log(self.text(answer), shown)
                if isinstance(effect, do.Sign):
                    self.step(on.VoteSigned(self.vote(0, effect.result)))

    silent: frozenset[int] = frozenset()

    def contributions(self, *senders: int) -> None:
        for sender in senders:
            self.step(on.SenderOpened(sender))
            self.step(on.ContributionArrived(sender, 0, BYTES))

    def reduced(self, digest: bytes = DIGESTS[0]) -> None:
        self.step(on.ChunkReduced(0, self.everybody, digest, b""))

    def averages(self, *reducers: int, digests: list[bytes] = DIGESTS) -> None:
        for reducer in reducers:
            self.step(on.AverageArrived(reducer, reducer, self.everybody, b"", BYTES))
            self.step(on.AverageChecked(reducer, digests[reducer]))

    def result(self, digests: list[bytes] = DIGESTS) -> bytes:
        return digest_round((digests[chunk.index], self.everybody) for chunk in self.setup.plan.chunks)

    def vote(self, place: int, result: bytes) -> Vote:
        identity = self.identities[place]
        signature = identity.sign(vote_statement(self.setup.proposal.digest(), result))
        return Vote(voter=identity.peer_id, result=result, signature=signature)

    def told(self, place: int, **votes: bytes) -> Statement:
        """Return what the member at `place` says: its own vote and others', as `of_2=result`."""
        return Statement(tuple(self.vote(int(name[3:]), result) for name, result in votes.items()))

    # ---- text

    def log(self, event: str, effects: list[do.Effect]) -> None:
        self.lines.append(f"{self.now_s:.2f} {event}")
        self.lines += [f"       -> {self.text(effect)}" for effect in effects]

    def text(self, value: Any) -> str:
        if isinstance(value, Vote):
            return f"vote of {self.place(value.voter)} for {self.text(value.result)}"
        if isinstance(value, Certificate):
            voters = ", ".join(self.place(peer) for peer in value.votes)
            return f"certificate of {voters} for {self.text(value.result)}"
        if isinstance(value, Enum):
            return value.name
        if is_dataclass(value) and not isinstance(value, type):
            parts = []
            for one in fields(value):
                found = getattr(value, one.name)
                if found not in ((), {}, "", None) and found is not False:
                    parts.append(f"{one.name}={self.text(found)}")
            return f"{type(value).__name__}({', '.join(parts)})"
        if isinstance(value, bytes):
            known = {self.result(): "R", b"": "none", self.everybody: "everybody"}
            known |= {digest: f"d{chunk}" for chunk, digest in enumerate(DIGESTS)}
            return known.get(value, value.hex()[:6])
        if isinstance(value, tuple):
            return f"[{', '.join(self.text(item) for item in value)}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key}: {self.text(item)}' for key, item in value.items())}}}"
        text = f"{value:g}" if isinstance(value, float) else str(value)
        for place, identity in enumerate(self.identities):
            text = text.replace(str(identity.peer_id), str(place))
        return re.sub(r"\b[0-9a-f]{12}\b", lambda match: match.group()[:6], text)

    def place(self, peer: object) -> str:
        return str([identity.peer_id for identity in self.identities].index(peer))  # type: ignore[arg-type]


def ordinary() -> Recording:
    made = Recording()
    made.step(on.MemoryPrepared())
    made.say("the others' values for our shard come, and it is averaged")
    made.contributions(1, 2)
    made.reduced()
    made.say("the averages of the other shards come")
    made.averages(1, 2)
    made.say("everything is in place, and the vote is signed; the first answer makes a certificate")
    made.now_s = 0.04
    made.step(on.VotesAnswered(1, made.told(1, of_0=made.result(), of_1=made.result())))
    return made


def dead_sender() -> Recording:
    made = Recording()
    made.step(on.MemoryPrepared())
    made.contributions(1)
    made.averages(1, 2)
    made.say("member 2 has given its averages, and dies before it sends its values of our chunk")
    made.silent = frozenset({2})
    made.ticks(3.4)
    made.step(on.ChunkReduced(0, encode_places([0, 1], 3), DIGESTS[0], b""))
    return made


def dead_reducer() -> Recording:
    made = Recording(4)
    made.step(on.MemoryPrepared())
    made.contributions(1, 2, 3)
    made.reduced()
    made.averages(1, 2)
    made.say("member 3 dies before its average came; we are its successor, the next in group order")
    made.step(on.ReducerStreamEnded(3, "connection reset", broken=True))
    for _ in range(2):
        made.step(on.CallFailed(do.Ping(3, 0.6, probe=True), CallFailure.BROKEN, "connection refused"))
    made.say("nobody has its average, and nobody can still get it: we make it again")
    for place in (1, 2):
        question = InventoryQuestion(3)
        made.step(on.InventoryAnswered(place, question, Inventory({}, sealed=True)))
    for place in (1, 2):
        made.step(on.ContributionFetched(place, 3, BYTES))
    three = encode_places([0, 1, 2], 4)
    made.step(on.ChunkReduced(3, three, DIGESTS[3], b""))
    made.say("after a repair, members compare what they would vote for")
    pairs = [(DIGESTS[chunk], made.everybody if chunk < 3 else three) for chunk in range(4)]
    result = digest_round(pairs)
    made.step(on.VotesAsked(1, 1, Statement(intents={1: result})))
    made.step(on.VotesAnswered(2, Statement(intents={2: result})))
    made.step(on.VotesAnswered(1, made.told(1, of_1=result, of_2=result)))
    return made


def stalled_successor() -> Recording:
    made = Recording(4)
    made.step(on.MemoryPrepared())
    made.contributions(1, 2, 3)
    made.reduced()
    made.averages(1, 3)
    made.say("member 2 gives an average with NaN; its successor is member 3, and nobody has the average")
    made.step(on.AverageArrived(2, 2, made.everybody, b"", BYTES))
    made.step(on.AverageChecked(2, None, "element 0 is nan"))
    question = InventoryQuestion(2)
    for place in (1, 3):
        made.step(on.InventoryAnswered(place, question, Inventory({}, sealed=True)))
    made.say("member 3 lives and makes nothing of it: we are the next in group order, and take over")
    made.ticks(25.0)
    for place in (1, 2, 3):
        made.step(on.ContributionFetched(place, 2, BYTES))
    made.step(on.ChunkReduced(2, made.everybody, DIGESTS[2], b""))
    return made


def late_voter() -> Recording:
    made = Recording()
    made.step(on.MemoryPrepared())
    made.contributions(1, 2)
    made.reduced()
    made.averages(1)
    made.say("the others have voted, and our last average is still on its way")
    made.step(on.VotesAsked(1, 1, made.told(1, of_1=made.result(), of_2=made.result())))
    made.averages(2)
    return made


def equivocating_reducer() -> Recording:
    made = Recording(4)
    made.step(on.MemoryPrepared())
    made.contributions(1, 2, 3)
    made.reduced()
    made.say("reducer 2 gives us other bytes than the others")
    lie = [*DIGESTS[:2], DIGESTS[7], *DIGESTS[3:]]
    made.averages(1, 2, 3, digests=lie)
    made.say("the others have a majority: their averages are fetched, and only then the round is committed")
    made.step(on.VotesAnswered(1, made.told(1, of_1=made.result(), of_2=made.result(), of_3=made.result())))
    table = {chunk: Version(0, made.everybody, DIGESTS[chunk]) for chunk in range(4)}
    made.step(on.InventoryAnswered(1, InventoryQuestion(), Inventory(table, sealed=True)))
    made.step(on.ChunkFetched(1, 2, table[2], ok=True))
    return made


def failed_vote() -> Recording:
    made = Recording()
    made.step(on.MemoryPrepared())
    made.contributions(1, 2)
    made.reduced()
    made.averages(1, 2)
    made.say("two of three vote for none: no result can have a majority any more")
    statement = Statement((made.vote(1, b""),), gave_up="peer 1 ran out of memory")
    made.step(on.VotesAsked(1, 1, statement))
    made.step(on.VotesAnswered(2, Statement((made.vote(2, b""),), gave_up="peer 2 was closed")))
    return made


def member_left_behind() -> Recording:
    made = Recording()
    made.step(on.MemoryPrepared())
    made.contributions(1, 2)
    made.say("this process was stopped; the others took our shard over, and answer that they have committed")
    made.now_s = 6.0
    made.step(on.PingAnswered(1, RoundState.COMMITTED, "", 0.02))
    two = encode_places([1, 2], 3)
    versions = [Version(1, two, DIGESTS[0])] + [Version(0, made.everybody, DIGESTS[at]) for at in (1, 2)]
    result = digest_round((version.digest, version.contributors) for version in versions)
    made.step(on.VotesAnswered(1, made.told(1, of_1=result, of_2=result)))
    inventory = Inventory(dict(enumerate(versions)), sealed=True)
    made.step(on.InventoryAnswered(1, InventoryQuestion(), inventory))
    for chunk, version in enumerate(versions):
        made.step(on.ChunkFetched(1, chunk, version, ok=True))
    return made


STORIES: dict[str, Callable[[], Recording]] = {
    story.__name__: story
    for story in (
        ordinary,
        dead_sender,
        dead_reducer,
        stalled_successor,
        late_voter,
        equivocating_reducer,
        failed_vote,
        member_left_behind,
    )
}


@pytest.mark.parametrize("name", STORIES)
def test_the_machine_does_what_the_transcript_says(name: str) -> None:
    text = "\n".join(STORIES[name]().lines) + "\n"
    file = FOLDER / f"{name}.txt"
    if os.environ.get("SWARM_REWRITE_TRANSCRIPTS"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
