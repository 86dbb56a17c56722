"""Copies of small inputs to the device, past the copy engine.

The engine serves copies in order: with blocks coming in from host memory a step's inputs would wait
10 ms for their turn. A kernel that reads them takes a few microseconds, whatever else is in flight.
"""

from collections.abc import Iterator

import torch

from slipstream.kernels.runtime import jit

_THREADS = 256
_VECTOR = 16  # bytes
_MAX_CTAS = 128


def _variant() -> jit.Variant:
    return jit.variant("staging/upload.cu")


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield _variant()


class Upload:
    """Copies from page-locked host memory, in a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._run = jit.bind(_variant(), "upload", _THREADS, 3, stream)

    def __call__(self, destination: int, source: int, num_bytes: int) -> None:
        """Put a copy between these addresses, multiples of 16, into the stream.

        Whole vectors of 16 bytes are copied: there must be room for them.
        """
        jit.require((destination | source) % _VECTOR == 0, "upload: not aligned to 16 bytes")
        size = -(-num_bytes // _VECTOR)
        if size:
            self._run(min(-(-size // _THREADS), _MAX_CTAS), destination, source, size)
