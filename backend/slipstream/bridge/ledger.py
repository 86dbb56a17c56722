"""What a bridge asked the engine on one connection, and how much of it was told.

ZeroMQ neither loses nor repeats a message, so normally nothing is found here. But a frame that was
damaged on its way is dropped by whoever gets it, and what was in it must not be missing in silence:
tokens say at which place of their sequence they begin, and once a second the engine is asked which
requests it has.
"""

from slipstream import wire

_ENDED = 1 << 62


class Ledger:
    """Of all requests that were sent and have not ended. One thread at a time may use it."""

    def __init__(self) -> None:
        self._told: dict[int, list[int]] = {}  # request -> tokens told of each of its sequences
        self._fresh: dict[int, wire.Submit] = {}  # nothing was told of these
        self._asked: tuple[int, frozenset[int]] | None = None  # a `Ping`, and who was known then

    def submit(self, message: wire.Submit, is_first: bool = True) -> None:
        """It leaves now, for the first time or again."""
        self._told[message.request] = [0] * message.sampling.n
        if is_first:
            self._fresh[message.request] = message

    def untold(self) -> list[wire.Submit]:
        """What left once, and nothing came back: another engine may have it."""
        return list(self._fresh.values())

    def reject(self, request: int) -> None:
        """It has ended otherwise than by its last tokens."""
        self._told.pop(request, None)
        self._fresh.pop(request, None)

    def take(self, outputs: wire.StepOutputs) -> tuple[list[wire.Tokens], set[int]]:
        """Those tokens that are what must come next, and the requests that miss some before."""
        right, lost = [], set()
        for tokens in outputs.tokens:
            request, index, start = tokens.request, tokens.index, tokens.start
            told = self._told.get(request)
            if told is None or not 0 <= index < len(told):
                continue
            if start != told[index]:
                if start > told[index]:  # else it is repeated
                    lost.add(request)
                    self.reject(request)
                continue
            if not start:
                self._fresh.pop(request, None)
            told[index] = start + len(tokens.token_ids)
            if tokens.finished is not None:
                told[index] = _ENDED
                if min(told) == _ENDED:
                    del self._told[request]
            right.append(tokens)
        return right, lost

    def ask(self, number: int) -> None:
        """`Ping` number leaves, and all that was submitted has left before it."""
        self._asked = number, frozenset(self._told)

    def compare(self, status: wire.Status) -> tuple[set[int], set[int]]:
        """Requests that the engine should have and has not, and those it should not have.

        All that it told of a request before it forgot it has come before this answer.
        """
        if self._asked is None or self._asked[0] != status.number or status.requests is None:
            return set(), set()
        known, self._asked = self._asked[1], None
        theirs = set(status.requests)
        lost = {request for request in known if request in self._told} - theirs
        for request in lost:
            self.reject(request)
        return lost, theirs - self._told.keys()
