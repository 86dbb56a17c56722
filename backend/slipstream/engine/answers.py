"""Make the sequences of a request: one for each answer, more where the best are chosen of them."""

from msgspec.structs import replace
from slipstream_contract.ids import TokenIds

from slipstream.core.sequence import Request, Sequence
from slipstream.core.stop import RawBytes
from slipstream.core.two_way import Sight
from slipstream.core.values import Wanted, top_mode
from slipstream.engine.beam_group import Beam, BeamGroup
from slipstream.engine.best_of import Choice, Sample
from slipstream.wire import Submit


def add_sequences(
    request: Request,
    first_id: int,
    prompt: TokenIds,
    seed: int,
    max_model_len: int,
    vocab: RawBytes | None,
) -> int:
    """Give a request its sequences, with ids from `first_id` on; return how many ids are taken.

    A beam search has one sequence, its lead: see `beam_group.py`.
    """
    sampling, parts = request.sampling, (prompt, seed, max_model_len, vocab)
    if sampling.beams is not None:
        group = BeamGroup(sampling.beams, request, first_id, *parts)
        request.sequences.append(group.lead)
        return group.width
    kind = Sequence if request.choice is None else Sample
    num = max(sampling.n, sampling.best_of or 0)
    for index in range(num):
        request.sequences.append(kind(first_id + index, request, index, *parts))
    return num


def add_wanted(request: Request, mode: str) -> None:
    """Ask for the values that a request wants beside its tokens; `mode` counts if it says none."""
    if (values := request.sampling.values) is not None:
        flags = top_mode(values.mode or mode)
        for sequence in request.sequences:
            sequence.want(Wanted(values, flags, is_first=sequence.index == 0))


def make_request(bridge: bytes, message: Submit, sight: Sight) -> Request:
    """Return a request without sequences; where the best are chosen, log probs are kept."""
    sampling = message.sampling
    if message.task is not None or message.table is not None:
        message = replace(message, task=None, table=None)  # they are large
    if (sampling.best_of or 0) <= sampling.n:
        return Request(bridge, message, sight=sight)
    judged = replace(message, sampling=replace(sampling, log_probs=True))
    request = Request(bridge, judged, sight=sight)
    request.choice = Choice(request, sampling.log_probs)
    return request


def most_running(request: Request) -> int:
    """Return how many sequences of a request can run or wait now."""
    lead = request.sequences[0]
    return lead.group.width if isinstance(lead, Beam) else request.num_unfinished
