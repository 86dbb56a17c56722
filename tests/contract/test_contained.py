"""What would end a process is an error of the one work that raised it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from fixtures.stages.zoo import byte_level_bpe, save
from slipstream.bridge.bridge import Bridge
from slipstream.core import processors
from slipstream.core.processors import Processed, load_processors, start_processors
from slipstream.core.rules import RuleError
from slipstream.errors import ConfigError
from slipstream.guide.interface import GuideError
from slipstream.guide.workers import Fill, Workers
from slipstream_contract.contained import ContainedError, ProcessEnd, contained
from slipstream_contract.decoder import UnsupportedTokenizerError
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.guide import Guide, GuideKind
from slipstream_contract.ids import pack
from slipstream_gateway.model_text import ModelText
from slipstream_preprocessing import tokenizer


class Panic(BaseException):
    """An error like that of a panic in Rust."""


ENDS = [SystemExit(3), KeyboardInterrupt(), Panic("index out of bounds")]


def ending(error: BaseException):
    """Return a function that raises an error, whatever it is given."""

    def work(*_: object, **__: object) -> None:
        raise error

    return work


@pytest.fixture(params=ENDS, ids=[type(each).__name__ for each in ENDS])
def end(request: pytest.FixtureRequest) -> BaseException:
    return request.param


def test_what_ends_more_than_work_is_contained_and_other_errors_are_themselves(end: BaseException):
    with pytest.raises(ContainedError, match=type(end).__name__), contained():
        raise end
    for other in (ValueError("v"), ContractError("c"), ProcessEnd(0)):
        with pytest.raises(type(other)) as caught, contained():
            raise other
        assert caught.value is other


@pytest.mark.parametrize("num_bytes", [1, 1 << 20], ids=["here", "in a thread"])
def test_work_of_a_gateway(end: BaseException, num_bytes: int):
    async def ask() -> str:
        with pytest.raises(ContainedError):
            await text.run(num_bytes, ending(end))
        return await text.run(num_bytes, lambda: "good")

    text = ModelText.__new__(ModelText)
    with ThreadPoolExecutor(1) as text._pool:
        assert asyncio.run(ask()) == "good"


def test_a_request_of_the_bridge_gets_its_answer(end: BaseException):
    failed: list[ContractError] = []
    calls = SimpleNamespace(tally=lambda _: SimpleNamespace(count_refusal=lambda _: None))
    Bridge.answer(SimpleNamespace(calls=calls), SimpleNamespace(fail=failed.append), ending(end))
    assert [each.code for each in failed] == [Code.INTERNAL]


def test_logits_processors(end: BaseException, monkeypatch: pytest.MonkeyPatch):
    rude = SimpleNamespace(name="rude", validate=ending(end))
    with pytest.raises(ContractError, match=r"logits_processors\.rude refuses its arguments"):
        start_processors({"rude": rude}, [("rude", "{}")])
    rule = Processed("rude", SimpleNamespace(edits=ending(end)), pack([1]), 9)
    with pytest.raises(RuleError, match=r"logits_processors\.rude failed"):
        rule.addends([], [])
    monkeypatch.setattr(processors, "Rude", ending(end), raising=False)
    with pytest.raises(ConfigError, match="Rude cannot be loaded"):
        load_processors(f"{processors.__name__}:Rude")


def test_threads_of_guides_go_on(end: BaseException):
    guide, come = Guide(GuideKind.REGEX, "g"), threading.Event()
    compiler = SimpleNamespace(compile=ending(end), fill_all=ending(end), num_mask_bytes=4)
    workers = Workers(lambda: compiler)
    reported: list[object] = []
    for _ in range(8):  # more than there are threads
        workers.templates.get = lambda _: None
        workers.compile(guide, lambda made: (reported.append(made), come.set()))
        while not come.is_set():
            workers.wait(1.0)
            workers.poll()
        come.clear()
    assert [type(each) for each in reported] == [GuideError] * 8
    for is_fast in (True, False):
        pace = SimpleNamespace(is_fast=is_fast, note=lambda _: None)
        errors: list[Exception] = []
        for _ in range(8):
            workers.fill(Fill(None, pace, lambda _: None, errors.append))
            workers.flush()
        while len(errors) < 8:
            workers.wait(1.0)
            workers.poll()
        assert {type(each) for each in errors} == {ContainedError}


def test_a_tokenizer_that_cannot_be_read(tmp_path, end: BaseException, monkeypatch):
    save(byte_level_bpe(), tmp_path)
    monkeypatch.setattr(tokenizer, "Tokenizer", SimpleNamespace(from_buffer=ending(end)))
    with pytest.raises(UnsupportedTokenizerError, match=r"tokenizer\.json: "):
        tokenizer.load_tokenizer(tmp_path)
