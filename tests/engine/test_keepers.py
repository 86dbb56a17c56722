"""When an engine ends for lack of models: after the last Bye, never for a death."""

from hypothesis import given
from hypothesis import strategies as st
from slipstream import wire
from slipstream.engine.keepers import UNUSED_S, Keepers


def hello(keeps: bool = True) -> wire.Hello:
    return wire.Hello(wire.PROTOCOL, "v", "model", 1, keeps)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["hello", "guest", "bye", "death"]), st.sampled_from([b"a", b"b", b"c"])
    ),
    max_size=30,
)


@given(EVENTS)
def test_it_ends_only_when_all_models_are_gone_and_one_said_bye_since_the_last_came(events):
    clock = Clock()
    keepers = Keepers(clock)
    keeping: set[bytes] = set()
    said_bye = False
    for event, bridge in events:
        clock.now_s += 1.0
        if event == "hello":
            keepers.add(bridge, hello())
            keeping.add(bridge)
            said_bye = False
        elif event == "guest" and bridge not in keeping:
            keepers.add(bridge, hello(keeps=False))
        elif event in ("bye", "death"):
            said_bye |= event == "bye" and bridge in keeping
            keepers.remove(bridge, says_bye=event == "bye")
            keeping.discard(bridge)
        assert keepers.are_gone == (said_bye and not keeping)
    clock.now_s += UNUSED_S / 2
    assert not keepers.are_gone_for_good or not keeping
    clock.now_s += UNUSED_S
    assert keepers.are_gone_for_good == (said_bye and not keeping)


def test_a_repair_has_time_to_load_the_model_again():
    clock = Clock()
    keepers = Keepers(clock)
    keepers.add(b"a", hello())
    keepers.remove(b"a", says_bye=True)
    clock.now_s += UNUSED_S - 0.1
    assert keepers.are_gone
    assert not keepers.are_gone_for_good
    keepers.add(b"b", hello())
    clock.now_s += 1000
    assert not keepers.are_gone
