"""Which peers have a voice in the history that a newcomer follows."""

from __future__ import annotations

from averaging.history.known_heads import ASK_AGAIN_S, SILENT_S, KnownHeads
from swarm.core.ids import Address, Contact, PeerId
from tests.averaging.history.peers import PEERS

A, B, C = (Contact(peer, (Address("127.0.0.1", 1000),)) for peer in PEERS[:3])
HEAD, NEXT = b"h" * 32, b"n" * 32


def known() -> KnownHeads:
    heads = KnownHeads()
    heads.heard(A, HEAD, 0.0)
    heads.heard(B, HEAD, 0.0)
    return heads


def test_a_peer_that_answers_no_call_for_long_has_no_voice() -> None:
    heads = known()
    for now_s in (0.0, 5.0):
        heads.missed(A.peer_id, now_s, refused=False)
    assert heads.reported(SILENT_S - 0.1) == {A.peer_id: HEAD, B.peer_id: HEAD}
    assert heads.reported(SILENT_S) == {B.peer_id: HEAD}
    heads.heard(A, HEAD, 10.0)  # the record of a dead peer is read again and again
    assert heads.reported(SILENT_S) == {B.peer_id: HEAD}


def test_a_peer_is_silent_since_it_was_heard_last_and_not_since_the_first_call() -> None:
    """Regression test: a newcomer whose download had failed followed the live peer only after it had itself
    asked the failed ones for another 15 s.
    """
    heads = known()
    heads.heard(B, HEAD, 40.0)
    for one in (A, B):
        heads.missed(one.peer_id, 41.0, refused=False)
    assert heads.reported(41.0) == {B.peer_id: HEAD}
    assert heads.reported(40.0 + SILENT_S) == {}


def test_a_peer_has_its_voice_again_once_it_answers_or_reports_another_head() -> None:
    heads = known()
    heads.missed(A.peer_id, 0.0, refused=False)
    heads.missed(B.peer_id, 0.0, refused=False)
    heads.answered(A.peer_id)
    heads.heard(B, NEXT, 1.0)
    assert heads.reported(2 * SILENT_S) == {A.peer_id: HEAD, B.peer_id: NEXT}


def test_a_peer_whose_host_refuses_connections_has_no_voice_at_once() -> None:
    heads = known()
    heads.missed(A.peer_id, 0.0, refused=True)
    assert heads.reported(0.0) == {B.peer_id: HEAD}
    assert heads.is_gone(A.peer_id)
    heads.missed(B.peer_id, 0.0, refused=False)
    assert not heads.is_gone(B.peer_id)  # it is cut off, perhaps: the others wait for the whole grace


def test_one_question_about_a_head_is_not_repeated_within_a_second() -> None:
    """Regression test: a peer that waited for a quorum asked for the same histories six times a second."""
    heads, own = known(), b"o" * 32
    heads.heard(C, NEXT, 0.0)

    def asked(now_s: float, own_head: bytes = own) -> list[list[Contact]]:
        return heads.to_ask([C.peer_id], lambda head: head == HEAD, lambda peer: True, own_head, now_s)[0]

    first = [[C], [B, A]]
    assert asked(0.0) == first
    for now_s in (0.2, 0.4, ASK_AGAIN_S - 0.1):
        assert asked(now_s) == []
    heads.heard(C, HEAD, 0.5)  # it has news
    assert asked(0.9) == [[C]]
    assert asked(ASK_AGAIN_S) == [[B, A]]
    assert asked(ASK_AGAIN_S, b"p" * 32) == [[C], [B, A]], "this peer's own history has moved"


def test_each_of_many_dead_peers_loses_its_voice() -> None:
    """Regression test: the last three that had reported a head were asked again and again. The voices of the
    other dead ones counted from then on, and a newcomer never followed the history of the only live peer.
    """
    heads = KnownHeads()
    dead = [Contact(PeerId(bytes([number]) * 32), A.addresses) for number in range(1, 10)]
    for contact in (A, *dead):
        heads.heard(contact, HEAD if contact in dead else NEXT, 0.0)
    for now_s in range(1, 5):
        asked, _ = heads.to_ask([], lambda head: True, lambda peer: True, b"o" * 32, now_s)
        for contact in {one for holders in asked for one in holders} - {A}:
            heads.missed(contact.peer_id, now_s, refused=False)
    assert heads.reported(SILENT_S) == {A.peer_id: NEXT}


def test_a_head_that_a_counted_peer_reports_is_not_among_those_of_strangers() -> None:
    heads = known()
    heads.heard(C, HEAD, 0.0)

    def asked(now_s: float) -> tuple[list[list[Contact]], list[list[Contact]]]:
        return heads.to_ask([], lambda head: True, lambda peer: peer != C.peer_id, b"o" * 32, now_s)

    assert asked(0.0) == ([[B, A]], [])
    assert asked(0.5) == ([], []), "its holders were asked within the last second"
    heads.heard(C, NEXT, 0.6)
    assert asked(0.7) == ([], [[C]])


def test_strangers_of_any_number_displace_no_member() -> None:
    """Regression: of 300 strangers that reported heads the last 256 stayed, and members that were cut off
    counted as gone, for which nobody waits.
    """
    heads, members = KnownHeads(), {A.peer_id, B.peer_id}
    strangers = [Contact(PeerId(number.to_bytes(32, "big")), ()) for number in range(1, 301)]
    for contact in (A, B, *strangers):
        heads.heard(contact, HEAD, 0.0, members.__contains__)
        heads.missed(contact.peer_id, 0.0, refused=contact not in (A, B))
    assert not heads.is_gone(A.peer_id)
    assert heads.reported(0.0).keys() == members
    assert heads.contacts(one.peer_id for one in strangers[-200:]) == strangers[-200:]
