"""Return the best `n` of `best_of` samples: those of the highest sum of log probs.

Which they are is known when the last sample has ended; until then nothing is sent.
"""

from msgspec.structs import replace

from slipstream.core.sequence import Request, Sequence
from slipstream.wire import FinishReason, Tokens, Values


class Sample(Sequence):
    """A sequence that is sent as a whole, if it is one of the best."""

    __slots__ = ()

    def take_output(self) -> Tokens | None:
        """Return all tokens at the end; None before it."""
        return None if self.ending is None else super().take_output()


class Choice:
    """The samples of one request that have ended."""

    def __init__(self, request: Request, has_log_probs: bool) -> None:
        """Start without any; log probs are sent only if `has_log_probs`."""
        self._request = request
        self._has_log_probs = has_log_probs
        self._ended: list[Tokens] = []
        self._has_failed = False

    def take(self, tokens: Tokens) -> list[Tokens]:
        """Take a sample that has ended; return what to send, by falling sum of log probs.

        The first error of any is sent at once: it ends the request, and nothing follows.
        """
        assert tokens.finished is not None
        if self._has_failed:
            return []
        if tokens.finished.reason is FinishReason.ERROR:
            self._has_failed = True
            log_probs = tokens.log_probs if self._has_log_probs else []
            return [replace(tokens, index=0, log_probs=log_probs)]
        self._ended.append(tokens)
        if len(self._ended) < len(self._request.sequences):
            return []
        # One that never ran has no log prob, and is no good one.
        self._ended.sort(key=lambda each: (not each.token_ids, -sum(each.log_probs), each.index))
        of_prompt = next(each.values for each in self._ended if each.index == 0)
        best, self._ended = self._ended[: self._request.sampling.n], []
        if of_prompt is not None:
            best = [_with_prompt(each, of_prompt, each is best[0]) for each in best]
        return [
            replace(each, index=index, log_probs=each.log_probs if self._has_log_probs else [])
            for index, each in enumerate(best)
        ]


def _with_prompt(tokens: Tokens, of_prompt: Values, is_first: bool) -> Tokens:
    """Return a sample with the values of the prompt if it is the first, which bridges read."""
    own = tokens.values or Values(mode=of_prompt.mode)
    given = of_prompt if is_first else Values()
    found = {name: getattr(given, name) for name in ("prompt", "context", "num_context")}
    return replace(tokens, values=replace(own, **found))
