"""Choose the cores for a bridge's threads.

The threads pass the interpreter's lock to each other for every response. Across the cores of a
large machine each pass wakes a sleeping core: on 16 cores a response took 134 us of CPU time, on
two busy ones 43. So these threads share one core.
"""

import os

_MANY_CORES = 8  # with this many, the rest of the server has cores enough


def stay_together() -> None:
    """Pin the calling thread to its process's core; different processes take different cores.

    Cores are those that the process may use. On a machine with few cores nothing happens.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= _MANY_CORES:
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})


def num_senders() -> int:
    """Return the number of sending threads; while one waits, another builds a response.

    On cores that are shared with other work waits are long, so more threads help; on a core of
    their own more threads only contend.
    """
    return 4 if len(os.sched_getaffinity(0)) >= _MANY_CORES else 6
