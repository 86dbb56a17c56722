"""Count what requests of each adapter use, sent on request: no other metric has it as a label."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream import wire

MAX_NAMES = 4096  # of which counts are kept, those used last: all are sent in one message


@dataclass(slots=True)
class _Count:
    """What requests of a name have used."""

    requests: int = 0  # accepted
    prompt_tokens: int = 0  # of those of which a sequence has ended
    output_tokens: int = 0  # of sequences that have ended


@dataclass(slots=True)
class _Open:
    """A request that has not ended: its adapter, and whether its prompt is counted."""

    name: str
    has_prompt: bool = False


class AdapterCounts:
    """Counts since the engine's start, by the names that requests give.

    A step without a request of an adapter costs nothing.
    """

    def __init__(self, is_open: Callable[[bytes, int], bool], most: int = MAX_NAMES) -> None:
        """Keep the counts of `most` names.

        `is_open` returns whether a request, by its connection and number, has not ended.
        """
        self._is_open, self._most = is_open, most
        self._counts: dict[str, _Count] = {}  # the name used last stands last
        self._open: dict[tuple[bytes, int], _Open] = {}

    def start(self, bridge: bytes, message: wire.Submit) -> None:
        """Count a request that was accepted; one without a name is none of an adapter."""
        if not message.adapter:
            return
        self._open[bridge, message.request] = _Open(message.adapter)
        count = self._counts.pop(message.adapter, None) or _Count()
        count.requests += 1
        self._counts[message.adapter] = count
        if len(self._counts) > self._most:
            del self._counts[next(iter(self._counts))]

    def take(
        self,
        outputs: Mapping[bytes, Iterable[wire.Tokens]],
        rejected: Sequence[tuple[bytes, wire.Rejected]],
    ) -> None:
        """Count what has ended in a step."""
        for bridge, refused in rejected:
            self._open.pop((bridge, refused.request), None)
        if not self._open:
            return
        for bridge, tokens in outputs.items():
            ended = [each for each in tokens if each.finished is not None]
            for each in ended:
                self._finish(bridge, each)
            for each in ended:
                if not self._is_open(bridge, each.request):
                    self._open.pop((bridge, each.request), None)

    def _finish(self, bridge: bytes, tokens: wire.Tokens) -> None:
        opened, finished = self._open.get((bridge, tokens.request)), tokens.finished
        count = None if opened is None else self._counts.get(opened.name)
        if opened is None or count is None or finished is None:
            return
        count.prompt_tokens += 0 if opened.has_prompt else finished.num_input_tokens
        count.output_tokens += finished.num_output_tokens
        opened.has_prompt = True

    def leave(self, bridge: bytes) -> None:
        """Discard the requests of a connection that is gone."""
        self._open = {key: each for key, each in self._open.items() if key[0] != bridge}

    def all(self) -> list[wire.AdapterCount]:
        """Return the counts by name."""
        return [
            wire.AdapterCount(name, each.requests, each.prompt_tokens, each.output_tokens)
            for name, each in sorted(self._counts.items())
        ]
