"""The request that every schema is read into: a prompt, and how to answer it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from slipstream_contract import limits
from slipstream_contract.fields import Asked, Field
from slipstream_contract.ids import TokenIds
from slipstream_contract.lora import LoraTask
from slipstream_contract.prompt_table import PromptTable
from slipstream_contract.retention import Retention, split_salt
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.urgency import Urgency, split_urgency


def _flag(text: str, trtllm: str = "", vllm: str = "") -> Field:
    """Describe an option; its name in each schema, empty where that has none."""
    return Field(
        text,
        trtllm=Asked(trtllm) if trtllm else None,
        vllm=Asked(vllm) if vllm else None,
    )


def _count(text: str, name: str) -> Field:
    return _flag(text, name, name)


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the responses beside new tokens; its fields stand in the table of `fields`."""

    is_streaming: Annotated[
        bool, _flag("a response whenever there are new tokens", "stream", "stream")
    ] = False
    echo: bool = False  # the prompt comes before the output
    log_probs: Annotated[
        bool, _flag("log probs of the new tokens", "return_log_probs", "return_logprobs")
    ] = False
    cumulative_log_prob: Annotated[
        bool, _flag("the sum of all log probs so far", vllm="return_cumulative_logprob")
    ] = False
    num_input_tokens: Annotated[
        bool, _count("how many tokens the prompt has", "return_num_input_tokens")
    ] = False
    num_output_tokens: Annotated[
        bool, _count("how many tokens are new", "return_num_output_tokens")
    ] = False
    finish_reason: Annotated[bool, _flag("how the output ended", vllm="return_finish_reason")] = (
        False
    )
    stop_reason: bool = False  # the word or token id that ended it
    perf_metrics: Annotated[
        bool, _flag("times and counts of blocks, at the end", "return_perf_metrics")
    ] = False
    skip_special_tokens: bool | None = None  # from the text; None: as the model is configured


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """Words that a tokenizer turns into token ids before the engine has them, and the end id."""

    bad: tuple[str, ...] = ()
    biased: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()  # of each of the biased
    end_id: int | None = None  # None: the checkpoint's; -1: none


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and how to answer it; a batch has several."""

    prompt: str | TokenIds
    sampling: SamplingParams  # without what `words` says, where the prompt is a text
    options: ResponseOptions = ResponseOptions()
    words: Words = Words()
    add_special_tokens: bool | None = None  # to a text; None: as the model is configured
    urgency: Urgency = Urgency()
    cache_salt: str = ""  # keys and values are shared where it is the same
    retention: Retention | None = None
    adapter: str = ""  # name of it; empty: none
    task: LoraTask | None = None  # an adapter that the client has numbered
    table: PromptTable | None = None  # embeddings of virtual tokens
    is_stop: bool = False  # cancel the request of the same id; nothing else of this one counts

    @property
    def text(self) -> str:
        """Return the prompt as a text."""
        assert isinstance(self.prompt, str), "the prompt is encoded already"
        return self.prompt

    @property
    def token_ids(self) -> TokenIds:
        """Return the prompt as token ids."""
        assert not isinstance(self.prompt, str), "the prompt is still a text"
        return self.prompt

    def texts(self) -> Iterator[str]:
        """Return every word that has to be encoded."""
        yield self.text
        yield from self.words.bad
        yield from self.words.biased

    def encoded(
        self,
        end_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]] = (),
        biased_words: Sequence[Sequence[int]] = (),
    ) -> SamplingParams:
        """Return the sampling parameters with the words' token ids.

        Args:
            end_ids: the checkpoint's.
            bad_words, biased_words: token ids of `words.bad` and `words.biased`, in their order.
                Empty bad words may be left out.

        Raises ContractError if the words have more tokens than are served.
        """
        words = self.words
        assert len(bad_words) <= len(words.bad), "one entry a word, at most"
        bias: dict[int, float] = {}
        for ids, weight in zip(biased_words, words.weights, strict=True):
            for token_id in set(ids):
                bias[token_id] = bias.get(token_id, 0.0) + weight
        changes = {
            "end_ids": choose_end_ids(words.end_id, end_ids),
            "bad_words": checked_words("bad_words", bad_words, limits.MAX_BAN_FORMS),
        }
        if words.biased:
            changes["bias"] = checked_bias("embedding_bias_words", bias)
        return msgspec.structs.replace(self.sampling, **changes)


def split_handling(parameters: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, object]]:
    """Split the parameters that every schema shares, urgency and cache salt, from the others.

    Returns fields of `GenerateRequest`, and the other parameters. Raises ContractError.
    """
    urgency, others = split_urgency(parameters)
    cache_salt, others = split_salt(others)
    return {"urgency": urgency, "cache_salt": cache_salt}, others


def choose_end_ids(given: int | None, own: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that end a sequence.

    Some checkpoints have several, a client can name one: if it is one of them, all of them count.
    None given: the checkpoint's; -1: none.
    """
    if given is None or given in own:
        return tuple(own)
    return () if given == -1 else (given,)


def checked_words(
    field: str, words: Sequence[Sequence[int]], most: int = limits.MAX_WORDS
) -> tuple[tuple[int, ...], ...]:
    """Return words as token ids, without empty ones, at most `most`. Raises ContractError."""
    limits.check_words(field, words, most)
    return tuple(tuple(word) for word in words if len(word))


def checked_bias(
    field: str, bias: dict[int, float], size: int | None = None
) -> tuple[tuple[int, float], ...]:
    """Return (token id, what is added to its logit), by rising id.

    `size`: the number of biased tokens, where `bias` has only a part of them. Raises ContractError.
    """
    size = len(bias) if size is None else size
    limits.check_count(field, size, limits.MAX_BIASED_TOKENS, "biased tokens")
    for token_id, weight in bias.items():
        limits.check_number(
            f"{field} of token {token_id}", weight, -limits.MAX_BIAS, limits.MAX_BIAS
        )
    return tuple((token_id, weight) for token_id, weight in sorted(bias.items()) if weight)
