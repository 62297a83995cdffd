"""Which state a newcomer loads according to the electors' reports, for every possible lie of a minority."""

from __future__ import annotations

import itertools

import pytest

from averaging.optim.state.vouching import states_to_take
from tests.averaging.history.peers import PEERS

TRUE, FALSE, OTHER = (bytes([number]) * 32 for number in range(3))


@pytest.mark.parametrize("electors", range(1, 8))
@pytest.mark.parametrize("waits", [True, False])
def test_no_minority_of_liars_chooses_the_state_whatever_each_of_them_says(
    electors: int, waits: bool
) -> None:
    asked = PEERS[:electors]
    for liars in range((electors + 1) // 2):
        for places in itertools.combinations(range(electors), liars):
            for lie in (FALSE, TRUE, None):
                answers = [lie if place in places else TRUE for place in range(electors)]
                said = {peer: one for peer, one in zip(asked, answers, strict=True) if one is not None}
                assert states_to_take(asked, said, waits=waits) == (TRUE,)


def test_half_of_the_electors_decide_with_the_most_senior_one_and_not_without() -> None:
    one, two = PEERS[:2]
    assert states_to_take([one, two], {one: TRUE}, waits=True) == (TRUE,)
    assert states_to_take([one, two], {two: FALSE}, waits=True) is None
    assert states_to_take([one, two], {one: TRUE, two: FALSE}, waits=True) == (TRUE,)


def test_while_most_electors_may_still_answer_no_state_is_taken() -> None:
    asked = PEERS[:5]
    said = {asked[3]: FALSE, asked[4]: FALSE}
    assert states_to_take(asked, {}, waits=True) is None
    assert states_to_take(asked, said, waits=True) is None
    assert states_to_take(asked, said, waits=False) == (FALSE,)
    assert states_to_take(asked, {}, waits=False) == ()
    assert states_to_take([], {}, waits=True) == ()


def test_where_honest_electors_differ_the_most_senior_one_comes_before_a_group_of_liars() -> None:
    asked = PEERS[:5]
    said = dict(zip(asked, [TRUE, OTHER, FALSE, FALSE, bytes([9]) * 32], strict=True))
    found = states_to_take(asked, said, waits=True)
    assert found is not None
    assert found[0] == TRUE
    late = {peer: one for peer, one in said.items() if peer != asked[0]}
    assert states_to_take(asked, late, waits=True) is None, "the most senior one may still answer"


def test_electors_that_differ_decide_nothing_while_a_majority_is_possible() -> None:
    liar, honest, last = PEERS[:3]
    said = {liar: FALSE, honest: TRUE}
    assert states_to_take([liar, honest, last], said, waits=True) is None
    assert states_to_take([liar, honest, last], {**said, last: TRUE}, waits=True) == (TRUE,)
