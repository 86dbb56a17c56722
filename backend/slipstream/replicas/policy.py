"""Choose the replica for a request: a pure function of what the router knows of each.

The cost of a replica is counted in tokens of prompts: those that are queued there, those of the
request's own prompt that are not cached, and a price for each stream that shares the steps. The own
ones count twice, as they delay this request and then what comes after it. So a request goes where
most of its prompt is cached, until that replica is behind by twice of what the cache saves: a
prefix that everyone has cannot overload one replica.
"""

from collections.abc import Mapping
from typing import NamedTuple

STREAM_TOKENS = 64  # tokens of a prompt that delay as much as a running stream: about 2 ms at 8B

OWN_WEIGHT = 2


class View(NamedTuple):
    """What is known of a replica when a request comes; all in tokens but the last three."""

    num_cached: int = 0  # of the prompt's first
    num_queued: int = 0  # of prompts sent there that are not computed
    num_held: int = 0  # of requests that are there
    num_room: int = 1 << 62  # that its cache has, in all
    num_streams: int = 0  # sequences that have begun to answer
    num_sent: int = 0  # requests, ever
    is_full: bool = False  # it would refuse one more


def cost(view: View, num_prompt: int) -> int:
    """Return what a prompt of `num_prompt` tokens costs there."""
    num_new = num_prompt - min(view.num_cached, max(0, num_prompt - 1))  # the last is computed
    return view.num_queued + OWN_WEIGHT * num_new + STREAM_TOKENS * view.num_streams


def has_room(view: View, num_prompt: int) -> bool:
    """Return whether a prompt fits beside what is there, with nothing preempted."""
    return view.num_held + num_prompt - view.num_cached <= view.num_room


def choose(views: Mapping[int, View], num_prompt: int) -> int | None:
    """Return the number of the replica for a prompt; None if there is none.

    Those with room go before those without, and these before those that would refuse. Of equal ones
    it is the one with the fewest streams, then with the fewest requests so far.
    """
    if not views:
        return None

    def order(number: int) -> tuple[int, int, int, int, int]:
        view = views[number]
        rank = 2 if view.is_full else 0 if has_room(view, num_prompt) else 1
        return rank, cost(view, num_prompt), view.num_streams, view.num_sent, number

    return min(views, key=order)
