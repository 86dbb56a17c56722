"""Values beside the tokens, as a bridge gets them: bounds, refusals, and prompts read anew."""

import pytest
from fixtures.engine.checks import check
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import MAX_LEN, VOCAB_SIZE, Words
from fixtures.engine.values import check_values
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream_contract.beams import Beams
from slipstream_contract.errors import ContractError
from slipstream_contract.log_probs import WHOLE, LogProbs
from slipstream_contract.sampling import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def make_client(limits: Limits | None = None, num_blocks: int = 40) -> Client:
    return Client(Engine(limits or Limits(4, 5), CountingRunner(num_blocks, 4), Words()))


def sampling(most: int = 5, **values: object) -> SamplingParams:
    wanted = LogProbs(**values)  # type: ignore[arg-type]
    return SamplingParams(max_tokens=most, temperature=0.0, values=wanted)


# 11 tokens of prompt, up to 5 of output, a vocabulary of 61.
@pytest.mark.parametrize(
    ("values", "size", "named"),
    [
        ({"context_logits": True}, 4 * 61 * 11, "return_context_logits"),
        ({"generation_logits": True}, 4 * 61 * 5, "return_generation_logits"),
        ({"top": WHOLE}, 64 * 61 * 5, "logprobs = -1"),
        ({"prompt": WHOLE}, 64 * 61 * 11, "prompt_logprobs = -1"),
    ],
)
def test_what_is_whole_is_bounded_by_bytes(
    values: dict[str, object], size: int, named: str
) -> None:
    asked = sampling(**values)
    exact = make_client(Limits(4, 5, max_logits_bytes=size))
    exact.submit(PROMPT, asked)
    exact.drain()
    client = make_client(Limits(4, 5, max_logits_bytes=size - 1))
    want = rf"{named} .* take {size} bytes, at most {size - 1} are served \(max_logits_bytes\)"
    with pytest.raises(ContractError, match=want):
        client.submit(PROMPT, asked)
    number = client.submit(PROMPT, sampling(top=20, prompt=20))
    client.drain()
    check(client, number, PROMPT, SamplingParams(max_tokens=5, temperature=0.0))


def test_beams_are_refused_by_name() -> None:
    both = SamplingParams(
        max_tokens=3, temperature=0.0, beams=Beams(width=2), values=LogProbs(top=1)
    )
    with pytest.raises(
        ContractError, match="beams and values: a search has log probs of its tokens alone"
    ):
        make_client().submit(PROMPT, both)


def test_a_prompt_whose_values_are_wanted_is_computed_anew_and_can_be_found() -> None:
    client = make_client(Limits(1, 5))
    plain = SamplingParams(max_tokens=3, temperature=0.0)
    first, second, third = plain, sampling(3, prompt=1), plain
    hits, numbers = [], []
    for asked in (first, second, third):
        number = client.submit(PROMPT, asked)
        client.drain()
        check(client, number, PROMPT, asked)
        numbers.append(number)
        hits.append(client.engine.status().num_prefix_hits)
    assert hits[0] == hits[1] == 0
    assert hits[2] > 0
    stream = client.streams[numbers[1], 0]
    assert second.values is not None
    check_values(stream.values, PROMPT, stream.token_ids, second.values, 0)


def test_preempted_in_the_middle_of_its_prompt_it_goes_on_where_it_was() -> None:
    client = make_client(Limits(4, 3))
    asked = sampling(3, prompt=2, context_logits=True)
    number = client.submit(PROMPT, asked)
    running = client.engine._scheduler._running
    for _ in range(3):
        client.step()
        for victim in list(running.sequences.values()):
            running.preempt(victim)
    client.drain()
    assert client.engine.status().num_preemptions > 1
    check(client, number, PROMPT, asked)
    rows = [row for batch in client.engine._runner.batches for row in batch.rows]  # type: ignore[attr-defined]
    asks = [(row.start + row.prompt.first, len(row.token_ids)) for row in rows if row.prompt]
    starts = [start for start, _ in asks]
    assert starts == sorted(set(starts)), "no position is made twice"


def test_a_batch_says_whether_any_row_wants_values() -> None:
    client = make_client(Limits(4, 30))
    plain = SamplingParams(max_tokens=20, temperature=0.0)
    client.submit(PROMPT[:2], plain)
    wanting = client.submit(PROMPT, sampling(3, top=2))
    for _ in range(MAX_LEN):
        client.step()
    batches = client.engine._runner.batches  # type: ignore[attr-defined]
    said = [batch.may_have_tops for batch in batches]
    assert True in said
    assert not said[-1], "the rows that are left want nothing"
    assert client.streams[wanting, 0].last is not None
    assert VOCAB_SIZE == 61
