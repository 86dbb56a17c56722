"""What a step computes of a sequence, as a row of its batch; from then on that counts as scheduled.

A decode's token may be in flight still, in the step before: its row says whose sample it is.
"""

from slipstream_contract.ids import TokenIds

from slipstream.core.batch import Row
from slipstream.core.sequence import Sequence

_IN_FLIGHT = TokenIds("i", [0])  # in place of a token that is not known yet; any valid id


def decode_row(sequence: Sequence, sample: int) -> Row:
    """The row of the last token, known or not; it is sample number `sample` of the step."""
    start = sequence.num_scheduled
    if not sequence.num_pending:
        return chunk_row(sequence, 1, sample)
    edits, num_outputs = sequence.edits, start + 1 - sequence.num_prompt
    row = Row(
        sequence.id,
        sequence.slot,
        _IN_FLIGHT,
        start,
        sequence.tables,
        True,
        sequence.sampling,
        sequence.seed,
        num_outputs,
        b"" if edits is None else edits.pack(num_outputs),
        sequence.sample,
        sequence.is_new,
        sequence.num_prompt,
        gap=sequence.gap,
    )
    sequence.num_scheduled = start + 1
    sequence.is_new = False
    sequence.num_tokens += 1
    sequence.num_in_flight += 1
    sequence.num_pending += 1
    sequence.sample = sample
    return row


def chunk_row(sequence: Sequence, num_tokens: int, sample: int) -> Row:
    """The next `num_tokens` tokens, all known; the row sees the sequence's own block list."""
    start = sequence.num_scheduled
    end = start + num_tokens
    samples = end == sequence.num_known
    row = Row(
        sequence.id,
        sequence.slot,
        sequence.ids(start, end),
        start,
        sequence.tables,
        samples,
        sequence.sampling,
        sequence.seed,
        sequence.num_outputs,
        sequence.pack_edits() if samples else b"",
        -1,
        sequence.is_new,
        sequence.num_prompt,
        sequence.ids(0, end) if samples and sequence.needs_history else None,
        sequence.gap,
    )
    sequence.num_scheduled = end
    sequence.num_in_flight += 1
    sequence.is_new = False
    if samples:
        sequence.needs_history = False
        sequence.num_tokens += 1
        sequence.num_pending += 1
        sequence.sample = sample
    return row
