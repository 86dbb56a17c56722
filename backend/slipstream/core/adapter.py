"""An adapter as the engine sees it: its digest, and how many use it."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Adapter:
    """The weights of one digest, which the runner knows by a number."""

    number: int  # from 1
    digest: bytes  # 16 bytes, of tensors and scalings: what is computed with it has it in its key
    rank: int
    num_bytes: int
    changes_head: bool = False
    num_users: int = 0  # requests that have not ended
    num_names: int = 0  # that point to it
