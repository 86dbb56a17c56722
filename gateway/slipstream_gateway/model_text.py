"""What turns text into the tokens of one model, and back: tokenizer, template, defaults."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from slipstream import wire
from slipstream_contract.contained import contained
from slipstream_contract.errors import ContractError
from slipstream_contract.generation_config import read_defaults
from slipstream_contract.vocab import TokenBytes
from slipstream_preprocessing.chat import ChatTemplate
from slipstream_preprocessing.encode import Encoder

from slipstream_gateway.parsing.detect import added_tokens, choose, read_response_template
from slipstream_gateway.sequences import whole_text
from slipstream_gateway.settings import Settings
from slipstream_gateway.token_texts import TokenTexts

T = TypeVar("T")
_SHORT_BYTES = 2000  # of texts that are encoded in less time than another thread needs to wake


class ModelText:
    """The text side of one checkpoint. Thread-safe."""

    def __init__(
        self, checkpoint: Path, welcome: wire.Welcome, pool: ThreadPoolExecutor, settings: Settings
    ) -> None:
        """Read the tokenizer and the template; `welcome`: what the engine says of itself.

        Raises what `Encoder.load` does, OSError, ApiError for unknown parsers, ContractError for
        a template or defaults that cannot be used.
        """
        self.checkpoint = checkpoint
        self.max_model_len = welcome.max_model_len
        self.vocab_size = welcome.vocab_size
        self.has_thinking = welcome.has_thinking
        self.encoder = Encoder.load(checkpoint, max_model_len=self.max_model_len)
        self.chat = ChatTemplate.load(checkpoint)
        template = settings.chat_template
        if template is not None:
            self.chat = self.chat.with_source(template.read_text(encoding="utf-8"))
        source = self.chat.source("tool_use") or self.chat.source("default")
        added = added_tokens(self.encoder.tokenizer)
        own = read_response_template(checkpoint)
        self.answers = choose(source, added, settings.tool_parser, settings.reasoning_parser, own)
        self.token_texts = TokenTexts(self.encoder.vocab)
        self.defaults = read_defaults(checkpoint)
        self._pool = pool

    @property
    def vocab(self) -> TokenBytes:
        """The bytes of every token."""
        return self.encoder.vocab

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template."""
        return self.chat.source("default") is not None

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Do work on texts: at once if they are short, else in another thread."""
        if num_bytes <= _SHORT_BYTES:
            return _contained(work)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _contained, work)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return whole_text(self.vocab, token_ids, skip_special=False)

    def check_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Raise ContractError for ids that the model does not have."""
        for place, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ContractError(f"{field}[{place}] is {token_id!r:.64}, not a token id")
            if token_id >= self.vocab_size:
                raise ContractError(
                    f"{field}[{place}] is {token_id}; the vocabulary has {self.vocab_size} tokens"
                )


def _contained(work: Callable[[], T]) -> T:
    with contained():
        return work()
