"""Methods that others stand in for are given back, whoever goes first."""

from itertools import permutations
from typing import Any

import pytest

from lit_fsdp.sharding.replaced_method import ReplacedMethod


class Owner:
    def say(self, word: str) -> str:
        return word


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("order", permutations(range(3)))
def test_they_are_removed_in_any_order(order: tuple[int, ...], has_own: bool) -> None:
    owner: Any = Owner()
    if has_own:
        owner.say = "own {}".format
    before, left = dict(vars(owner)), [0, 1, 2]
    replaced = [ReplacedMethod(owner, "say", lambda say, word, i=i: f"{say(word)} {i}") for i in left]
    for number in order:
        assert owner.say("x") == " ".join(["own x" if has_own else "x", *map(str, left)])
        replaced[number].remove()
        left.remove(number)
    assert vars(owner) == before


def test_what_others_have_put_in_its_place_stays() -> None:
    owner: Any = Owner()
    replaced = ReplacedMethod(owner, "say", lambda say, word: say(word) * 2)
    owner.say = other = "other {}".format
    replaced.remove()
    assert owner.say is other
