"""A checkpoint without a tokenizer: one line in the log, and refusals that say why."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from slipstream import wire
from slipstream_contract.errors import Code, ContractError
from slipstream_gateway.models import Model

WELCOME = wire.Welcome(1, "1", "tiny", 1, vocab_size=8, max_model_len=8)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "tokenizer.json does not exist"), ("{", "tokenizer.json: ")],
    ids=["none", "not JSON"],
)
def test_it_is_said_in_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    model = Model.__new__(Model)
    model.text, model._fault, model._unreadable = None, "", ""
    model.config = SimpleNamespace(checkpoint=str(tmp_path))
    with ThreadPoolExecutor() as pool, caplog.at_level(logging.INFO):
        model._around = SimpleNamespace(settings=None, pool=pool)
        model._load(WELCOME)
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.ERROR, None)
    assert said in record.getMessage()
    with pytest.raises(ContractError, match=said) as caught:
        model.ready_text()
    assert caught.value.code == Code.UNSUPPORTED
