"""Defaults of generation_config.json: those that are read serve each request that does not say."""

import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.guide.real import CHECKPOINT
from hypothesis import given
from hypothesis import strategies as st
from slipstream import wire
from slipstream_contract.errors import ContractError
from slipstream_contract.generation_config import NAMES, read_defaults
from slipstream_gateway.models import Model
from slipstream_gateway.prepare import read_request
from slipstream_gateway.settings import Settings

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 1.0, 50, 0.6, 1e-6, 2**31, 10**400, 1e308, -0.0, 20.0]),
    st.floats(),
    st.integers(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=1),
)


def write(directory: Path, content: object) -> Path:
    path = directory / "generation_config.json"
    path.write_text(json.dumps(content))
    return path


@given(
    st.dictionaries(st.sampled_from([*NAMES, "do_sample"]), VALUES, max_size=3),
    st.booleans(),
)
def test_what_is_read_serves_each_request(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any], is_chat: bool
) -> None:
    path = write(tmp_path_factory.mktemp("defaults"), content)
    try:
        defaults = read_defaults(path.parent)
    except ContractError as error:
        refused = error.message
    else:
        refused = ""
    if refused:
        (named,) = (name for name in NAMES if refused.startswith(f"{path}: {name} is "))
        assert content[named] is not None
        return
    body: dict[str, Any] = {"messages": []} if is_chat else {}
    texts: list[Any] = [SimpleNamespace(defaults=d, max_model_len=99) for d in (defaults, {})]
    silent = read_request(body, texts[0], is_chat)
    assert silent.sampling == read_request(body | defaults, texts[1], is_chat).sampling
    assert defaults.items() <= content.items()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"top_p": 0}, "top_p is 0, not a number above 0 and at most 1"),
        ({"temperature": -1}, "temperature is -1, not a finite number from 0 to "),
        ({"top_k": -5}, "top_k is -5, not a whole number from -1 to "),
        ({"top_k": "5"}, "top_k is '5', not a whole number from -1 to "),
        ({"min_p": True}, "min_p is True, not a number from 0 to 1"),
        ({"repetition_penalty": 0, "do_sample": False}, "repetition_penalty is 0, not "),
        ([], "must be a JSON object, not "),
    ],
)
def test_a_value_that_no_request_could_have_is_refused(
    tmp_path: Path, content: object, said: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ContractError) as caught:
        read_defaults(tmp_path)
    assert caught.value.message.startswith(f"{path}: {said}")


def test_what_greedy_decoding_does_not_read_may_be_anything(tmp_path: Path) -> None:
    given = {"do_sample": False, "temperature": 0.0, "top_p": 0, "top_k": 0, "min_p": None}
    write(tmp_path, given)
    assert read_defaults(tmp_path) == {"temperature": 0.0, "top_k": 0}


def test_the_gateway_names_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(CHECKPOINT / name, tmp_path)
    path = write(tmp_path, {"top_p": 0})
    model = Model.__new__(Model)
    model.text, model._fault, model._unreadable = None, "", ""
    model.config = SimpleNamespace(checkpoint=str(tmp_path))
    with ThreadPoolExecutor() as pool, caplog.at_level(logging.INFO):
        model._around = SimpleNamespace(settings=Settings(repository=tmp_path), pool=pool)
        model._load(wire.Welcome(1, "1", "tiny", 1, vocab_size=4096, max_model_len=8))
    with pytest.raises(ContractError) as caught:
        model.ready_text()
    assert caught.value.message.startswith(f"{path}: top_p is 0")
