"""Keep what ends a process within the work that raised it.

`exit()` in code of others raises SystemExit, and a panic of a library in Rust (tokenizers,
llguidance) PanicException: neither is an `Exception`, so what looks after one request would let it
through, to the end of a thread or of the process, and of all others' requests.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ProcessEnd(SystemExit):
    """The end of the process by a signal, which no work contains."""


class ContainedError(Exception):
    """An error of one work that would have ended more than that."""


@contextmanager
def contained() -> Iterator[None]:
    """Raise ContainedError for what is raised within and is no `Exception`."""
    try:
        yield
    except (Exception, ProcessEnd):
        raise
    except BaseException as error:
        raise ContainedError(f"{type(error).__name__}: {error}") from error
