"""Ctrl-C at any moment of a request: the next one on the same connection is answered."""

import contextlib
import signal
import threading
from collections.abc import Iterator

import pytest
from slipstream_client import SlipstreamClient
from slipstream_client.interrupts import interruptible

ROUNDS = 60
WORDS = "say " + "word " * 2_000


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Python's own, which a shell that starts the tests in the background takes away."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def pressed_after(delay_s: float) -> Iterator[None]:
    """Ctrl-C in the main thread; again each second, as one that comes within a callback of the
    garbage collector (hypothesis has one) is not raised.
    """
    main, left = threading.main_thread().ident, threading.Event()
    assert main is not None

    def press(after_s: float) -> None:
        while not left.wait(after_s):
            signal.pthread_kill(main, signal.SIGINT)
            after_s = 1.0

    key = threading.Thread(target=press, args=(delay_s,))
    key.start()
    try:
        yield
    finally:
        left.set()
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


def ask_forever(client: SlipstreamClient, kind: str) -> None:
    while True:
        if kind == "health":
            client.health(timeout_s=120.0)
        for _ in client.stream(WORDS, max_tokens=2_000):
            pass


@pytest.mark.parametrize("kind", ["stream", "health"])
def test_the_connection_works_after_an_interrupt_at_any_moment(served, kind):
    with SlipstreamClient(served[1], timeout_s=120.0) as client:
        for number in range(ROUNDS):
            with pytest.raises(KeyboardInterrupt), pressed_after(0.0005 + number % 20 * 0.0005):
                ask_forever(client, kind)
            assert answers(client), f"the connection hangs after interrupt {number}"


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
