"""Hold the state of a guided sequence: its place in the grammar, and the mask of its next token.

A greedy or plain-temperature sample that turns out legal is the sample that the mask would have
left: the largest of all noisy logits is the largest of the legal ones. Such a sequence has masks
while they are made fast; where they are not it runs without, as others do, and each sample is
validated when it is known. After a refusal it needs masks for some tokens, ever more of them if it
is refused again at once. Where filters choose among likely tokens, or log probs are wanted, every
token needs its mask.

    matcher    the outputs, all of them, and nothing else
    mask       of the output after them, or none yet

A step is launched before the token of the step before is known, so a row's mask may come while it
runs. If it comes too late the row is run again, and no other row waits.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from itertools import compress
from math import inf

from slipstream_contract.limits import MAX_DRAFT_TOKENS
from slipstream_contract.sampling import FIELDS, FILTERS, SamplingParams

from slipstream.core.records import EDIT, banned_in, bans, pack
from slipstream.guide.interface import MIN_FAST, GuideError, Matcher, Template

_FEWEST, _MOST = 4, 64  # tokens with masks after a refusal


def needs_all_masks(sampling: SamplingParams) -> bool:
    """Return whether a legal sample without a mask may be another than that with it."""
    if sampling.log_probs or sampling.values is not None or sampling.beams is not None:
        return True
    is_filtered = any(getattr(sampling, name) != FIELDS[name].default for name in FILTERS)
    return sampling.temperature > 0 and is_filtered


class Guided:
    """A guided sequence. While `is_filling` another thread uses matcher and mask."""

    __slots__ = (
        "_by_edits",
        "_end_ids",
        "_mask",
        "_more_ids",
        "_num_good",
        "_num_left",
        "_patience",
        "error",
        "forced",
        "has_mask",
        "is_filling",
        "is_our_fault",
        "matcher",
        "needs_all",
        "needs_mask",
        "pace",
        "row_masks",
    )

    def __init__(
        self, template: Template, sampling: SamplingParams, end_ids: frozenset[int]
    ) -> None:
        """Stand at the start; `end_ids` are those of the grammar, which the request may change."""
        self.error = ""  # why it cannot go on
        self.is_our_fault = False  # not the guide's
        self.matcher: Matcher = template.matcher.copy()
        self.pace = template.pace
        self._end_ids = end_ids | set(sampling.end_ids)
        # Of the request, or text elsewhere: the grammar does not know where they are legal.
        self._more_ids = (self._end_ids - end_ids) | template.text_ends
        self.needs_all = needs_all_masks(sampling)
        # Values beside the samples may be those of unmasked logits: the mask must not touch them.
        self._by_edits = sampling.values is not None
        self._patience = _FEWEST
        # Tokens with masks until the next attempt without.
        self._num_left = 1 if self.pace.is_slow else MIN_FAST
        self._num_good = 0  # samples without masks since a refusal
        self.needs_mask = True  # the first is there
        self._mask = self._with_ends(template.first_mask)
        self.has_mask = True
        self.is_filling = False
        self.forced: list[int] = []  # tokens that have to come next, as far as that was looked for
        self.row_masks: list[bytes] = []  # of the next rows, where drafts follow
        self.look_ahead()

    def copy(self) -> "Guided":
        """Return the state of another sequence with the same tokens; no thread has the matcher."""
        assert not self.is_filling, "another thread has the matcher"
        other = copy(self)
        other.matcher = self.matcher.copy()
        return other

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end a text: those of the grammar and of the request."""
        return self._end_ids

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end is legal."""
        return self.matcher.is_finished

    @property
    def known_mask(self) -> bytes | None:
        """The mask of the next token, if it is needed and there."""
        return self._mask if self.needs_mask and self.has_mask else None

    def finishes(self, token_id: int) -> bool:
        """Return whether nothing but an end is legal after a token, if it can be taken at all."""
        try:
            matcher = self.matcher.copy()
            return matcher.take(token_id) and matcher.is_finished
        except Exception:  # `take` says so
            return False

    def can_run(self, num_pending: int) -> bool:
        """Return whether a row can sample the next token: with its mask, or one that comes."""
        if not self.needs_mask:
            return True
        return not self._by_edits if num_pending else self.has_mask

    def row_mask(self, num_pending: int) -> bytes | None:
        """Return the mask of a row: empty if it is made after the launch; None: it has none."""
        if not self.needs_mask or self._by_edits:
            return None
        assert num_pending or self.has_mask, "a row without its mask"
        return b"" if num_pending else self._mask

    @property
    def wants_fill(self) -> bool:
        """Whether the next token needs a mask that nobody makes yet."""
        return self.needs_mask and not self.has_mask and not self.is_filling

    def filled(self, mask: bytes, give: Callable[[bytes], object] | None = None) -> None:
        """Take the mask of the next token, which the matcher has made, and hand it on."""
        self._mask = self._with_ends(mask)
        self.has_mask = True
        self.is_filling = False  # the matcher is free
        if give is not None:
            give(self._mask)

    def look_ahead(self) -> None:
        """Find the tokens that have to come next.

        A mask allows the first of these alone, but the matcher takes others too that spell the same
        text: a sample without a mask is not legal if it is one of them. What is forced after a
        token may be spelled otherwise than it was before it, so each is looked for in its place.
        An end is never forced: where it is also a token of text, nothing is known from there on.
        Raises GuideError.
        """
        if self.forced:
            return
        found: list[int] = []
        while len(found) < MAX_DRAFT_TOKENS and (following := self.matcher.forced(1)):
            if self.is_end(following[0]):
                break
            if not self.matcher.take(following[0]):
                raise GuideError("a forced token is refused")
            found += following
        self.matcher.roll_back(len(found))
        self.forced = found

    def fill(self) -> bytes:
        """Return the mask of the next token, which is forced: so it takes microseconds.

        Raises GuideError.
        """
        buffer = (ctypes.c_ubyte * len(self._mask))()
        self.matcher.fill(ctypes.addressof(buffer))
        return bytes(buffer)

    def carry(self, drafts: list[int]) -> bool:
        """Prepare the rows of drafts; return whether they can be verified.

        Rows of forced tokens get their masks, each of the grammar after the drafts before it. Other
        rows have none: what they sample is validated, but where every token needs its mask.
        """
        self.row_masks = []
        is_forced = self.forced[: len(drafts)] == drafts and not self._by_edits
        if not is_forced or (self.needs_all and len(drafts) == len(self.forced)):
            return not self.needs_all
        num_taken = 0
        try:
            for token_id in self.forced[: len(drafts) + 1]:
                self.row_masks.append(self._with_ends(self.fill()))
                if num_taken < len(drafts):
                    if not self.matcher.take(token_id):
                        raise GuideError("a forced token is refused")
                    num_taken += 1
            self.matcher.roll_back(num_taken)
        except Exception:  # the next mask or sample says so
            self.row_masks = []
            with suppress(Exception):
                self.matcher.roll_back(num_taken)
            return False
        return True

    def _with_ends(self, mask: bytes) -> bytes:
        """Return a mask by which the request's ends are legal where the text may end."""
        if not self._more_ids:
            return mask
        marked, is_legal = bytearray(mask), self.matcher.is_accepting
        for token_id in self._more_ids:
            place, bit = token_id >> 3, 1 << (token_id & 7)
            if place < len(marked):
                marked[place] = marked[place] | bit if is_legal else marked[place] & ~bit
        if not any(marked):
            self.error = "the only token that could come next is one that ends a text"
        return bytes(marked)

    def is_end(self, token_id: int) -> bool:
        """Return whether a token ends a text: it is legal where the matcher is accepting."""
        return token_id in self._end_ids

    def take(self, token_id: int) -> bool:
        """Take a sample if it is legal; return whether it is. Raises GuideError."""
        if self.is_end(token_id):
            is_legal = self.matcher.is_accepting
        elif self.forced and token_id != self.forced[0]:
            is_legal = False
        elif is_legal := self.matcher.take(token_id):
            self.has_mask = False
            self.forced = self.forced[1:] if self.forced[:1] == [token_id] else []
        self._adapt(is_legal)
        return is_legal

    def _adapt(self, is_legal: bool) -> None:
        """Decide whether the next token needs a mask."""
        if self.needs_all:
            return
        if not is_legal:
            self._patience = _FEWEST if self._num_good > _MOST else min(_MOST, 2 * self._patience)
            self._num_left, self._num_good = self._patience, 0
            self.needs_mask = True
            return
        if self.needs_mask:
            self._num_left -= 1
        else:
            self._num_good += 1
        self.needs_mask = self._num_left > 0 or self.pace.is_fast

    def illegal(self) -> set[int]:
        """Return the tokens that the mask bans; none where there is no mask yet."""
        if self.row_masks and self.forced:
            return {*range(8 * len(self._mask))} - {self.forced[0]}
        if not self.has_mask:
            return set()
        zeros = _zeros(self._mask)
        return {token_id for token_id, is_illegal in enumerate(zeros) if is_illegal}

    def with_bans(self, edits: bytes, vocab_size: int) -> bytes:
        """Return `EDIT` records of a row: those given, and a ban of each token that is illegal.

        For rows whose logits a mask must not touch; they run when their mask is there.
        """
        if not self.needs_mask or not self._by_edits:
            return edits
        assert self.has_mask, "a row without its mask"
        records = bans(vocab_size)  # a mask may be longer
        illegal = b"".join(compress(records, _zeros(self._mask)))
        if not edits:
            return illegal
        addends: dict[int, float] = dict(EDIT.iter_unpack(edits))
        return pack(addends | dict.fromkeys(banned_in(illegal), -inf))


_BIT_TEXT = [bytes(1 - (byte >> bit & 1) for bit in range(8)) for byte in range(256)]


def _zeros(mask: bytes) -> bytes:
    """Return a byte a token: 1 where its bit is 0."""
    return b"".join([_BIT_TEXT[byte] for byte in mask])
