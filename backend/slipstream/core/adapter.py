"""An adapter as the engine sees it: its digest, and how many use it.

An adapter may have virtual tokens: rows of embeddings, for token ids from the vocabulary's size on.
One that has nothing else (rank 0) changes only what is computed of a prompt.
"""

from dataclasses import dataclass

from slipstream_contract.errors import ContractError, clip
from slipstream_contract.ids import TokenIds, are_below

MAX_NAME = 256  # characters


@dataclass(slots=True, eq=False)
class Adapter:
    """The weights of one digest, which the runner knows by a number."""

    number: int  # from 1
    digest: bytes  # 16 bytes, of tensors and scalings: what is computed with it has it in its key
    rank: int
    num_bytes: int
    changes_head: bool = False
    num_virtual: int = 0  # tokens
    num_users: int = 0  # requests that have not ended
    num_names: int = 0  # that point to it


def with_virtual(token_ids: TokenIds, num_virtual: int, vocab_size: int) -> TokenIds:
    """Return a prompt with the virtual tokens before it, unless it addresses them itself."""
    if not token_ids or not are_below(token_ids, vocab_size):
        return token_ids
    return TokenIds("i", range(vocab_size, vocab_size + num_virtual)) + token_ids


def without_virtual(token_ids: TokenIds, vocab_size: int) -> TokenIds:
    """Return the tokens that have a text."""
    return TokenIds("i", [token_id for token_id in token_ids if token_id < vocab_size])


def parse_adapters(text: str) -> dict[str, str]:
    """Read `NAME=DIR[,NAME=DIR]`. Raises ContractError."""
    found: dict[str, str] = {}
    for entry in filter(None, text.split(",")):
        name, _, path = entry.partition("=")
        if not name or not path:
            raise ContractError(f"adapters has {clip(entry)}, not NAME=DIR")
        if name in found:
            raise ContractError(f"adapters has {clip(name)} twice")
        found[name] = path
    return found


def check_name(name: str, base: str) -> None:
    """Refuse what no adapter of the model `base` can be called. Raises ContractError."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ContractError(
            f"the adapter's name is {clip(name)}, not 1 to {MAX_NAME} printable characters"
        )
    if "," in name:  # separates names in lora_requests_info
        raise ContractError(f"the adapter's name is {clip(name)}, which has a comma")
    if name == base:
        raise ContractError(f"the adapter's name is {clip(name)}, which is the model's")
