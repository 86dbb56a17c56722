"""Completions: text in, text out, and the log probs that evaluations read."""

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_gateway.answer import Answer, Delta, Finish, Text, TokenLogProb, Usage
from slipstream_gateway.dialects.openai import Common, encode, finish_reason
from slipstream_gateway.errors import ApiError, openai_body


class CompletionWriter(Common):
    """Writes completions; choice `i * n + j` is answer j to prompt i."""

    prefix = "cmpl"
    kind = kind_of_chunk = "text_completion"

    def __init__(self, body: Mapping[str, Any], model: str) -> None:
        super().__init__(body, model)
        self._top = body.get("logprobs")
        self._is_echo = body.get("echo") is True
        self._has_prompt = body.get("prompt_logprobs") is not None
        self._lengths: dict[int, int] = {}  # characters of each answer so far, for offsets
        self._begun: set[int] = set()
        self._prefixes: dict[int, bytes] = {}
        self._after = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]%b}\n\n' % (
            b',"usage":null' if self._has_usage else b""
        )

    def start(self, prompt_tokens: int) -> bytes:
        """Return nothing: a completion has no role."""
        return b""

    def write(
        self, index: int, deltas: Sequence[Delta], log_probs: Sequence[TokenLogProb]
    ) -> bytes:
        """Return a chunk with all new text."""
        first = deltas[0] if len(deltas) == 1 else None
        if isinstance(first, Text):
            text = first.text
        else:
            text = "".join(delta.text for delta in deltas if isinstance(delta, Text))
        if not (text or log_probs or index in self._ids):
            return b""
        if self.is_plain and not log_probs and not self._owes_first(index):
            return b"%b%b%b" % (self._before(index), encode(text), self._after)
        return self._choice(index, text, log_probs)

    def _before(self, index: int) -> bytes:
        """Return what comes before the text of a chunk without more."""
        before = self._prefixes.get(index)
        if before is None:
            head = b'data: %b,"choices":[{"index":%d,"text":' % (self._head, index)
            before = self._prefixes[index] = head
        return before

    def finish(self, index: int, finish: Finish, usage: Usage) -> bytes:
        """Return the chunk with the reason."""
        return self._choice(index, "", (), finish)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return a whole completion."""
        choices = []
        for index, answer in enumerate(answers):
            choice: dict[str, object] = {
                "index": index,
                "text": answer.text,
                "logprobs": self._log_probs(index, answer.log_probs),
                "finish_reason": finish_reason(answer.finish),
                "stop_reason": None if answer.finish is None else answer.finish.stop_reason,
            }
            prompt = self._prompts[index // self._per_prompt]
            if self._has_prompt:
                choice["prompt_logprobs"] = prompt.json()
            if self._has_ids:
                choice["token_ids"] = self._ids.pop(index, [])
                choice["prompt_token_ids"] = list(prompt.token_ids)
            choices.append(choice)
        return encode(self.whole_object(choices, usage))

    def _choice(
        self,
        index: int,
        text: str,
        log_probs: Sequence[TokenLogProb],
        finish: Finish | None = None,
    ) -> bytes:
        ids = self.take_ids(index) if finish is None or index in self._ids else b""
        shown = b"null"
        if log_probs or self._owes_first(index):
            shown = encode(self._log_probs(index, log_probs))
        reason = b"null" if finish is None else encode(finish_reason(finish))
        stop = b"null" if finish is None else encode(finish.stop_reason)
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}' % (
            *(index, encode(text), shown, reason, stop, ids),
        )
        return self.chunk(choice)

    def _log_probs(self, index: int, entries: Sequence[TokenLogProb]) -> dict[str, object] | None:
        """Return the four lists of new tokens; those of an echoed prompt begin with a null."""
        if self._top is None:
            return None
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        length = self._lengths.get(index, 0)
        rows = [(entry.text, entry) for entry in entries]
        if self._owes_first(index):
            self._begun.add(index)
            rows.insert(0, (self._first_text(index), None))  # type: ignore[arg-type]
        for text, entry in rows:
            tokens.append(text)
            offsets.append(length)
            length += len(text)
            values.append(None if entry is None else entry.log_prob)
            tops.append(None if entry is None else self._tops(entry))
        self._lengths[index] = length
        lists = {"text_offset": offsets, "token_logprobs": values, "tokens": tokens}
        return {**lists, "top_logprobs": tops if self._top else None}

    def _owes_first(self, index: int) -> bool:
        """Whether an echoed prompt's first token is to be shown, which has no log prob."""
        return self._top is not None and self._is_echo and index not in self._begun

    def _tops(self, entry: TokenLogProb) -> dict[str, float]:
        """Return text -> log prob; of two tokens with the same text the likelier one."""
        found: dict[str, float] = {}
        for each in (*entry.top, entry):
            found[each.text] = max(found.get(each.text, each.log_prob), each.log_prob)
        return found

    def _first_text(self, index: int) -> str:
        return self._prompts[index // self._per_prompt].first_text


class Completions:
    """The dialect of `/v1/completions`."""

    def to_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raise ApiError: a completion is no chat."""
        raise ApiError(400, "a completion has a prompt, not messages", "prompt")

    def ignored(self, body: Mapping[str, Any]) -> list[str]:
        """Return nothing: the table of the body's fields says what has no effect."""
        return []

    def writer(self, body: Mapping[str, Any], model: str) -> CompletionWriter:
        """Return a writer for the answer to a body."""
        return CompletionWriter(body, model)

    def error(self, error: ApiError) -> bytes:
        """Return OpenAI's body of an error."""
        return openai_body(error)
