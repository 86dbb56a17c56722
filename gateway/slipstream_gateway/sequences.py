"""Turn the engine's tokens of one answer into deltas: text, log probs, and the end."""

import json
from collections.abc import Sequence

import msgspec
from slipstream import wire
from slipstream.bridge.log_probs import LEAST, LogProbTexts, Place, places_of
from slipstream.bridge.pieces import Piece
from slipstream_contract.log_probs import WHOLE, LogProbs
from slipstream_contract.vocab import TokenBytes
from slipstream_postprocessing.detokenize import detokenize

from slipstream_gateway.answer import (
    CallArguments,
    CallStart,
    Delta,
    Finish,
    Parser,
    Reasoning,
    Text,
    TokenLogProb,
)
from slipstream_gateway.token_texts import Decoder, TokenTexts

NO_TOKEN = -1  # in place of an id: its text is what an incomplete character leaves at the end
REASONS = {
    wire.FinishReason.END: "stop",
    wire.FinishReason.STOP: "stop",
    wire.FinishReason.LENGTH: "length",
    wire.FinishReason.CANCELLED: "abort",
}


class LogProbReader:
    """Reads the log probs of one request: of new tokens, and of its prompt's."""

    def __init__(self, texts: TokenTexts, top: int | None, shows_ids: bool = False) -> None:
        """Make a reader of the `top` likeliest tokens; `shows_ids`: texts are `token_id:N`."""
        self._texts = texts
        self._top = top
        self._shows_ids = shows_ids

    def read(self, values: wire.Values, token_ids: Sequence[int]) -> list[TokenLogProb]:
        """Return the entries of new tokens."""
        if values.likely is None:
            return []
        rows = values.logits if self._top == WHOLE else None
        places = places_of(values.likely, token_ids[: values.likely.num], rows, values.mode)
        return [self._entry(place) for place in places]

    def read_prompt(self, values: wire.Values, token_ids: Sequence[int]) -> list[TokenLogProb]:
        """Return the entries of the prompt's tokens but the first, which has none."""
        entries: list[TokenLogProb] = []
        for likely in values.prompt:
            ids = token_ids[len(entries) + 1 : len(entries) + 1 + likely.num]
            entries += [self._entry(place) for place in places_of(likely, ids, None, values.mode)]
        return entries

    def plain(self, token_id: int, value: float) -> TokenLogProb:
        """Return the entry of a token of which only the log prob is known."""
        text, data = self._texts.of(token_id)
        value = LEAST if value == -float("inf") else value
        return TokenLogProb(token_id, self._shown(token_id, text), data, value)

    def _entry(self, place: Place) -> TokenLogProb:
        token_id, _, value, top_ids, top_values = place
        pairs = zip(top_ids, top_values, strict=True)
        top = tuple(self.plain(each, own) for each, own in pairs)
        return msgspec.structs.replace(self.plain(token_id, value), top=top)

    def _shown(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._shows_ids else text


class PromptPart:
    """What all answers to one prompt show of it: its text, and its tokens' log probs."""

    def __init__(
        self,
        token_ids: Sequence[int],
        reader: LogProbReader | None,
        wanted: LogProbs | None,
        vocab: TokenBytes,
    ) -> None:
        """Take the prompt's tokens; `reader` reads their log probs, None: none are wanted."""
        self._wanted = wanted or LogProbs()
        self._vocab = vocab
        self.token_ids = token_ids
        self.text = ""  # if it is echoed
        self.is_echoed = False
        self.log_probs: list[TokenLogProb] = []  # of all tokens but the first, once they have come
        self.values: wire.Values | None = None  # that they came in
        self._reader = reader
        self.is_awaited = reader is not None and len(token_ids) > 1

    @property
    def first_text(self) -> str:
        """The text of the first token, which has no log prob."""
        data = self._vocab.raw(self.token_ids[0])
        return data.decode(errors="replace")

    def json(self) -> msgspec.Raw | None:
        """Return the log probs of the prompt as vLLM writes them; None: they have not come."""
        if self.values is None:
            return None
        texts = LogProbTexts(self._wanted, self._vocab, self.token_ids)
        data = texts.prompt(Piece([], [], 0, None, (self.values,)))
        return None if data is None else msgspec.Raw(data)

    def take(self, values: wire.Values) -> None:
        """Read the log probs of the prompt's tokens if these values are the ones with them."""
        if self.is_awaited and self._reader is not None and values.prompt:
            self.is_awaited, self.values = False, values
            self.log_probs = self._reader.read_prompt(values, self.token_ids)


class News(msgspec.Struct):
    """What is new of one answer."""

    deltas: list[Delta]
    log_probs: list[TokenLogProb]
    token_ids: list[int]
    finished: wire.Finished | None = None


class Answering:
    """An answer on its way: tokens that have come, and the state of its text."""

    def __init__(
        self,
        decoder: Decoder,
        prompt: PromptPart,
        reader: LogProbReader | None,
        parser: Parser | None = None,
    ) -> None:
        """Start; `reader`: of log probs, None: none are wanted; `parser`: None: all is text."""
        self.prompt = prompt
        self.num_reasoning = 0  # tokens
        self.has_calls = False
        self._arguments: list[str] = []  # of the last call
        self.hides_reasoning = False
        self.is_hidden = False  # its tokens are not wanted, only its prompt's values
        self._decoder = decoder
        self._reader = reader
        self._parser = parser
        self._pending: list[wire.Tokens] = []
        self._is_fresh = True
        self._is_reasoning = False

    def put(self, tokens: wire.Tokens) -> None:
        """Add tokens that have come."""
        self._pending.append(tokens)
        if tokens.values is not None:
            self.prompt.take(tokens.values)

    @property
    def has_news(self) -> bool:
        """Whether tokens wait, and can be taken: a prompt's log probs come before them."""
        if not self._pending:
            return False
        return not self.prompt.is_awaited or self._pending[-1].finished is not None

    def take(self) -> News:
        """Take all that has come."""
        piece = News([], [], [])
        if self._is_fresh:
            self._is_fresh = False
            if self.prompt.is_echoed:
                piece.deltas.append(Text(self.prompt.text))
                piece.log_probs += self.prompt.log_probs
        for tokens in self._pending:
            piece.finished = tokens.finished or piece.finished
            if not self.is_hidden:
                self._add(piece, tokens)
        self._pending = []
        return piece

    @property
    def ends_in_calls(self) -> bool:
        """Whether there are calls, of which none is cut: by a stop word, or an end within it."""
        try:
            return self.has_calls and json.loads("".join(self._arguments)) is not None
        except (ValueError, RecursionError):
            return False

    def take_beam(self, beam: wire.Beam, finished: wire.Finished) -> News:
        """Take a whole beam as the answer; `finished` is that of the search."""
        reason = beam.reason or finished.reason
        end = msgspec.structs.replace(
            finished, reason=reason, stop_reason=beam.stop_reason, error=None
        )
        tokens = wire.Tokens(
            0, 0, beam.token_ids, beam.log_probs, drop_bytes=beam.drop_bytes, finished=end
        )
        self._pending = [tokens]
        return self.take()

    def _add(self, piece: News, tokens: wire.Tokens) -> None:
        ids, is_last = tokens.token_ids, tokens.finished is not None
        piece.token_ids += ids
        if self._parser is None:
            if is_last:
                text = self._decoder.decode(ids[:-1])
                text += self._decoder.last(ids[-1:], tokens.drop_bytes)
            else:
                text = self._decoder.decode(ids)
            if text:
                piece.deltas.append(Text(text))
        else:
            self._parse(piece, tokens)
        if self._reader is not None:
            if tokens.values is not None:
                piece.log_probs += self._reader.read(tokens.values, ids)
            elif tokens.log_probs:
                pairs = zip(ids, tokens.log_probs, strict=True)
                piece.log_probs += [self._reader.plain(*pair) for pair in pairs]

    def _parse(self, piece: News, tokens: wire.Tokens) -> None:
        """Feed the parser token by token, so that no chunking can change what it counts."""
        parser, decoder = self._parser, self._decoder
        assert parser is not None
        ids, is_last = tokens.token_ids, tokens.finished is not None
        for token_id in ids[:-1] if is_last else ids:
            self._note(piece, parser.feed([token_id], [decoder.next(token_id)]), is_token=True)
        if is_last:
            text = decoder.last(ids[-1:], tokens.drop_bytes)
            if ids:
                self._note(piece, parser.feed(ids[-1:], [text]), is_token=True)
            elif text:
                self._note(piece, parser.feed([NO_TOKEN], [text]))
            self._note(piece, parser.finish())

    def _note(self, piece: News, deltas: Sequence[Delta], is_token: bool = False) -> None:
        for delta in deltas:
            self._is_reasoning = isinstance(delta, Reasoning)
            if isinstance(delta, CallStart):
                self.has_calls, self._arguments = True, []
            elif isinstance(delta, CallArguments):
                self._arguments.append(delta.fragment)
        self.num_reasoning += is_token and self._is_reasoning
        if self.hides_reasoning:
            deltas = [delta for delta in deltas if not isinstance(delta, Reasoning)]
        piece.deltas += deltas


def whole_text(vocab: TokenBytes, token_ids: Sequence[int], skip_special: bool) -> str:
    """Return the text of a prompt's tokens."""
    return detokenize(vocab, token_ids, skip_special=skip_special)


def finish_of(finished: wire.Finished, has_calls: bool) -> Finish:
    """Return how an answer ended; `has_calls`: with whole calls, which are to be made."""
    reason = REASONS[finished.reason]
    if has_calls and reason == "stop":
        return Finish("tool_calls", finished.stop_reason)
    return Finish(reason, finished.stop_reason)
