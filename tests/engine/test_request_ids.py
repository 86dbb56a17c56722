"""A request id runs once in a model, whichever of the model's processes receives it."""

import pytest
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from hypothesis import given
from hypothesis import strategies as st
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.wire import Submit
from slipstream_contract.errors import ContractError
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

THREE = SamplingParams(max_tokens=3, temperature=0.0)
BRIDGES = (b"one", b"two", b"three")


def submit(engine: Engine, bridge: bytes, number: int, request_id: str, model: str) -> None:
    message = Submit(number, pack([1]), THREE, 1, request_id=request_id, model=model)
    engine.submit(bridge, message)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "submit", "cancel", "step", "drop"]),
            st.sampled_from(BRIDGES),
            st.sampled_from(["", "a", "b"]),
            st.sampled_from(["m", "n"]),
        ),
        max_size=30,
    )
)
def test_another_process_is_refused_an_id_exactly_while_it_runs(
    actions: list[tuple[str, bytes, str, str]],
) -> None:
    """An id is in use until the end is sent; a cancelled request gives it back at once."""
    engine = Engine(Limits(4, 8, 100), CountingRunner(40, 40), Words())
    running: dict[tuple[bytes, int], tuple[str, str]] = {}
    for number, (what, bridge, request_id, model) in enumerate(actions):
        if what == "submit":
            name = model, request_id
            owners = {owner for (owner, _), theirs in running.items() if theirs == name}
            if request_id and owners - {bridge}:
                with pytest.raises(ContractError, match=f"ALREADY_EXISTS: .*'{request_id}'"):
                    submit(engine, bridge, number, request_id, model)
            else:
                submit(engine, bridge, number, request_id, model)
                running[bridge, number] = name
        elif what == "step":
            for owner, tokens in engine.step().items():
                for each in tokens:
                    if each.finished is not None:
                        running.pop((owner, each.request), None)
        else:
            for owner, each in list(running):
                if owner == bridge and engine.cancel(owner, each):
                    del running[owner, each]
                    if what == "cancel":
                        break
        engine.check_integrity()
    while engine.has_work:
        engine.step()
    engine.check_integrity()
