"""Track what a bridge requested on one connection, and how much of the answers has come.

ZeroMQ neither loses nor repeats messages, so normally nothing is found here. But a receiver drops a
damaged frame, and its content must not be missing silently: tokens carry their start position in
the sequence, and once a second the engine reports which requests it has.
"""

from slipstream import wire

_ENDED = 1 << 62


class Ledger:
    """All requests of a connection that have not ended. Not thread-safe."""

    def __init__(self) -> None:
        self._num_received: dict[int, list[int]] = {}  # request -> tokens of each sequence
        self._unanswered: dict[int, wire.Submit] = {}  # requests without any answer
        self._ping: tuple[int, frozenset[int]] | None = None  # number, requests known then

    def add(self, message: wire.Submit, is_first: bool = True) -> None:
        """Add a request that is being sent, for the first time or again."""
        self._num_received[message.request] = [0] * message.num_streams
        if is_first:
            self._unanswered[message.request] = message

    def unanswered(self) -> list[wire.Submit]:
        """Return requests sent once without any answer: another engine may run them."""
        return list(self._unanswered.values())

    def remove(self, request: int) -> None:
        """Remove a request that has ended without its last tokens."""
        self._num_received.pop(request, None)
        self._unanswered.pop(request, None)

    def take(self, outputs: wire.StepOutputs) -> tuple[list[wire.Tokens], set[int]]:
        """Return tokens that continue their sequences, and requests that miss some before."""
        right, lost = [], set()
        for tokens in outputs.tokens:
            request, index, start = tokens.request, tokens.index, tokens.start
            received = self._num_received.get(request)
            if received is None or not 0 <= index < len(received):
                continue
            if start != received[index]:
                if start > received[index]:  # else they are repeated
                    lost.add(request)
                    self.remove(request)
                continue
            if not start:
                self._unanswered.pop(request, None)
            received[index] = start + len(tokens.token_ids)
            if tokens.finished is not None:
                received[index] = _ENDED
                if min(received) == _ENDED:
                    del self._num_received[request]
            right.append(tokens)
        return right, lost

    def note_ping(self, number: int) -> None:
        """Note that `Ping` `number` is sent now, after all requests known so far."""
        self._ping = number, frozenset(self._num_received)

    def compare(self, status: wire.Status) -> tuple[set[int], set[int]]:
        """Return requests that the engine lacks, and requests that it should not have.

        All that the engine sent for a request before it ended has come before this answer.
        """
        if self._ping is None or self._ping[0] != status.number or status.requests is None:
            return set(), set()
        known, self._ping = self._ping[1], None
        theirs = set(status.requests)
        lost = {request for request in known if request in self._num_received} - theirs
        for request in lost:
            self.remove(request)
        return lost, theirs - self._num_received.keys()
