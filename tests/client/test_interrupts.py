"""Ctrl-C at any moment of a request: the next one on the same connection is answered."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from slipstream_client import SlipstreamClient
from slipstream_client.interrupts import interruptible

ROUNDS = 60
MOST_LOST = 2  # presses: within a callback of the collector or a weak reference none is raised
PRESSED_S = 5.0  # by then it surely was
WORDS = "say " + "word " * 2_000


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Python's own, which a shell that starts the tests in the background takes away."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def pressed_after(delay_s: float) -> Iterator[None]:
    """Ctrl-C in the main thread, once."""
    main = threading.main_thread().ident
    assert main is not None
    key = threading.Timer(delay_s, lambda: signal.pthread_kill(main, signal.SIGINT))
    key.start()
    try:
        yield
    finally:
        key.join()


def answers(client: SlipstreamClient) -> bool:
    """Whether a request in another thread is answered."""
    found: list[str] = []
    ask = threading.Thread(
        target=lambda: found.append(client.complete("say yes", max_tokens=1).text), daemon=True
    )
    ask.start()
    ask.join(120)
    return found == ["yes "]


def ask_until_pressed(client: SlipstreamClient, kind: str) -> None:
    until = time.monotonic() + PRESSED_S
    while time.monotonic() < until:
        if kind == "health":
            client.health(timeout_s=120.0)
        for _ in client.stream(WORDS, max_tokens=2_000):
            pass


@pytest.mark.parametrize("kind", ["stream", "health"])
def test_the_connection_works_after_an_interrupt_at_any_moment(served, kind):
    with SlipstreamClient(served[1], timeout_s=120.0) as client:
        num_raised = 0
        for number in range(ROUNDS):
            try:
                with pressed_after(0.0005 + number % 20 * 0.0005):
                    ask_until_pressed(client, kind)
            except KeyboardInterrupt:
                num_raised += 1
            assert answers(client), f"the connection hangs after interrupt {number}"
        assert num_raised >= ROUNDS - MOST_LOST


def wait(event: threading.Event) -> None:
    with interruptible(event.set):
        signal.raise_signal(signal.SIGINT)
        while not event.is_set():
            pass


def test_an_interrupt_ends_a_wait_and_is_raised_after_it():
    pressed = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        wait(pressed)
    assert pressed.is_set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def fail() -> None:
    with interruptible():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("cancelled")


def test_an_interrupt_replaces_the_error_that_it_caused():
    with pytest.raises(KeyboardInterrupt):
        fail()


def test_a_program_that_handles_the_signal_keeps_its_handler():
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with interruptible(lambda: seen.append(-1)):
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT]
