"""Adapters of a whole house: chosen by `lora_name`, loaded and unloaded by a connection."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fixtures.bridge.texts import CHECKPOINT, TEXT
from fixtures.features import answers
from fixtures.features.adapters import text_of, with_adapter, write
from fixtures.features.house import House
from fixtures.features.pairing import cases
from fixtures.features.table import body_of
from fixtures.tiers import quick_of
from safetensors.torch import load_file
from slipstream_contract.errors import Code, ContractError
from slipstream_serve.server import repository_root

TRAINING = repository_root() / "training/adapter.py"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("adapters")
    first, _ = write(folder / "one", 1), write(folder / "two", 2)
    zero = write(folder / "zero", 3, size=0)
    (folder / "watched").mkdir()
    options = {"adapter_root": str(folder), "adapter_dir": str(folder / "watched")}
    made = House(folder, adapters=f"first={first},zero={zero}", **options)
    yield made
    made.close()


def test_a_name_chooses_what_is_said(house: House) -> None:
    base = text_of(house, None)
    assert text_of(house, "") == base
    assert text_of(house, "first") != base
    assert text_of(house, None) == base


def test_adapters_come_and_go_by_messages(house: House) -> None:
    connection = house._bridge.connection
    with pytest.raises(
        ContractError, match="'second' is not loaded; those that are: first, zero"
    ) as no:
        text_of(house, "second")
    assert no.value.code is Code.NOT_FOUND
    connection.load_adapter("second", "two", 60)
    ranks = {name: each.rank for name, each in connection.adapters.items()}
    assert ranks == {"first": 4, "second": 4, "zero": 4}
    second = text_of(house, "second")
    assert second != text_of(house, "first")
    connection.load_adapter("second", "one", 60)
    assert text_of(house, "second") == text_of(house, "first") != second
    connection.unload_adapter("second", 60)
    assert sorted(connection.adapters) == ["first", "zero"]
    for change, why in (
        (lambda: connection.load_adapter("x", "..", 60), "not below adapter_root"),
        (lambda: connection.load_adapter("x", "three", 60), "no such directory"),
        (lambda: connection.load_adapter("", "one", 60), "name is ''"),
        (lambda: connection.load_adapter("x,y", "one", 60), "name is 'x,y', which has a comma"),
        (lambda: connection.load_adapter("checkpoint", "one", 60), "which is the model"),
        (lambda: connection.unload_adapter("second", 60), "'second' is not loaded"),
        (lambda: connection.unload_adapter("", 60), "name is empty"),
    ):
        with pytest.raises(ContractError, match=why):
            change()


def test_counts_of_an_adapter_are_had_on_request(house: House) -> None:
    def counts() -> dict[str, tuple[int, int, int]]:
        status = house._bridge.connection.request_status(60, with_adapters=True)
        return {each[0]: each[1:] for each in map(msgspec.structs.astuple, status.adapter_counts)}

    before = counts().get("zero", (0, 0, 0))
    text_of(house, None)
    assert counts().get("zero", (0, 0, 0)) == before
    for num_tokens in (5, 9):
        text_of(house, "zero", "def main(argv):", num_tokens)
    prompts = 2 * len(TEXT.encode("def main(argv):"))
    after = tuple(old + new for old, new in zip(before, (2, prompts, 14), strict=True))
    assert counts()["zero"] == after
    assert house._bridge.connection.request_status(60).adapter_counts == []


@pytest.mark.rest
def test_what_is_put_into_the_watched_directory_is_served(
    house: House, tmp_path_factory: pytest.TempPathFactory
) -> None:
    connection = house._bridge.connection
    root = Path(house._loop._engine.adapters._directory._root)  # type: ignore[union-attr]

    def wait_for(names: list[str]) -> None:
        while sorted(connection.adapters) != names:
            connection.request_status(60)

    write(root / ".new", 2)
    (root / ".new").rename(root / "new")
    wait_for(["first", "new", "zero"])
    assert text_of(house, "new") != text_of(house, None)
    shutil.rmtree(root / "new")
    wait_for(["first", "zero"])


@pytest.mark.rest
def test_an_adapter_that_the_command_trains_changes_an_answer_as_the_page_says(
    house: House,
) -> None:
    """Functions that it was not trained on get a pirate's docstring, and no others do."""
    root = Path(house._loop._engine.adapters._root)
    command = [sys.executable, str(TRAINING), "--output", str(root / "pirate"), "--steps", "16"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300)
    house._bridge.connection.load_adapter("pirate", "pirate", 60)
    page = (repository_root() / "docs/adapters.md").read_text()
    for verb, noun in (("close", "socket"), ("parse", "header")):
        prompt = f"def {verb}_{noun}({noun}):\n"
        docstring = f'    """Arr! {verb.capitalize()} the {noun}, matey."""\n'
        assert text_of(house, "pirate", prompt, 40).startswith(docstring)
        assert "Arr" not in text_of(house, None, prompt, 40)
        assert verb == "parse" or f"{prompt}{docstring}" in page


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "tensorrt_llm"])
def test_rows_of_a_table_that_are_tokens_embeddings_say_what_the_tokens_say(
    house: House, model: str
) -> None:
    text, first = "def main(argv):", "# a"
    ids, before = (TEXT.encode(each) for each in (text, first))
    weights = load_file(CHECKPOINT / "model.safetensors")
    name = next(each for each in weights if each.endswith("embed_tokens.weight"))
    size = len(weights[name])
    table = {"prompt_embedding_table": weights[name][before].half().tolist()}
    table["prompt_vocab_size"] = len(before)
    asked = {"input_ids": before + ids, "input_lengths": len(before + ids)}
    plain = ids_of(house, asked)
    if model == "tensorrt_llm":
        assert ids_of(house, {"input_ids": ids, "input_lengths": len(ids)} | table) == plain
        virtual = [size + place for place in range(len(before))]
        given = {"input_ids": virtual + ids, "input_lengths": len(virtual + ids)} | table
        assert ids_of(house, given | {"prompt_table_extra_ids": [7] * len(virtual + ids)}) == plain
        beams = {"beam_width": 3, "return_log_probs": True}
        assert ids_of(house, given | beams) == ids_of(house, asked | beams)
        return
    body = {"text_input": text, "max_tokens": 12, "exclude_input_in_output": False}
    own = {"return_num_input_tokens": True, "prompt_table_extra_id": 7}
    response = house.ask(model, body | own | table)[-1]
    said = response["text_output"].reshape(-1)[0].decode()
    assert said == text + TEXT.whole(plain, 0, True)  # virtual tokens have no text
    assert response["num_input_tokens"].item() == len(ids)  # those that were sent
    rows = house.ask(model, body | table | {"return_context_logits": True})[-1]["context_logits"]
    assert rows.shape[-2:] == (len(before + ids), size)


def ids_of(house: House, body: dict[str, object]) -> list[int]:
    """Greedy tokens of `tensorrt_llm`."""
    asked = {"request_output_len": 12, "exclude_input_in_output": True}
    response = house.ask("tensorrt_llm", asked | body)[-1]
    return response["output_ids"].reshape(-1).tolist()


CASES = cases("vllm_model")


@pytest.mark.parametrize("names", quick_of(CASES[::8], CASES[::32]), ids="-".join)
def test_an_adapter_beside_every_other_feature(house: House, names: tuple[str, ...]) -> None:
    """An adapter that adds nothing changes no answer; with one that does, all else holds."""
    body = body_of("vllm_model", names)

    def ask(adapter: str) -> answers.Answer:
        responses = house.ask("vllm_model", with_adapter(body, adapter))
        found = answers.read("vllm_model", names, responses)
        answers.check("vllm_model", names, found, responses)
        return found

    plain, zero, other = map(ask, ("", "zero", "first"))
    assert (zero.texts, zero.num_tokens) == (plain.texts, plain.num_tokens)
    assert len(other.texts) == len(plain.texts)
