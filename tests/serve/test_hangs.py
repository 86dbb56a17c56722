"""Whether a server hangs or is only busy: a verdict on signs."""

import pytest
from slipstream_serve.hangs import ServerSigns, verdict

FINE, LATE = 0.9, 2.0


@pytest.mark.parametrize(
    ("http_s", "streams_s", "resting_s", "said"),
    [
        (FINE, FINE, 0.0, ""),
        (FINE, FINE, 99.0, ""),  # an idle server rests and answers
        (LATE, LATE, 99.0, ""),
        # A thread parses a body, so HTTP is silent; then it rests and still owes the answer.
        (50.0, FINE, 0.3, ""),
        (50.0, FINE, 1.9, ""),
        (50.0, FINE, 2.1, "tritonserver did not answer for 3.5 s"),
        (3.6, FINE, 2.3, "tritonserver did not answer for 3.5 s"),
        (3.6, 3.6, 2.3, "tritonserver did not answer for 3.5 s"),
        (3.4, 3.4, 2.3, ""),
        # A thread works for ever.
        (60.1, FINE, 0.0, "tritonserver did not answer for 60 s"),
        # gRPC streams stand still, with and without work beside them.
        (FINE, 3.6, 2.3, "gRPC streams of tritonserver stood still for 3.5 s"),
        (FINE, 19.9, 0.1, ""),
        (FINE, 20.1, 0.1, "gRPC streams of tritonserver stood still for 20 s"),
        # Nobody answers, but a thread works: a machine with too much to do.
        (15.0, 15.0, 0.1, ""),
        (21.0, 21.0, 0.1, "gRPC streams of tritonserver stood still for 20 s"),
    ],
)
def test_the_verdict_on_signs(http_s: float, streams_s: float, resting_s: float, said: str) -> None:
    assert verdict(ServerSigns(http_s, streams_s, resting_s)) == said


@pytest.mark.parametrize("resting_s", [0.0, 1.0, 3.0, 99.0])
def test_more_silence_never_makes_a_server_well(resting_s: float) -> None:
    steps = [step / 4 for step in range(300)]
    for fixed in (FINE, 10.0, 30.0):
        for signs in (
            [ServerSigns(step, fixed, resting_s) for step in steps],
            [ServerSigns(fixed, step, resting_s) for step in steps],
        ):
            found = [bool(verdict(each)) for each in signs]
            assert found == sorted(found)
