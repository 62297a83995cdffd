"""`Lineage` against a model that keeps every certificate in a plain list, far beyond what a lineage keeps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from averaging.history.certificate import Certificate, RoundKind, genesis
from averaging.history.chain import Chain, Relation, after, beginning
from averaging.history.electors import FOUNDING_MAX, is_quorum
from averaging.history.encoding import decode_chain, encode_chain
from averaging.history.lineage import CERTIFICATES_MAX, PARTINGS_MAX, Lineage
from swarm.core.ids import PeerId
from swarm.core.standing import NO_SPECIFICATION
from tests.averaging.history.peers import PEERS, RUN, certificate

COUNT = 5
HEADS_MAX = 12


@dataclass
class Model:
    """The history of one peer: everything since the beginning of the run, and how much of it is kept."""

    kept_max: int
    line: list[Certificate] = field(default_factory=list)
    first: int = 0  # number of the oldest certificate that is kept
    since: int = 0  # number of the oldest certificate that it has ever seen

    @property
    def heads(self) -> list[bytes]:
        """Return all heads, that of the beginning included."""
        return [genesis(RUN), *(one.head for one in self.line)]

    @property
    def known(self) -> list[bytes]:
        return self.heads[self.first :]

    def root(self, place: int) -> Chain:
        """Return the empty chain after the first `place` certificates."""
        root = beginning(RUN, NO_SPECIFICATION)
        last_break = next((one.head for one in reversed(self.line[:place]) if one.proposal.is_break), b"")
        return replace(after(self.line[place - 1], b"") if place else root, root_line=last_break)

    def chain(self, heads: Sequence[bytes], count_max: int) -> Chain:
        """Return what follows the newest of `heads` in what is kept, at most the last `count_max`."""
        places = [place for place, head in enumerate(self.heads) if place >= self.first and head in heads]
        start = max([*places, self.first, len(self.line) - count_max])
        return replace(self.root(start), certificates=tuple(self.line[start:]))

    def partings(self) -> list[Chain]:
        """Return the roots before the newest breaks."""
        places = [place for place, one in enumerate(self.line) if one.proposal.is_break]
        roots = [self.root(place) for place in places if place >= self.since]
        return [replace(root, root_line=b"") for root in roots[::-1][:PARTINGS_MAX]]

    def take(self, line: Sequence[Certificate], first: int) -> None:
        """Keep a line from a number on, as far as there is room for it."""
        self.line = list(line)
        self.first = max(first, len(self.line) - self.kept_max)


def relation(own: Model, chain: Chain, full: Sequence[Certificate], peer: PeerId) -> Relation:
    """Return the relation that a peer which is not waiting finds. `full`: the line that the chain is of."""
    if chain.last_head == own.heads[-1]:
        return Relation.SAME
    if chain.last_head in own.known:
        return Relation.BEHIND
    starts = [one.proposal.head for one in chain.certificates]
    common = [head for head in own.known if head in starts]
    if not common:
        return Relation.UNRELATED
    place = own.heads.index(common[-1])
    theirs = next(one for one in full if one.proposal.head == common[-1])
    root = own.root(place)
    if place == len(own.line):
        is_followed = not theirs.proposal.is_break or place == 0
        by_strangers = peer not in root.electors and bool({*root.electors} & {*theirs.proposal.contributors})
        return Relation.AHEAD if is_followed or by_strangers else Relation.LOSES
    ours = own.line[place]
    electors = root.electors if place else ()
    if electors and ours.proposal.is_break != theirs.proposal.is_break:
        return Relation.WINS if ours.proposal.is_break else Relation.LOSES

    def seats(one: Certificate) -> tuple[int, list[bool], bytes]:
        there = [elector in one.proposal.contributors for elector in electors]
        return sum(there), there, one.head

    if any(seats(ours)[1]) or any(seats(theirs)[1]):
        return Relation.WINS if seats(theirs) > seats(ours) else Relation.LOSES
    wins = (chain.epoch, ours.head) > (own.line[-1].proposal.epoch, theirs.head)
    return Relation.WINS if wins and len(own.line) - place <= FOUNDING_MAX else Relation.LOSES


def next_certificate(history: Lineage, draw: random.Random, number: int) -> Certificate:
    """Return a valid certificate of a random group on a history's head."""
    count = draw.choice([1, COUNT - 1, COUNT, COUNT])
    group = sorted(draw.sample(PEERS[:COUNT], count))
    if history.own not in group:
        group[0] = history.own
    kind = RoundKind.STATE if history.has_begun and draw.random() < 0.2 else RoundKind.EPOCH
    about = history.propose(
        epoch=history.epoch + (kind is RoundKind.EPOCH),
        kind=kind,
        group_id=number.to_bytes(32, "little"),
        contributors=group,
        is_break=not is_quorum(history.electors, group),
    )
    return certificate(about, group)


def check(history: Lineage, own: Model, draw: random.Random, unknown: Sequence[bytes]) -> None:
    """Compare everything that a lineage tells about itself."""
    place, heads = len(own.line), own.heads
    end = own.root(place)
    assert (history.head, history.electors, history.register) == (heads[-1], end.electors, end.root_register)
    assert (history.epoch, history.line, history.has_begun) == (end.root_epoch, end.root_line, place > 0)
    assert history.present() == end
    for head in {draw.choice(heads), own.known[0], *own.known[-2:]}:
        is_known = head in own.known
        assert history.knows(head) is is_known
        number = heads.index(head)
        assert history.epoch_at(head) == (own.root(number).root_epoch if is_known else None)
        if is_known:
            kinds = {one.proposal.kind for one in own.line[number:]}
            assert history.is_repeatable(head) is (kinds <= {RoundKind.EPOCH})
    asked = draw.sample(heads, min(len(heads), 3)) + draw.sample(unknown, min(len(unknown), 1))
    asked += draw.sample(own.known, min(len(own.known), draw.randrange(2)))
    for count_max in (draw.randrange(1, own.kept_max + 1), own.kept_max):
        assert history.chain(asked, count_max) == own.chain(asked, count_max)
    assert history.chain() == own.chain((), own.kept_max)
    assert [replace(one, root_line=b"") for one in history.partings()] == own.partings()
    told = history.heads()
    distances = [own.known[::-1].index(head) for head in told]
    assert distances[0] == 0
    assert distances[-1] == len(own.known) - 1
    assert len(told) <= HEADS_MAX
    assert all(b <= 2 * a + 1 for a, b in itertools.pairwise(distances))


@pytest.mark.parametrize(
    ("seed", "kept_max", "turns"), [*((seed, 9, 150) for seed in range(3)), (3, CERTIFICATES_MAX, 24)]
)
def test_a_lineage_answers_as_a_list_of_all_certificates_does(
    seed: int, kept_max: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers extend their histories together or apart, for longer and shorter than what is kept, and adopt one
    another's, whatever the relation.
    """
    monkeypatch.setattr("averaging.history.lineage.CERTIFICATES_MAX", kept_max)
    draw = random.Random(seed)
    histories = [Lineage(RUN, peer) for peer in PEERS[:COUNT]]
    models = [Model(kept_max) for _ in histories]
    found = set[Relation]()
    for number in range(turns):
        one = draw.randrange(COUNT)
        for step in range(draw.choice([1, 3, kept_max // 2, kept_max + 2]) if draw.random() < 0.1 else 1):
            made = next_certificate(histories[one], draw, 1000 * number + step)
            for place, history in enumerate(histories):
                if history.head == made.proposal.head and (place == one or draw.random() < 0.9):
                    history.extend(made)
                    models[place].take([*models[place].line, made], models[place].first)
        one, other = draw.sample(range(COUNT), 2)
        chain = histories[one].chain(histories[other].heads())
        assert decode_chain(encode_chain(chain)) == chain
        expected = relation(models[other], chain, models[one].line, PEERS[other])
        assert histories[other].relation(chain) is expected
        found.add(expected)
        common = [h for h in models[other].known if h in [c.proposal.head for c in chain.certificates]]
        parted = models[other].heads.index(common[-1]) if common else None
        lost = models[other].root(len(models[other].line)).root_epoch
        base = lost if parted is None else models[other].root(parted).root_epoch
        assert histories[other].epochs_after(chain) == lost - base
        follows = expected in (Relation.AHEAD, Relation.WINS, Relation.UNRELATED)
        if draw.random() < (0.7 if follows else 0.2):
            full = models[one].line
            known_from = models[other].first if common or chain.last_head in models[other].known else None
            first = models[one].heads.index(chain.head) if known_from is None else known_from
            histories[other].adopt(chain)
            models[other].take(full, first)
            if known_from is None:
                models[other].since = first
        unknown = [head for head in models[one].heads if head not in models[other].heads]
        check(histories[other], models[other], draw, unknown)
        check(histories[one], models[one], draw, unknown)
    assert turns < 100 or found == {*Relation}
