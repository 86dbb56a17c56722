"""Blocks of a group that is preempted: what beams get again is what they computed."""

import pytest
from fixtures.engine.beams import expected_beams
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import MAX_LEN, Words
from slipstream.core.sequence import Sequence
from slipstream.engine.beam_group import BeamGroup
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits, Scheduler
from slipstream.kvcache.reuse import PrefixMatch
from slipstream_contract.beams import Beams
from slipstream_contract.sampling import SamplingParams

PROMPT, SIZE, BORDER = [7], 3, 6
# By their diversity another beam than the first is the best at the border of a block.
SEARCH = SamplingParams(
    max_tokens=9, temperature=0.0, n=3, beams=Beams(width=3, diversity_rate=1.5)
)


def make(num_blocks: int = 40) -> tuple[Client, Scheduler, BeamGroup]:
    """An engine with a beam search that has not begun."""
    client = Client(Engine(Limits(8, 64), CountingRunner(num_blocks, SIZE), Words()))
    number = client.submit(PROMPT, SEARCH)
    group = client.engine._requests[client.name, number].sequences[0].group
    return client, client.engine._scheduler, group


def check(client: Client) -> None:
    client.drain()
    answers = client.streams[0, 0].beams
    found = expected_beams(PROMPT, SEARCH, MAX_LEN, client.engine._runner.window)
    assert [a.cum_log_prob for a in answers] == pytest.approx([f.cum_log_prob for f in found])


def test_a_beam_gets_no_block_that_another_has_evicted() -> None:
    """Blocks of an idle prefix may be handed out while beams are admitted, one after another."""
    client, scheduler, group = make()
    order: list[int] = []

    def preempt_and_fork() -> None:
        if group.moves and group.lead.num_computed == BORDER and not order:
            scheduler._running.preempt(group.lead)
            order.extend(beam.index for beam in group.live)
        fork_all()

    cache, admit, fork_all = scheduler.cache, scheduler.cache.admit, scheduler._groups.fork_all

    def admit_and_evict(sequence: Sequence, match: PrefixMatch, *rest: int) -> bool:
        is_admitted = admit(sequence, match, *rest)
        if order and sequence is group.live[0]:
            cache._blocks.free(cache._blocks.allocate(cache.num_free))
        return is_admitted

    cache.admit = admit_and_evict
    scheduler._groups.fork_all = preempt_and_fork
    check(client)
    assert order[0] != group.lead.index


def test_a_search_that_just_fits_is_admitted_without_blocks_to_copy_from() -> None:
    """Four beams of three blocks each, in twelve, one of which begins with the prompt."""
    client = Client(Engine(Limits(8, 64), CountingRunner(12, 4), Words()))
    asked = SamplingParams(max_tokens=9, temperature=0.0, n=4, beams=Beams(width=4))
    number = client.submit([1], asked)
    group = client.engine._requests[client.name, number].sequences[0].group
    running, num_preemptions = client.engine._scheduler._running, 0
    while client.engine.has_work:
        if group.is_running and num_preemptions < 3 and group.lead.num_outputs:
            running.preempt(group.lead)
            num_preemptions += 1
        client.step()
    assert num_preemptions == 3
    assert len(client.streams[number, 0].beams) == 4
