"""Random plays of `swarm.testing.histories`: the choice of steps, the liar's actions, and checks in which
some or all peers continue without faults. docs/reliability.md says what must hold. `python -m
swarm.testing.history_plays --seed 7` replays one play; `make histories` takes millions of steps.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import click

from averaging.history.certificate import RoundKind, goodbye_statement
from averaging.history.chain import Relation
from averaging.history.electors import is_quorum
from swarm.core.errors import PeerError
from swarm.core.identity import Signer
from swarm.testing.histories import (
    HEAL_S,
    MESSAGES_MAX,
    RUN,
    Attempt,
    Peer,
    Play,
    PlayConfig,
    check_bounds,
)
from swarm.testing.history_ledger import BrokenPromiseError
from swarm.testing.identities import SeededIdentity

LOSS: Final = 0.1  # of messages
EXCHANGES: Final = 4  # exchanges of votes and histories after which all peers know everything


class RandomPlay:
    """Takes random steps in a play."""

    def __init__(self, config: PlayConfig, make_signer: Callable[[int], Signer]) -> None:
        self.play = Play(config, make_signer)
        self.chance = self.play.chance
        usual: list[tuple[float, Callable[[], None]]] = [
            (60, self.deliver),
            (25, self.vote),
            (16, self.look),
            (5, self.compare),
            (2, self.relay),
            (8, self.form),
            (4, self.ask),
            (2, self.alone),
            (2, self.give_up),
            (1, self.save),
            (0.8, self.heal),
            (0.8, self.cut),
            (0.8, self.start),
            (0.5, self.stop),
            (0.5, self.leave),
            (5 if config.has_liar else 0, self.lie),
        ]
        # every play has its own mixture, because some faults appear only if others are rare
        self.weights = [(weight * self.chance.choice((0.2, 1.0, 3.0)), action) for weight, action in usual]
        self._pace_s = self.chance.choice((0.1, 0.5))  # mean time between two steps
        self._total = sum(weight for weight, _ in self.weights)

    def run(self) -> Counter[str]:
        """Take all steps, and return the counts of events. Raise BrokenPromiseError."""
        config = self.play.config
        for step in range(config.steps):
            self.step()
            if step % config.quiet_interval == config.quiet_interval - 1:
                check_bounds(self.play)
                if self.chance.happens(0.6):
                    check_progress(self.play)
                else:
                    check_healing(self.play)
        check_healing(self.play)
        return self.play.counts

    def step(self) -> None:
        """Take one step."""
        self.play.now_s += self.chance.uniform(0.0, 2 * self._pace_s)
        left = self.chance.random() * self._total
        for weight, action in self.weights:
            left -= weight
            if left < 0:
                action()
                break
        while len(self.play.messages) > MESSAGES_MAX:
            self._drop(self.chance.below(len(self.play.messages)))

    def _drop(self, index: int) -> None:
        messages = self.play.messages
        messages[index] = messages[-1]
        messages.pop()

    def _peer(self) -> Peer | None:
        running = self.play.running()
        return self.chance.choice(running) if running else None

    def _attempt(self, peer: Peer | None) -> Attempt | None:
        return self.chance.choice(list(peer.attempts.values())) if peer and peer.attempts else None

    def deliver(self) -> None:
        if self.play.messages:
            index = self.chance.below(len(self.play.messages))
            if self.chance.happens(LOSS):
                self._drop(index)
            else:
                self.play.deliver(index)

    def form(self) -> None:
        leader = self._peer()
        if leader is None:
            return
        members = [peer for peer in self.play.peers_at_head(leader) if self.chance.happens(0.8)]
        if leader.wants_break:
            members = [peer for peer in members if peer.wants_break]
        elif self.chance.happens(0.8):
            members = [peer for peer in members if not peer.is_locked]
        if leader not in members and not leader.is_locked:
            members.append(leader)
        self.chance.shuffle(members)
        if leader in members:
            under_way = len(self.play.messages)
            self.play.form(leader, members, is_break=leader.wants_break)
            while len(self.play.messages) > under_way:  # only the arrival of votes matters
                if self.chance.happens(0.9):
                    self.play.deliver(len(self.play.messages) - 1)
                else:
                    self.play.messages.pop()

    def vote(self, *, gives_up: bool = False) -> None:
        open_ones = [
            (peer, attempt)
            for peer in self.play.running()
            for attempt in peer.attempts.values()
            if not attempt.has_voted
        ]
        if open_ones:
            peer, attempt = self.chance.choice(open_ones)
            self.play.vote(peer, attempt, gives_up=gives_up)

    def give_up(self) -> None:
        self.vote(gives_up=True)

    def relay(self) -> None:
        """Let a peer send another one its knowledge of an attempt."""
        peer = self._peer()
        attempt = self._attempt(peer)
        if peer is not None and attempt is not None:
            other = self.play.peers[self.chance.choice(attempt.members)]
            tell(self.play, peer, other, attempt)

    def ask(self) -> None:
        peer = self._peer()
        attempt = self._attempt(peer)
        if peer is not None and attempt is not None:
            ask_electors(self.play, peer, attempt)

    def compare(self) -> None:
        peer, other = self._peer(), self._peer()
        if peer is not None and other is not None and peer is not other:
            self.play.compare(peer, other)

    def look(self) -> None:
        if (peer := self._peer()) is not None:
            self.play.look(peer)

    def alone(self) -> None:
        if (peer := self._peer()) is not None:
            self.play.alone(peer)

    def save(self) -> None:
        if (peer := self._peer()) is not None:
            peer.checkpoints.append(peer.live.chain())

    def cut(self) -> None:
        """Cut some links, each one way."""
        numbers = range(len(self.play.peers))
        for pair in itertools.permutations(numbers, 2):
            if self.chance.happens(0.3):
                self.play.cuts.add(pair)

    def heal(self) -> None:
        if self.chance.happens(0.5):
            self.play.cuts.clear()
        elif self.play.cuts:
            self.play.cuts.discard(self.chance.choice(sorted(self.play.cuts)))

    def stop(self) -> None:
        if (peer := self._peer()) is not None:
            self.play.stop(peer)

    def leave(self) -> None:
        if (peer := self._peer()) is not None:
            self.play.leave(peer)

    def start(self) -> None:
        stopped = [peer for peer in self.play.peers if peer.lineage is None]
        if not stopped:
            return
        peer = self.chance.choice(stopped)
        donors = [donor for donor in self.play.running() if self.play.reaches(peer, donor)]
        if peer.checkpoints and (not donors or self.chance.happens(0.5)):
            self.play.start(peer, None)
        elif donors:
            self.play.start(peer, self.chance.choice(donors))

    def lie(self) -> None:
        """Let the liar take an action that honest peers never take."""
        liar = self.play.liar
        if liar is None or liar.lineage is None:
            return
        kind = self.chance.below(10)
        if kind < 6:
            self._lie_by_votes(liar)
        elif kind == 6:
            head, own = liar.live.head, liar.signer.peer_id
            signature = liar.signer.sign(goodbye_statement(RUN, head))
            self.play.ledger.left(own, head, signature)
            for other in self.play.running():
                if self.chance.happens(0.5):
                    self.play.hear_goodbye(other, own, head, signature)
        elif kind == 7:
            known = list(self.play.ledger.certified.get(liar.live.head, {}).values())
            if known:
                self.play.extend(liar, self.chance.choice(known))
        else:
            self._lie_by_certificates(liar, is_break=kind == 8)

    def _lie_by_votes(self, liar: Peer) -> None:
        own, ledger = liar.signer.peer_id, self.play.ledger
        open_ones = [attempt.proposal for peer in self.play.running() for attempt in peer.attempts.values()]
        if not open_ones:
            return
        proposal = self.chance.choice(open_ones)
        if own not in proposal.contributors and own not in ledger.electors[proposal.head]:
            return
        digest = proposal.digest()
        results = [result for known, result in ledger.votes if known == digest and result]
        result = self.chance.choice([*results, b""])
        vote = self.play.sign(liar, proposal, result)
        for other in self.play.running():
            if other is not liar and self.chance.happens(0.6):
                self.play.send(liar, other, partial(self.play.hear, proposal=proposal, vote=vote))

    def _lie_by_certificates(self, liar: Peer, *, is_break: bool) -> None:
        """Continue alone with a break at once, or send a certificate without a quorum."""
        lineage = liar.live
        made = lineage.alone(
            epoch=lineage.epoch + 1,
            kind=RoundKind.EPOCH,
            group_id=self.play.group_id(),
            is_break=is_break,
            sign=liar.signer.sign,
        )
        if is_break:
            self.play.extend(liar, made)
            return
        if is_quorum(lineage.electors, made.votes, made.goodbyes):
            return
        chain = lineage.chain()
        forged = replace(chain, certificates=(*chain.certificates, made))
        for other in self.play.running():
            if other is liar:
                continue
            try:
                relation = other.live.relation(forged)
            except PeerError:
                continue
            if relation in (Relation.AHEAD, Relation.WINS):
                raise BrokenPromiseError("a certificate without a quorum is accepted")


def tell(play: Play, peer: Peer, other: Peer, attempt: Attempt) -> None:
    """Let a peer send another one all votes and goodbyes of an attempt."""
    if other is peer:
        return
    for vote in list(attempt.tally.votes.values()):
        play.send_vote(peer, other, attempt, vote)
    head = attempt.proposal.head
    for leaver, signature in list(attempt.tally.goodbyes.items()):
        effect = partial(play.hear_goodbye, leaver=leaver, head=head, signature=signature)
        play.send(peer, other, effect)


def ask_electors(play: Play, peer: Peer, attempt: Attempt) -> None:
    """Let a peer ask the electors outside of the group, once a majority of its contributors has voted."""
    if attempt.tally.majority and attempt.tally.certificate is None:
        for elector in attempt.tally.electors_missing:
            if elector not in attempt.proposal.contributors:
                play.ask(peer, attempt, play.peers[play.numbers[elector]])


# ---- without faults


@contextmanager
def calm(play: Play, among: Collection[Peer]) -> Iterator[None]:
    """Separate some peers from all others, and let them reach one another. Messages in transit stay in
    transit.
    """
    cuts, messages = play.cuts, play.messages
    inside = {peer.number for peer in among}
    outside = {peer.number for peer in play.peers} - inside
    play.cuts = {
        pair for one, other in itertools.product(inside, outside) for pair in ((one, other), (other, one))
    }
    play.messages = []
    try:
        yield
    finally:
        play.cuts, play.messages = cuts, messages


def deliver_all(play: Play) -> None:
    """Deliver every message and every answer."""
    while play.messages:
        play.deliver(0)


def exchange(play: Play, among: Collection[Peer]) -> None:
    """Let peers exchange everything that they know: votes, histories and endorsements."""
    for peer in among:
        for attempt in list(peer.attempts.values()):
            ask_electors(play, peer, attempt)
            for other in among:
                tell(play, peer, other, attempt)
            if not attempt.has_voted:  # attempts with a vote can still be committed
                play.vote(peer, attempt, gives_up=not attempt.tally.results)
    deliver_all(play)
    for peer, other in itertools.permutations(among, 2):
        play.compare(peer, other)
    deliver_all(play)


def commit_round(play: Play, group: list[Peer], *, is_break: bool) -> None:
    """Run a round of a group without faults."""
    proposal = play.form(group[0], group, is_break=is_break)
    deliver_all(play)
    for peer in group:
        attempt = peer.attempts.get(proposal.digest())
        if attempt is not None:
            play.vote(peer, attempt)
    deliver_all(play)
    exchange(play, group)


def check_progress(play: Play) -> None:
    """Separate some honest peers from all others. If the voters among them are a quorum, they must commit at
    once, without waiting for the grace.
    """
    among = [peer for peer in play.running(honest=True) if play.chance.happens(0.8)]
    with calm(play, among):
        for _ in range(EXCHANGES):
            exchange(play, among)
        for head in dict.fromkeys(peer.live.head for peer in among):
            here = [peer for peer in among if peer.live.head == head]
            free = [peer for peer in here if not peer.is_locked]
            if not here[0].live.electors:
                continue
            if not _is_quorum(free):
                if _is_quorum([peer for peer in here if not peer.live.abstains]):
                    play.counts["quorums that wait: of a vote, nobody there knows what became"] += 1
                elif _is_quorum(here):
                    play.counts["quorums that wait: electors have restarted"] += 1
                continue
            commits = play.counts["commits"]
            commit_round(play, free, is_break=False)
            play.counts["checks of progress"] += 1
            if play.counts["commits"] == commits or any(peer.live.head == head for peer in free):
                raise BrokenPromiseError("a connected quorum did not commit")


def _is_quorum(peers: Sequence[Peer]) -> bool:
    """Return whether peers at one head are a quorum of its electors."""
    if not peers:
        return False
    lineage = peers[0].live
    return is_quorum(lineage.electors, [peer.signer.peer_id for peer in peers], lineage.goodbyes)


def check_healing(play: Play) -> None:
    """End all faults. All honest peers must soon share one head and continue together."""
    liar = play.liar
    if liar is not None and liar.lineage is not None:
        play.stop(liar)
    everybody = [peer for peer in play.peers if peer is not liar]
    with calm(play, everybody):
        for peer in sorted(everybody, key=lambda peer: not peer.checkpoints):
            if peer.lineage is None:
                running = play.running()
                if peer.checkpoints and (not running or play.chance.happens(0.5)):
                    play.start(peer, None)
                elif running:
                    play.start(peer, play.chance.choice(running))
        for second in range(HEAL_S):
            play.now_s += 1.0
            if _is_together(play):
                play.counts["checks of healing"] += 1
                play.counts["seconds until healed"] += second
                return
    heads = Counter(peer.live.head.hex()[:8] for peer in play.running())
    raise BrokenPromiseError(f"after {HEAL_S} s without faults there are these heads: {dict(heads)}")


def _is_together(play: Play) -> bool:
    """Let all peers continue for a second. Return whether all have committed a round together."""
    running = play.running()
    exchange(play, running)
    for peer in running:
        play.look(peer)
    for head in dict.fromkeys(peer.live.head for peer in running):
        here = [peer for peer in running if peer.live.head == head]
        free = [peer for peer in here if not peer.is_locked]
        breaking = [peer for peer in here if peer.wants_break]
        if breaking:
            commit_round(play, breaking, is_break=True)
        elif _is_quorum(free):
            commit_round(play, free, is_break=False)
            if len(free) == len(running) and len({peer.live.head for peer in running}) == 1:
                return True
    return False


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seed", default=1, show_default=True, help="Seed of all randomness.")
@click.option("--plays", default=1, show_default=True, help="How many seeds, from this one on.")
@click.option("--electors", default=3, show_default=True, type=click.IntRange(2, 8))
@click.option("--newcomers", default=1, show_default=True, type=click.IntRange(0, 8))
@click.option("--steps", default=2000, show_default=True, help="Of each play.")
@click.option("--liar", is_flag=True, help="One of the electors lies.")
def main(seed: int, plays: int, electors: int, newcomers: int, steps: int, liar: bool) -> None:
    """Play peers that keep one history under faults, with real signatures. When a promise is broken, print
    the command that replays the play and exit with code 1.
    """
    counts: Counter[str] = Counter()
    for number in range(seed, seed + plays):
        config = PlayConfig(seed=number, electors=electors, newcomers=newcomers, steps=steps, has_liar=liar)
        try:
            counts += RandomPlay(config, SeededIdentity).run()
        except BrokenPromiseError as error:
            click.echo(f"{error}\nreplay: {replay_line(config)}")
            raise SystemExit(1) from None
    for name, count in sorted(counts.items()):
        click.echo(f"{count:8} {name}")


def replay_line(config: PlayConfig) -> str:
    """Return the command that replays a play."""
    return (
        f"python -m swarm.testing.history_plays --seed {config.seed} --electors {config.electors} "
        f"--newcomers {config.newcomers} --steps {config.steps}{' --liar' if config.has_liar else ''}"
    )


if __name__ == "__main__":
    main()
