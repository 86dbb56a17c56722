"""Turn what a step computes of a sequence into a row, and count those tokens as scheduled.

The input token of a decode may still be in flight, sampled by the step before: its row then names
the sample (`Row.source`) instead of the id.
"""

from msgspec.structs import replace
from slipstream_contract.ids import TokenIds

from slipstream.core.batch import Row
from slipstream.core.sequence import Sequence

_IN_FLIGHT = TokenIds("i", [0])  # placeholder of a token in flight; any valid id


def decode_row(sequence: Sequence, sample: int) -> Row:
    """Return the row of the last token, known or in flight, which makes sample number `sample`."""
    start = sequence.num_scheduled
    if not sequence.num_pending:
        return chunk_row(sequence, 1, sample)
    edits, guide = sequence.edits, sequence.guide
    num_outputs = start + 1 - sequence.num_prompt
    row = Row(
        sequence.id,
        sequence.slot,
        _IN_FLIGHT,
        start,
        sequence.cache.tables,
        True,
        sequence.sampling,
        sequence.seed,
        num_outputs,
        b"" if edits is None else edits.pack_early(num_outputs),
        sequence.sample,
        sequence.is_new,
        sequence.num_prompt,
        gap=sequence.cache.gap,
        num_top=sequence.num_top,
        top_mode=sequence.top_mode,
        logits_mode=-1 if sequence.wanted is None else sequence.wanted.logits_mode,
        mask=_mask(sequence),
        needs_mask=guide is None or guide.needs_all,
        adapter=sequence.adapter_at(start),
        sight=sequence.request.sight,
    )
    sequence.num_scheduled = start + 1
    sequence.is_new = False
    sequence.num_tokens += 1
    sequence.num_in_flight += 1
    sequence.num_pending += 1
    sequence.sample = sample
    return row


def _mask(sequence: Sequence) -> bytes | None:
    """Return the mask of a sequence's next sample, if it has one: see `Row.mask`."""
    if sequence.guide is not None:
        return sequence.guide.row_mask(sequence.num_pending)
    return None if sequence.edits is None else sequence.edits.mask


def draft_rows(sequence: Sequence, first_sample: int) -> list[Row]:
    """Return the rows of the last token, which is known, and of each draft after it.

    They make samples from number `first_sample` on. The drafts are taken from the sequence; one
    behind which a rule fails is not verified, nor those after it.
    """
    drafts, sequence.drafts = sequence.drafts, []
    first, edits = chunk_row(sequence, 1, first_sample), sequence.edits
    masks = [] if sequence.guide is None else sequence.guide.row_masks
    rows = [replace(first, mask=masks[0]) if masks else first]
    other = None if edits is None or sequence.guide is not None else edits.mask
    for number, token_id in enumerate(drafts, start=1):
        packed = sequence.drafted_edits(drafts[:number])
        if packed is None or sequence.fault:
            break
        rows.append(
            replace(
                first,
                token_ids=TokenIds("i", [token_id]),
                start=first.start + number,
                num_outputs=first.num_outputs + number,
                edits=packed,
                is_new=False,
                history=None,
                prompt=None,
                mask=masks[number] if number < len(masks) else other,
            )
        )
    num_drafts = len(rows) - 1
    sequence.num_scheduled += num_drafts
    sequence.num_tokens += num_drafts
    sequence.num_in_flight += num_drafts
    sequence.num_pending += num_drafts
    return rows


def rows_with_drafts(decodes: list[Sequence]) -> tuple[list[Row], list[Sequence]]:
    """Return the rows of decodes and of their drafts, which are the step's, and whose each is."""
    rows: list[Row] = []
    owners: list[Sequence] = []
    for sequence in decodes:
        if sequence.drafts:
            rows += draft_rows(sequence, len(rows))
        else:
            rows.append(decode_row(sequence, len(rows)))
        owners += [sequence] * (len(rows) - len(owners))
    return rows, owners


def chunk_row(sequence: Sequence, num_tokens: int, sample: int) -> Row:
    """Return the row of the next `num_tokens` tokens, all known, with the sequence's tables."""
    start = sequence.num_scheduled
    end = start + num_tokens
    samples, wanted = end == sequence.num_known, sequence.wanted
    guide = sequence.guide if samples else None
    sequence.read_prompt(end)
    packed, moved = sequence.next_rules() if samples else (b"", ())
    row = Row(
        sequence.id,
        sequence.slot,
        sequence.ids(start, end),
        start,
        sequence.cache.tables,
        samples,
        sequence.sampling,
        sequence.seed,
        sequence.num_outputs,
        packed,
        -1,
        sequence.is_new,
        sequence.num_prompt,
        sequence.texts(sequence.ids(0, end)) if samples and sequence.needs_history else None,
        sequence.cache.gap,
        sequence.num_top if samples else -1,
        sequence.top_mode,
        wanted.logits_mode if wanted is not None and samples else -1,
        None if wanted is None else sequence.prompt_ask(start, end),
        mask=_mask(sequence) if samples else None,
        moved=moved,
        needs_mask=guide is None or guide.needs_all,
        adapter=sequence.adapter_at(start),
        sight=sequence.request.sight,
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
