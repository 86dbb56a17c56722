"""A real, tiny model without arithmetic: a token is a hash of all tokens before it.

`CountingRunner` reads that history back through the tables of its row from a paged cache that it
fills as a model does (all rows write, then all read), of each table as much as it shows. A wrong
block, position or chunk, a block freed or shared too early: each changes the tokens. What is
written depends on all before it, as keys and values do, so that a block of another prefix is seen,
and NaN goes on to all that read it.
`expected` says what the tokens must be, without engine or cache.
"""

from collections import deque
from collections.abc import Iterable
from math import inf
from zlib import crc32

import msgspec
from slipstream.core import prefix
from slipstream.core.batch import Batch, Row, Sampled
from slipstream.core.edits import EDIT
from slipstream.core.sequence import mix_seed
from slipstream.core.window import Window
from slipstream.engine.engine import Engine
from slipstream.kvcache.host import Mover
from slipstream.wire import FinishReason, Submit, Tokens
from slipstream_contract.ids import pack
from slipstream_contract.retention import Retention
from slipstream_contract.sampling import SamplingParams

prefix.SEGMENT = 2  # so that prompts of a few tokens have some

VOCAB_SIZE = 61
ALPHABET = b"abc"
NAN = -1  # instead of a digest of all before
Slot = tuple[int, int]  # a token, and the digest of the table, of it and of all before it
MAX_LEN = 40


class Words:
    """Token id -> none to three letters of a small alphabet, so that stop words do occur."""

    def raw(self, token_id: int) -> bytes:
        size = token_id % 4
        return bytes(ALPHABET[(token_id // (4 * 3**i) + i) % 3] for i in range(size))


def next_token(history: list[int], seed: int, number: int, banned: set[int]) -> int:
    """Output `number` after `history`: a hash, moved on past banned ids."""
    token_id = crc32(repr((history, seed, number)).encode()) % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def banned_ids(edits: bytes) -> set[int]:
    pairs = list(EDIT.iter_unpack(edits))
    ids = [token_id for token_id, _ in pairs]
    assert ids == sorted(set(ids)), "not one edit a token, by rising id"
    return {token_id for token_id, addend in pairs if addend == -inf}


class OutOfMemoryError(RuntimeError):
    """By torch's name for it."""


class Counted:
    """A step between launch and wait; it reads and writes the cache when it is waited for."""

    def __init__(self, runner: "CountingRunner", batch: Batch, error: Exception | None) -> None:
        self._runner = runner
        self.batch = batch
        self._error = error

    def wait(self) -> Sampled:
        assert self._runner.in_flight[0] is self, "waited for out of turn"
        self._runner.in_flight.popleft()
        sampled = self._runner.compute(self.batch)
        if self._error is not None:
            raise self._error
        return sampled


class CountingRunner:
    """Checks the shape of every batch, and that only its own rows are written.

    A launch keeps what the rows say at that time, as a GPU does, and computes when waited for. A
    sample of NaN is the token 0.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int = MAX_LEN,
        max_in_flight: int = 2,
        window: Window | None = None,
    ) -> None:
        self.window = window or Window()
        self.transfers: Mover | None = None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = VOCAB_SIZE
        self.max_model_len = max_model_len
        self.max_in_flight = max_in_flight
        self.attention_doubles_at = 0
        self.max_tokens = 1 << 30
        self.batches: list[Batch] = []
        self.in_flight: deque[Counted] = deque()
        self.poisoned: set[int] = set()  # sequence ids whose logits are NaN
        self.broken: set[int] = set()  # sequence ids that make their steps fail,
        self.breaks_late = False  # when these are waited for, or when they are launched
        self.memory = 1 << 30  # tokens of a step that do not run out of it
        self.error: Exception | None = None  # raised by the next launch
        self.late_error: Exception | None = None  # raised by the wait for the next launch
        self.samples: list[int] = []  # of the last step that was waited for
        self._cache: list[list[Slot | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._owners: dict[int, int] = {}  # slot -> sequence
        self._tables: dict[int, list[list[int]]] = {}  # of each slot

    def launch(self, batch: Batch) -> Counted:
        assert len(self.in_flight) < self.max_in_flight
        self._check(batch)
        self._check_fences(batch)
        rows = [
            msgspec.structs.replace(
                row,
                tables=tuple(map(list, row.tables)),
                token_ids=list(row.token_ids),
                history=None if row.history is None else list(row.history),
            )
            for row in batch.rows
        ]
        batch = Batch(tuple(rows), batch.num_decodes, batch.continues, batch.copies)
        self.batches.append(batch)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if batch.num_tokens > self.memory:
            raise OutOfMemoryError(f"{batch.num_tokens} tokens")
        if not self.broken.isdisjoint(row.sequence_id for row in batch.rows):
            if not self.breaks_late:
                raise ValueError("planted")
            self.late_error = ValueError("planted, told by the wait")
        self.in_flight.append(Counted(self, batch, self.late_error))
        self.late_error = None
        return self.in_flight[-1]

    def compute(self, batch: Batch) -> Sampled:
        for source, target in batch.copies:
            self._cache[target] = list(self._cache[source])
        for row in batch.rows:
            token_ids = row.token_ids if row.source < 0 else [self.samples[row.source]]
            digests = list(range(self.window.num_tables))
            if row.start:
                digests = [self._read(row, table, row.start - 1)[1] for table in digests]
            for i, token_id in enumerate(token_ids, start=row.start):
                is_nan = NAN in digests or row.sequence_id in self.poisoned
                digests = [NAN if is_nan else next_digest(each, token_id) for each in digests]
                for table, digest in enumerate(digests):
                    block, offset = self._place(row, table, i)
                    self._cache[block][offset] = (token_id, digest)
        rows = [row for row in batch.rows if row.samples]
        drawn = [self._sample(row) for row in rows]
        self.samples = [0 if token_id is None else token_id for token_id in drawn]
        is_finite = [token_id is not None for token_id in drawn]
        return Sampled(self.samples, [-float(row.num_outputs) for row in rows], is_finite)

    def poison(self, blocks: Iterable[int]) -> None:
        """Nobody may read what they hold."""
        for block in blocks:
            self._cache[block] = [None] * self.block_size

    def _check_fences(self, batch: Batch) -> None:
        """What a step in flight may write to is not handed to another sequence."""
        for step in self.in_flight:
            for old in step.batch.rows:
                written = set(self._written(old))
                for row in batch.rows:
                    if row.sequence_id != old.sequence_id:
                        assert not written & set(self._seen(row)), "the fence is broken"

    def _check(self, batch: Batch) -> None:
        assert batch.rows
        assert batch.num_tokens <= self.max_tokens
        slots = [row.slot for row in batch.rows]
        assert len(set(slots)) == len(slots)
        before = self.in_flight[-1].batch.rows if self.in_flight else ()
        num_before = sum(row.samples for row in before)
        for number, row in enumerate(batch.rows):
            if row.is_new:
                self._owners[row.slot] = row.sequence_id
            assert self._owners[row.slot] == row.sequence_id
            # Of a row that is not new a runner looks at no more than what its tables grew by.
            known = [] if row.is_new else self._tables[row.slot]
            assert all(new[: len(old)] == old for new, old in zip(row.tables, known, strict=False))
            self._tables[row.slot] = list(map(list, row.tables))
            if row.source >= 0:
                assert row.source < num_before
                assert self._is_sample(row)
            is_decode = len(row.token_ids) == 1 and row.samples
            assert is_decode == (number < batch.num_decodes)
            end = row.start + len(row.token_ids)
            assert row.token_ids
            assert end < self.max_model_len
            assert len(row.tables) == self.window.num_tables
            assert end <= min(map(len, row.tables)) * self.block_size + row.gap
            assert len(set(self._seen(row))) == len(self._seen(row))
            assert row.gap == 0 or self.window.has_gaps
        ids = [row.sequence_id for row in batch.rows]
        assert len(ids) == len(set(ids))
        # No row reads or writes what another row of the same step writes.
        writers: dict[int, int] = {}
        for row in batch.rows:
            for block in self._written(row):
                assert writers.setdefault(block, row.sequence_id) == row.sequence_id
        for row in batch.rows:
            for block in self._seen(row):
                assert writers.get(block, row.sequence_id) == row.sequence_id

    def _is_sample(self, row: Row) -> bool:
        """Is the row's source its own sequence's sample, one position before?"""
        before = [r for r in self.in_flight[-1].batch.rows if r.samples][row.source]
        is_next = before.start + len(before.token_ids) == row.start
        return before.sequence_id == row.sequence_id and is_next and len(row.token_ids) == 1

    def _place(self, row: Row, table: int, position: int) -> tuple[int, int]:
        """Block, and offset in it."""
        num_pinned = -(-self.window.num_sinks // self.block_size) * self.block_size
        place = position - row.gap if position >= num_pinned else position
        return row.tables[table][place // self.block_size], place % self.block_size

    def _written(self, row: Row) -> list[int]:
        """Blocks, table by table in order."""
        size, end = self.block_size, row.start + len(row.token_ids)
        return [
            self._place(row, table, i * size)[0]
            for table in range(self.window.num_tables)
            for i in range(row.start // size, -(-end // size))
        ]

    def _seen(self, row: Row) -> list[int]:
        """Blocks of what any of its tokens sees, in order of position; those written too."""
        blocks = []
        for table, window in enumerate(windows_of(self.window)):
            first = first_near(row.start, window) // self.block_size
            sinks = range(min(first, -(-window.num_sinks // self.block_size)))
            end = -(-(row.start + len(row.token_ids)) // self.block_size)
            numbers = [*sinks, *range(first, end)]
            blocks += [self._place(row, table, i * self.block_size)[0] for i in numbers]
        return blocks

    def _read(self, row: Row, table: int, position: int) -> Slot:
        block, offset = self._place(row, table, position)
        slot = self._cache[block][offset]
        assert slot is not None, "read before written"
        return slot

    def _sample(self, row: Row) -> int | None:
        """None: NaN."""
        history: list[int] = []
        for table, window in enumerate(windows_of(self.window)):
            last, before = -1, table  # a position, and its digest
            for i in seen_by(row.start + len(row.token_ids) - 1, window):
                token_id, digest = self._read(row, table, i)
                if digest == NAN:
                    return None
                is_next = digest == next_digest(before, token_id)
                assert is_next or last < i - 1, "read what was written after another prefix"
                last, before = i, digest
                history.append(token_id)
        seed = row.seed if row.sampling.temperature else 0
        return next_token(history, seed, row.num_outputs, banned_ids(row.edits))


def windows_of(window: Window) -> list[Window]:
    """What each table shows."""
    return [*(Window() for _ in window.full), *(window for _ in window.local)]


def next_digest(digest: int, token_id: int) -> int:
    return crc32(b"%d" % token_id, digest)


def first_near(position: int, window: Window) -> int:
    """The first position that a token sees beside the sinks."""
    return max(0, position - (window.size - window.num_sinks) + 1) if window.size else 0


def seen_by(position: int, window: Window) -> list[int]:
    """Positions that a token sees, its own included."""
    near = range(first_near(position, window), position + 1)
    return [*range(min(window.num_sinks, near.start)), *near]


def expected(
    prompt: list[int],
    sampling: SamplingParams,
    index: int = 0,
    max_model_len: int = MAX_LEN,
    window: Window | None = None,
) -> tuple[bytes, FinishReason]:
    """Text and ending by the definition: one token after the other, then search the whole text."""
    words, history, text = Words(), list(prompt), b""
    seed = mix_seed(sampling.seed or 0, index) if sampling.temperature else 0
    for number in range(min(sampling.max_tokens, max_model_len - len(prompt))):
        banned = {w[-1] for w in sampling.bad_words if len(w) == 1}
        banned |= {w[-1] for w in sampling.bad_words if ends_with(history, w[:-1])}
        if number < sampling.min_tokens:
            banned |= {*sampling.end_ids, *sampling.stop_token_ids}
        shown = windows_of(window or Window())
        seen = [history[i] for each in shown for i in seen_by(len(history) - 1, each)]
        token_id = next_token(seen, seed, number, banned)
        if token_id in sampling.end_ids:
            return text, FinishReason.END
        history.append(token_id)
        raw = words.raw(token_id)
        if token_id in sampling.stop_token_ids:
            return text + raw * sampling.include_stop, FinishReason.STOP
        for size in range(1, len(raw) + 1):
            told = text + raw[:size]
            found = [w for w in sampling.stop_words if told.endswith(w)]
            if found and number + 1 > sampling.min_tokens:
                cut = 0 if sampling.include_stop else max(map(len, found))
                return told[: len(told) - cut], FinishReason.STOP
        text += raw
    return text, FinishReason.LENGTH


def ends_with(history: list[int], tail: tuple[int, ...]) -> bool:
    return bool(tail) and tuple(history[-len(tail) :]) == tail


class Stream:
    """What a bridge sees of one sequence."""

    def __init__(self, is_probe: bool = False) -> None:
        self.is_probe = is_probe
        self.text = b""
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.last: Tokens | None = None

    def take(self, tokens: Tokens) -> None:
        assert self.last is None, "tokens after the end"
        assert tokens.token_ids or tokens.finished, "an empty message"
        self.token_ids += tokens.token_ids
        self.log_probs += tokens.log_probs
        self.text += b"".join(Words().raw(token_id) for token_id in tokens.token_ids)
        if tokens.drop_bytes:
            assert tokens.finished
            assert tokens.drop_bytes <= len(Words().raw(tokens.token_ids[-1]))
            self.text = self.text[: -tokens.drop_bytes]
        if tokens.finished:
            self.last = tokens

    @property
    def reason(self) -> FinishReason:
        assert self.last is not None
        assert self.last.finished is not None
        return self.last.finished.reason


class Client:
    """A bridge without a socket: submits, steps, and collects what comes back."""

    def __init__(self, engine: Engine, name: bytes = b"bridge") -> None:
        self.engine = engine
        self.name = name
        self.streams: dict[tuple[int, int], Stream] = {}
        self._next = 0

    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        priority: int = 5,
        deadline_ns: int = 0,
        salt: str = "",
        retention: Retention | None = None,
        is_probe: bool = False,
    ) -> int:
        number = self._next
        self._next += 1
        timeout_ns = 5_000_000 if deadline_ns else 0
        urgency = (priority, deadline_ns, timeout_ns)
        more = {"cache_salt": salt, "retention": retention, "is_probe": is_probe}
        self.engine.submit(self.name, Submit(number, pack(prompt), sampling, 1, *urgency, **more))
        for index in range(sampling.n):
            self.streams[number, index] = Stream(is_probe)
        return number

    def step(self) -> None:
        for tokens in self.engine.step().get(self.name, ()):
            self.streams[tokens.request, tokens.index].take(tokens)
        self.engine.check_integrity()
        runner = self.engine._runner
        if isinstance(runner, CountingRunner):
            runner.poison(self.engine._scheduler.cache._blocks._empty)

    def drain(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "no end"
        status = self.engine.status()
        assert status.kv_blocks_free == status.kv_blocks_total
        assert (status.running, status.waiting, status.last_step_age_s) == (0, 0, 0.0)
        assert all(stream.last is not None for stream in self.streams.values())
