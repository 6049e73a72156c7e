import pytest

from lit_fsdp.planning.closed_form.step_walk import Walk, WalkSettings
from lit_fsdp.planning.closed_form.tape import Tape
from lit_fsdp.sharding.shard import Sharding

SIZE = 1000
SETTINGS = WalkSettings(
    num_shards=1,
    is_replicated=False,
    num_micro_batches=1,
    sharding=Sharding(forward_prefetch=0, backward_prefetch=1),
    reduce_itemsize=4,
    casts_shards=False,
    saved_ops=frozenset(),
    keeps_shards=True,
)


@pytest.mark.parametrize(("name", "num_most"), [("mul", 2), ("mm", 3)])
def test_gradients_of_a_value_are_summed_in_place_unless_the_first_is_a_view(name: str, num_most: int) -> None:
    tape = Tape(itemsize=4)
    x = tape.add_value(SIZE, needs_grad=True)
    heads = [tape.add(name, (x,), 1) for _ in range(2)]
    tape.add("add", heads, 1, shares_grad=True)
    walk = Walk(tape=tape, units=[], owners={}, settings=SETTINGS, fixed={})
    walk.run()
    most = max(moment.num_bytes for moment in walk.finish() if moment.phase == "backward")
    assert most // SIZE == num_most


@pytest.mark.parametrize(("names", "num_most"), [(("mm", "embedding"), 3), (("embedding", "mm"), 2)])
def test_so_are_those_of_a_shared_weight(names: tuple[str, str], num_most: int) -> None:
    # The last of forward is the first of backward.
    tape = Tape(itemsize=4)
    x = tape.add_value(1, needs_grad=True)
    for name in reversed(names):
        x = tape.add(name, (x,), 1, weights=[("weight", SIZE)])
    walk = Walk(tape=tape, units=[], owners={}, settings=SETTINGS, fixed={})
    walk.run()
    most = max(moment.num_bytes for moment in walk.finish() if moment.phase == "backward")
    assert most // SIZE == num_most
