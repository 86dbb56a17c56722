"""Validate a request against the limits of this model and cache.

Most limits are known to the engine only; the others are checked again because a value outside them
could make the runner raise, which would cost other requests a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream_contract.errors import ContractError, clip
from slipstream_contract.ids import TokenIds, are_below
from slipstream_contract.log_probs import WHOLE
from slipstream_contract.probes import check_probe
from slipstream_contract.retention import check_retention, check_salt
from slipstream_contract.sampling import SamplingParams, check_sampling
from slipstream_contract.urgency import LOWEST_PRIORITY

from slipstream.core.edits import has_dry
from slipstream.core.two_way import ONE_WAY, Sight, TwoWay
from slipstream.wire import Submit


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """The limits of one engine.

    `blocks_for` returns the number of blocks without which so many tokens cannot be computed.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    num_tokens: int  # capacity of these blocks, over all layers
    blocks_for: Callable[[int], int]
    has_tokenizer: bool
    has_guides: bool
    max_running: int  # sequences
    max_logits_bytes: int = 1 << 26  # of one request
    has_thinking: bool = False  # the model marks where its thinking ends
    drafts_on_device: bool = False  # a drafter on the device reads the prompt's tokens
    two_way: TwoWay | None = None  # tokens of prompts see each other
    max_num_batched_tokens: int = 0  # of a step, for prompts that are computed whole

    def validate(self, message: Submit, num_virtual: int = 0) -> Sight:
        """Raise `ContractError` with field, value and limit if the request cannot be served.

        Returns what tokens of the prompt see.

        `num_virtual`: tokens that it may have behind the vocabulary.
        """
        if num_virtual:
            self._check_virtual(message.sampling)
        self._check_prompt(message.token_ids, num_virtual)
        self._check_sampling(message.sampling)
        if message.sampling.beams is not None:
            self._check_beams(len(message.token_ids), message.sampling)
        self._check_values(message.sampling, len(message.token_ids))
        if not 0 <= message.priority <= LOWEST_PRIORITY:
            raise ContractError(f"priority is {message.priority}, not from 0 to {LOWEST_PRIORITY}")
        if message.is_probe:
            check_probe(len(message.token_ids), message.sampling)
        check_salt(message.cache_salt)
        if message.retention is not None:
            check_retention(message.retention)
        if self.two_way is None or message.is_probe:
            return ONE_WAY
        return self._sight(message, self.two_way, num_virtual)

    def _sight(self, message: Submit, two_way: TwoWay, num_virtual: int) -> Sight:
        """Return what tokens of a prompt see; refuse what prompts of one step cannot have."""
        length, sampling = len(message.token_ids), message.sampling
        most = self.max_num_batched_tokens - self.max_running + 1
        if length > most:
            raise ContractError(
                f"the prompt is {length} tokens long: the model computes prompts whole, and a step "
                f"of {self.max_num_batched_tokens} tokens (max_num_batched_tokens), of which "
                f"{self.max_running - 1} are for other sequences (max_num_seqs), has room for "
                f"{most}"
            )
        why = "does not go with this model, whose tokens of a prompt see each other"
        if sampling.beams is not None:
            raise ContractError(f"beam_width = {sampling.beams.width} {why}")
        if sampling.drafts is not None:
            raise ContractError(f"speculation of a request (draft_input_ids, lookahead) {why}")
        if num_virtual:
            raise ContractError(f"a prompt with {num_virtual} virtual tokens {why}")
        return two_way.sight(message.token_ids)

    def _check_virtual(self, sampling: SamplingParams) -> None:
        """Refuse what virtual tokens cannot have."""
        if sampling.values is not None and sampling.values.prompt is not None:
            raise ContractError("prompt_logprobs: virtual tokens have no log probs")
        if self.drafts_on_device:
            raise ContractError(
                "virtual tokens (prompt_embedding_table, prompt tuning) are not implemented beside "
                "a drafter on the device (speculation = draft, medusa or eagle3)"
            )

    def _check_prompt(self, token_ids: TokenIds, num_virtual: int) -> None:
        if not token_ids:
            raise ContractError("the prompt is empty, 1 token is the least")
        length, limit = len(token_ids), self.max_model_len
        if length + 1 > limit:
            raise ContractError(
                f"the prompt is {length} tokens long: with one to generate it does not fit the "
                f"context of {limit} tokens (max_model_len)"
            )
        needed, total = self.blocks_for(length + 1), self.num_blocks
        if needed > total:
            raise ContractError(
                f"the prompt is {length} tokens long: with one to generate it needs {needed} "
                f"blocks, the KV cache has {total} ({self.num_tokens} tokens)"
            )
        if not are_below(token_ids, self.vocab_size + num_virtual):  # last: it reads every id
            self._check_ids("input_ids", token_ids, num_virtual)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        check_sampling(sampling)
        if sampling.best_of is not None and sampling.best_of < sampling.n:
            raise ContractError(f"best_of is {sampling.best_of}, below n, which is {sampling.n}")
        self._check_ids("end_id", sampling.end_ids)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("top_p_reset_ids", (max(0, sampling.top_p_reset_ids),))
        self._check_ids("embedding_bias or logit_bias", [token_id for token_id, _ in sampling.bias])
        for word in sampling.bad_words:
            self._check_ids("bad_words", word)
        if sampling.drafts is not None:
            self._check_ids("draft_input_ids", sampling.drafts.token_ids)
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids)
        if sampling.thinking_token_budget is not None and not self.has_thinking:
            raise ContractError(
                f"thinking_token_budget is {sampling.thinking_token_budget}, and the model has no "
                "token that ends its thinking (thinking_end)"
            )
        if has_dry(sampling) and sampling.dry_sequence_breakers and not self.has_tokenizer:
            raise ContractError(
                "dry_sequence_breakers need a tokenizer, and the checkpoint has none: send none"
            )
        if sampling.guide is not None and not self.has_guides:
            raise ContractError(
                "guided output (guided_decoding_guide, structured_outputs) needs a tokenizer.json, "
                "and the checkpoint has none"
            )
        if sampling.stop_words and not self.has_tokenizer:
            raise ContractError("stop_words need a tokenizer, and the checkpoint has none")

    def _check_beams(self, num_prompt: int, sampling: SamplingParams) -> None:
        assert sampling.beams is not None
        width, limit = sampling.beams.width, self.max_running
        if width > limit:
            raise ContractError(
                f"beam_width is {width}, above {limit}, the most sequences that run at a time "
                "(the least of max_num_seqs and max_num_batched_tokens)"
            )
        if sampling.n > width:
            raise ContractError(f"n is {sampling.n}, above the {width} beams of the search")
        most = min(num_prompt + sampling.max_tokens, self.max_model_len)
        needed, total = width * self.blocks_for(most), self.num_blocks
        if needed > total:
            raise ContractError(
                f"beam_width is {width}: so many beams of up to {most} tokens need {needed} "
                f"blocks, the KV cache has {total}; ask for fewer beams or a smaller max_tokens"
            )

    def _check_values(self, sampling: SamplingParams, num_prompt: int) -> None:
        values, limit = sampling.values, self.max_logits_bytes
        if values is None:
            return
        num_outputs = sampling.n * min(sampling.max_tokens, self.max_model_len - num_prompt)
        size = values.num_bytes(self.vocab_size, num_prompt, num_outputs)
        if size > limit:
            asked = [
                *(["return_context_logits"] if values.context_logits else []),
                *(["return_generation_logits"] if values.generation_logits else []),
                *(["prompt_logprobs = -1"] if values.prompt == WHOLE else []),
                *(["logprobs = -1"] if values.top == WHOLE else []),
            ]
            raise ContractError(
                f"{' and '.join(asked)} of {num_prompt} tokens of prompt, up to {num_outputs} of "
                f"output and a vocabulary of {self.vocab_size} take {size} bytes, at most {limit} "
                "are served (max_logits_bytes)"
            )

    def _check_ids(self, field: str, token_ids: Sequence[int], num_virtual: int = 0) -> None:
        size = self.vocab_size + num_virtual
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
            return
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
        rows = f" and {num_virtual} virtual tokens" if num_virtual else ""
        raise ContractError(
            f"{field}: token id {clip(wrong)} is outside the vocabulary 0 .. "
            f"{self.vocab_size - 1}{rows}"
        )
