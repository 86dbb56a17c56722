"""Where the threads of a bridge run.

They hand the interpreter's lock to each other for every response. Between the cores of a large
machine that means to wake one that has gone to sleep, each time: on 16 of them a response took 134
us of CPU time, on two that are always busy 43. So those threads share one core.
"""

import os

_MANY_CORES = 8  # from here on there are others for the rest of the server


def stay_together() -> None:
    """Keep the calling thread on the core of its process's threads; processes take different ones.

    Cores are those that the process may use. Nothing happens where they are few.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= _MANY_CORES:
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})


def num_senders() -> int:
    """Threads of a process that send: while one waits for the server, another builds a response.

    On cores that others use too the wait is long; on one of their own more are in each other's way.
    """
    return 4 if len(os.sched_getaffinity(0)) >= _MANY_CORES else 6
