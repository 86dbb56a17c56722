"""When a step ended, by hosts that look late and devices whose clocks are not the host's."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.runner.launched import StepEnds

NS_A_MS = 1_000_000
IN_FLIGHT = 2


@dataclass
class Stream:
    """A host and a device: what each is at, in ns."""

    rate: float  # of the device's clock, to the host's
    now_ns: int = 0
    free_ns: int = 0  # end of what was launched
    lengths_ns: list[int] = field(default_factory=list)

    def launch(self, host_ns: int, length_ns: int) -> int:
        """Launch a step for so long, beside which the device runs it; return its end."""
        begin_ns = max(self.now_ns, self.free_ns)
        self.now_ns += host_ns
        self.free_ns = max(begin_ns + length_ns, self.now_ns)
        return self.free_ns


@dataclass
class Point:
    """An event of the stream."""

    stream: Stream
    at_ns: int = 0

    def record(self) -> None:
        self.at_ns = self.stream.free_ns

    def query(self) -> bool:
        return self.stream.now_ns >= self.at_ns

    def synchronize(self) -> None:
        self.stream.now_ns = max(self.stream.now_ns, self.at_ns)

    def elapsed_time(self, end_event: "Point") -> float:
        return self.stream.rate * (end_event.at_ns - self.at_ns) / NS_A_MS


steps = st.lists(
    st.tuples(
        st.integers(0, 20 * NS_A_MS),  # of the host, to launch it
        st.integers(NS_A_MS, 40 * NS_A_MS),  # of the device
        st.integers(0, 30 * NS_A_MS),  # that the host does something else
        st.booleans(),  # whether anybody waits for it: a step that fails has no end
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps, st.sampled_from([1.0, 1.0, 0.99999, 1.00001]))
def test_an_end_is_known_once_the_host_has_waited(drawn, rate):
    stream = Stream(rate)
    ends = StepEnds([Point(stream) for _ in range(IN_FLIGHT + 1)], lambda: stream.now_ns)
    flights, is_known, slack = [], False, 10_000
    for host_ns, length_ns, idle_ns, is_seen in [*drawn, (0, 1, 0, True)]:
        flights.append((stream.launch(host_ns, length_ns), ends.record(), is_seen))
        if len(flights) < IN_FLIGHT:
            continue
        end_ns, number, is_seen = flights.pop(0)
        is_late = stream.now_ns >= end_ns
        if not is_seen:
            is_known = False  # until the host waits again
            stream.now_ns = max(stream.now_ns, end_ns)
            continue
        said_ns = stream.now_ns
        ago_ns = ends.wait(number)
        said_ns = stream.now_ns - ago_ns
        assert ago_ns >= 0
        assert said_ns >= end_ns - slack  # 40 steps of 40 ms by a clock that is 10 ppm off
        is_known = is_known or not is_late
        if is_known:
            assert abs(said_ns - end_ns) <= slack
        stream.now_ns += idle_ns


def test_a_late_look_at_the_first_step_is_taken_as_its_end():
    stream = Stream(1.0)
    ends = StepEnds([Point(stream) for _ in range(IN_FLIGHT + 1)], lambda: stream.now_ns)
    stream.launch(0, 3 * NS_A_MS)
    number = ends.record()
    stream.now_ns = 10 * NS_A_MS
    assert ends.wait(number) == 0
