"""API keys: read from a file, compared in constant time."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path


class Keys:
    """The keys that open a gateway; without any it is open to all."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    @classmethod
    def load(cls, file: Path) -> "Keys":
        """Read a file with a key a line; empty lines and those after `#` do not count.

        Raises OSError, and ValueError for a file without a key.
        """
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"{file}: holds no key; one a line is expected")
        return cls(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def opens(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether `Authorization: Bearer` or `x-api-key` holds one of the keys.

        All keys are compared, whichever matches.
        """
        if not self._digests:
            return True
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        is_known = False
        for given in (bearer, headers.get(b"x-api-key", b"")):
            digest = hashlib.sha256(given).digest()
            for own in self._digests:
                is_known |= hmac.compare_digest(digest, own) and bool(given)
        return is_known
