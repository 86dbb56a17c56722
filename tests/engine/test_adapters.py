"""Adapters in an engine: chosen by name, loaded and unloaded while requests run."""

import random
from pathlib import Path

import pytest
import torch
from fixtures.engine.adapted import GREEDY, RANKS, House
from fixtures.models.adapters import (
    scale_of,
    task_arrays,
    write_adapter,
)
from fixtures.models.checkpoints import random_prompts
from msgspec.structs import replace
from slipstream.engine.scheduler import Limits
from slipstream_contract.drafts import Drafts
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.log_probs import LogProbs
from slipstream_contract.lora import LoraTask
from slipstream_contract.prompt_table import PromptTable


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_requests_of_several_adapters_and_of_none_share_steps_and_prompts(house: House) -> None:
    house.load("a", "b", "c")
    prompt = random_prompts([30])[0]
    for _ in range(2):  # the second time, what is cached of the first
        asked = {name: house.submit(prompt, name) for name in ("a", "", "b", "c")}
        house.asker.drain()
        for name, number in asked.items():
            assert house.asker.answers[number, 0].token_ids == house.expected(prompt, name)
    assert house.asker.engine.figures().counters["prefix_hits"] > 3 * 16


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_a_name_with_new_weights_finds_nothing_of_the_old(tmp_path: Path, host_bytes: int) -> None:
    house = House(tmp_path, kv_cache_tokens=64, kv_cache_host_bytes=host_bytes)
    prompt, other = random_prompts([30, 40])
    house.load("a")
    first = house.submit(prompt, "a")
    house.asker.drain()
    old = house.expected(prompt, "a")
    house.write("a", RANKS["a"], seed=9)
    house.load("a")
    house.asker.drain()
    if host_bytes:  # push what is cached out of the device
        house.submit(other, "")
        house.asker.drain()
    second = house.submit(prompt, "a")
    house.asker.drain()
    answers = house.asker.answers
    assert answers[first, 0].token_ids == old
    assert answers[second, 0].token_ids == house.expected(prompt, "a") != old
    assert house.asker.engine.figures().counters["prefix_hits"] == 0
    third = house.submit(prompt, "a")
    house.asker.drain()
    assert answers[third, 0].token_ids == answers[second, 0].token_ids
    assert house.asker.engine.figures().counters["prefix_hits"] > 0


def test_what_runs_keeps_its_adapter_when_the_name_goes_or_changes(house: House) -> None:
    house.load("a", "b")
    prompts = random_prompts([9, 5])
    wanted = [house.expected(prompts[0], "a"), house.expected(prompts[1], "b")]
    numbers = [house.submit(prompts[0], "a"), house.submit(prompts[1], "b")]
    house.asker.step()
    house.store.unload("a")
    house.write("b", RANKS["b"], seed=5)
    house.load("b")
    with pytest.raises(ContractError, match=r"adapter 'a' is not loaded; those that are: b$"):
        house.submit(prompts[0], "a")
    house.asker.answers.pop((2, 0), None)
    assert len(house.runner.adapters._stored) == 3
    house.asker.drain()
    found = [house.asker.answers[number, 0].token_ids for number in numbers]
    assert found == wanted
    assert len(house.runner.adapters._stored) == 1  # the new `b`


@pytest.mark.rest
def test_a_storm_of_adapters_in_a_small_pool_says_what_each_says_alone(tmp_path: Path) -> None:
    """Twelve adapters with room for two, chosen by Zipf's law; some are changed or cancelled."""
    house = House(tmp_path, adapter_memory=2 << 18)
    names = [f"s{i}" for i in range(12)]
    for seed, name in enumerate(names):
        RANKS[name] = 1 + 7 * seed % 20
        house.write(name, RANKS[name], seed)
    house.load(*names)
    rng, prompts = random.Random(5), random_prompts([21, 6])
    chosen = rng.choices(names, [1 / (1 + i) for i in range(len(names))], k=30)
    wanted: dict[int, list[int]] = {}
    known: dict[tuple[int, str], list[int]] = {}
    for place, name in enumerate(chosen):
        if place == 15:  # what was asked before keeps the old weights
            house.write("s0", RANKS["s0"], seed=77)
            house.load("s0")
            known = {key: value for key, value in known.items() if key[1] != "s0"}
        key = place % 2, name
        if key not in known:
            known[key] = house.expected(prompts[place % 2], name)
        number = house.submit(prompts[place % 2], name)
        if place % 7 == 6:
            house.asker.engine.cancel(b"asker", number)
        else:
            wanted[number] = known[key]
        house.asker.step()
    house.store.unload("s1")
    house.asker.drain()
    assert {n: house.asker.answers[n, 0].token_ids for n in wanted} == wanted
    counts = house.asker.engine.figures().counters
    # Of those that came, two are there at the end, and two were removed.
    least = len({chosen[place] for place in range(len(chosen)) if place % 7 != 6}) - 4
    assert counts["adapter_loads"] > counts["adapter_evictions"] >= least > 2


def test_an_adapter_that_never_fits_is_refused_with_its_size_and_the_pools(tmp_path: Path) -> None:
    house = House(tmp_path, adapter_memory=0)
    with pytest.raises(ContractError, match=r"adapter 'b' takes 1 pages of \d+ bytes, but .* 0 "):
        house.load("b")
    assert not house.runner.adapters._stored


def test_two_names_of_the_same_weights_are_one_adapter(house: House) -> None:
    house.load("a")
    house.store.load("again", str(house.folder / "a"))
    assert len(house.runner.adapters._stored) == 1
    house.store.unload("a")
    prompt = random_prompts([4])[0]
    number = house.submit(prompt, "again")
    house.asker.drain()
    assert house.asker.answers[number, 0].token_ids == house.expected(prompt, "a")
    house.store.unload("again")
    assert not house.runner.adapters._stored


def test_a_path_leads_below_the_root_or_is_refused(house: House, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside"
    write_adapter(outside, house.pairs["a"], RANKS["a"])
    (tmp_path / "link").symlink_to(outside)
    told: list[ContractError | None] = []
    for path in ("../outside", str(outside), "link", "", ".", "a/../..", "\0", "a/../link"):
        with pytest.raises(ContractError, match="lora_path is"):
            house.store.start_load("x", path, told.append)
    house.store.start_load("x", "a", told.append)
    house.store.start_load("y", str(tmp_path / "b"), told.append)
    house.store.start_load("z", "none", told.append)
    while house.store.is_loading:
        house.store.poll()
    assert told[:2] == [None, None]
    assert told[2] is not None
    assert told[2].code is Code.INVALID_ARGUMENT
    assert "no such directory" in told[2].message
    assert [info.name for info in house.store.infos()] == ["x", "y"]


def test_a_zero_term_leaves_the_bases_bits(house: House) -> None:
    pairs = {name: (a, torch.zeros_like(b)) for name, (a, b) in house.pairs["b"].items()}
    write_adapter(house.folder / "zero", pairs, RANKS["b"])
    house.load("zero")
    prompt = random_prompts([21])[0]
    found = []
    for name in ("", "zero"):
        number = house.submit(prompt, name)
        house.asker.drain()
        found.append(house.asker.answers[number, 0].log_probs)
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "num_pages"), [("", 9), ("b", 9), ("b", 1)])
def test_a_rows_bits_do_not_depend_on_neighbours_adapters(
    tmp_path: Path, name: str, num_pages: int
) -> None:
    house = House(tmp_path, deterministic=True, adapter_memory=num_pages << 18)
    house.load("a", "b")
    prompts = random_prompts([7, 30, 12, 4])
    found = []
    for neighbours in ((), ("a",), ("", "b"), ("b", "a", "b")):
        house.restart(Limits(8, 19, kv_cache_reuse=False))
        house.load("a", "b")
        for prompt, other in zip(prompts[1:], neighbours, strict=False):
            house.submit(prompt, other)
        number = house.submit(prompts[0], name)
        house.asker.drain()
        found.append(house.asker.answers[number, 0].log_probs)
    assert all(each == found[0] for each in found)


def task(house: House, number: int, name: str) -> LoraTask:
    """An adapter by TensorRT-LLM's inputs, with its weights."""
    weights, config = task_arrays(house.pairs[name], scale_of(RANKS[name]))
    return LoraTask(number, *weights.shape, weights.tobytes(), config.tobytes())


def test_a_client_numbers_adapters_and_sends_their_weights_once(house: House) -> None:
    for name, pairs in house.pairs.items():  # what fp16 holds of them
        scale = scale_of(RANKS[name])
        rounded = {
            k: (a.half().float(), (b * scale).half().float() / scale) for k, (a, b) in pairs.items()
        }
        house.pairs[name] = rounded
    house.store._tasks._max_bytes = 1
    prompt = random_prompts([12])[0]
    with pytest.raises(ContractError, match="LoRA task 7 not found in cache: send lora_weights"):
        house.submit(prompt, LoraTask(7))
    house.asker.answers.clear()
    for number, name in ((7, "a"), (2**63, "b"), (7, "c")):
        full = house.submit(prompt, task(house, number, name))
        house.asker.drain()
        later = house.submit(prompt, LoraTask(number))
        house.asker.drain()
        for asked in (full, later):
            assert house.asker.answers[asked, 0].token_ids == house.expected(prompt, name)
    with pytest.raises(ContractError, match=f"LoRA task {2**63} not found in cache"):
        house.submit(prompt, LoraTask(2**63))  # there was room for one


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_changed_head_beside_values_of_a_prompt(tmp_path: Path, is_fixed: bool) -> None:
    house = House(tmp_path, deterministic=is_fixed)
    rng = torch.Generator().manual_seed(3)
    head = {"lm_head": (torch.randn(4, 64, generator=rng), torch.randn(1009, 4, generator=rng))}
    house.pairs["head"] = head
    write_adapter(tmp_path / "head", head, 4, lora_alpha=1)
    RANKS["head"] = 32  # of alpha 8: the scaling of rank 4 with alpha 1
    house.load("head", "a")
    prompts = random_prompts([9, 13, 6])
    asked = replace(GREEDY, values=LogProbs(prompt=1))
    numbers = [
        house.submit(prompts[0], "head"),
        house.submit(prompts[1], "", asked),
        house.submit(prompts[2], "a", asked),
    ]
    house.asker.drain()
    found = [house.asker.answers[number, 0].token_ids for number in numbers]
    assert found == [house.expected(*each) for each in zip(prompts, ("head", "", "a"), strict=True)]
    assert found[0] != house.expected(prompts[0], "")
    with pytest.raises(ContractError, match=r"prompt_logprobs .* not implemented for an adapter"):
        house.submit(prompts[0], "head", asked)


VOCABULARY = 1009


def table_of(rows: int, seed: int, *extra_ids: int) -> PromptTable:
    """Embeddings of virtual tokens."""
    drawn = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    return PromptTable(rows, 64, drawn.half().numpy().tobytes(), extra_ids)


def greedy_of(
    house: House, table: PromptTable, prompt: list[int], penalty: float = 1.0
) -> list[int]:
    """Greedy tokens behind virtual ones, by embeddings; ids behind the vocabulary are rows."""
    rows = torch.frombuffer(bytearray(table.rows), dtype=torch.half).view(-1, 64).float()
    ids, outputs = list(prompt), list[int]()
    if max(prompt) < VOCABULARY:
        ids = [*range(VOCABULARY, VOCABULARY + len(rows)), *prompt]
    matrix = torch.cat([house.model.get_input_embeddings().weight, rows])
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            logits = house.model(inputs_embeds=matrix[ids][None]).logits[0, -1]
            seen = [each for each in set(ids) if each < VOCABULARY]
            own = logits[seen]
            logits[seen] = torch.where(own > 0, own / penalty, own * penalty)
            outputs.append(int(logits.argmax()))
            ids.append(outputs[-1])
    return outputs


def test_tables_of_requests_in_chunks_beside_adapters_and_under_pressure(tmp_path: Path) -> None:
    house = House(tmp_path, kv_cache_tokens=96)  # too few for all: some are preempted
    house.restart(Limits(8, 16))
    house.load("a")
    prompts = random_prompts([5, 30, 14, 9])
    placed = [7, VOCABULARY + 3, 8, 9, VOCABULARY, VOCABULARY + 3]
    tables = [table_of(4, 1), table_of(25, 2), table_of(4, 3)]
    for _ in range(2):  # the second time, what is cached of the first
        asked = [house.submit(p, t) for p, t in zip(prompts, tables, strict=False)]
        asked += [house.submit(placed, tables[0]), house.submit(prompts[3], "a")]
        house.asker.drain()
        wanted = [greedy_of(house, t, p) for p, t in zip(prompts, tables, strict=False)]
        wanted += [greedy_of(house, tables[0], placed), house.expected(prompts[3], "a")]
        assert [house.asker.answers[number, 0].token_ids for number in asked] == wanted
        assert len(house.runner.adapters._stored) == 1  # `a`: tables end with their requests


def test_tables_of_the_same_ids_share_nothing_and_equal_ones_do(house: House) -> None:
    prompt, found = random_prompts([40])[0], list[list[int]]()
    counters: list[float] = []
    one, two = table_of(8, 1), table_of(8, 2)
    for table in (one, two, table_of(8, 1, 5), one):
        number = house.submit(prompt, table)
        house.asker.drain()
        found.append(house.asker.answers[number, 0].token_ids)
        counters.append(house.asker.engine.figures().counters["prefix_hits"])
    assert found == [greedy_of(house, each, prompt) for each in (one, two, one, one)]
    assert counters[:3] == [0, 0, 0]
    assert counters[3] > 32


def test_what_else_a_request_with_virtual_tokens_may_want(house: House) -> None:
    table, prompt = table_of(6, 4), random_prompts([12])[0] * 3
    penalised = replace(GREEDY, repetition_penalty=1.7)
    asked = [
        house.submit(prompt, table, penalised),
        house.submit(prompt, table, replace(GREEDY, no_repeat_ngram_size=2)),
        house.submit(prompt, table, replace(GREEDY, drafts=Drafts(most=4))),
        house.submit(prompt, table, replace(GREEDY, n=2)),
    ]
    house.asker.drain()
    answers = house.asker.answers
    plain = greedy_of(house, table, prompt)
    assert answers[asked[0], 0].token_ids == greedy_of(house, table, prompt, 1.7)
    assert len(answers[asked[1], 0].token_ids) == GREEDY.max_tokens
    assert answers[asked[2], 0].token_ids == answers[asked[3], 1].token_ids == plain
    for own, sampling, why in (
        (table, replace(GREEDY, values=LogProbs(prompt=1)), "virtual tokens have no log probs"),
        (replace(table, num_rows=3, width=128), GREEDY, r"rows are \[3, 128\], not \[.*, 64\]"),
        (table_of(300, 0), GREEDY, "the prompt is 336 tokens long"),
    ):
        with pytest.raises(ContractError, match=why):
            house.submit(prompt, own, sampling)
    with pytest.raises(ContractError, match=r"id 1015 is outside .* 1008 and 6 virtual tokens"):
        house.submit([VOCABULARY + 6], table)
    with pytest.raises(ContractError, match=r"id 1009 is outside the vocabulary 0 \.\. 1008$"):
        house.submit([VOCABULARY], "")
