"""The default model and the scripts that made it: what the card claims can be found out again."""

import importlib
import json
import math
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slipstream_serve.server import repository_root

TRAINING = repository_root() / "training"
CHECKPOINT = repository_root() / "model_repository/tensorrt_llm/1/checkpoint"
LIBRARY = Path(sysconfig.get_path("stdlib"))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    """The scripts as modules; they import each other by their plain names, as they are run."""
    monkeypatch.syspath_prepend(str(TRAINING))
    names = [path.stem for path in TRAINING.glob("*.py")]
    before = {name: sys.modules.pop(name, None) for name in names}
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)
        if before[name] is not None:
            sys.modules[name] = before[name]


@pytest.fixture
def tiny(scripts):
    """A model with random weights and a context of 8."""
    torch.manual_seed(0)
    shape = scripts.model.Shape(
        vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8,
        intermediate_size=16, context=8,
    )  # fmt: skip
    model = scripts.model.Llama(shape).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def test_every_token_is_scored_once(scripts, tiny):
    torch.nn.init.zeros_(tiny.model.norm.weight)  # every token is as likely as any other
    for length in (2, 7, 8, 9, 10, 12, 13, 41):
        streams = [[1] * length, [2] * 3]
        found = scripts.evaluate.nats(tiny, streams, torch.device("cpu"), batch=3)
        assert found == pytest.approx((length - 1 + 2) * math.log(300), rel=1e-5)


def test_a_token_beyond_the_first_window_sees_half_a_context(scripts, tiny):
    stream = torch.randint(300, (21,)).tolist()
    expected = 0.0
    for target in range(1, 21):
        # Windows end at 9, 13, 17, 21 and hold 9 tokens: the last is only ever predicted.
        end = next(end for end in (9, 13, 17, 21) if target < end)
        window = torch.tensor([stream[end - 9 : end]])
        log_probs = tiny(window[:, :-1]).log_softmax(-1)[0].detach()
        expected -= float(log_probs[target - (end - 9) - 1, stream[target]])
    found = scripts.evaluate.nats(tiny, [stream], torch.device("cpu"), batch=2)
    assert found == pytest.approx(expected, rel=1e-4)


def test_an_epoch_shows_no_token_twice_and_the_next_is_cut_elsewhere(scripts):
    batches = scripts.train.windows(torch.arange(1000), count=3, length=10, seed=1)
    epochs = [torch.cat([next(batches) for _ in range(33)]) for _ in range(2)]
    for epoch in epochs:
        assert epoch.shape == (99, 10)
        assert epoch.unique().numel() == epoch.numel()
    assert int(epochs[0][0, 0]) % 10 != int(epochs[1][0, 0]) % 10


def test_a_module_that_is_kept_aside_takes_its_tests_with_it(scripts):
    split_of = scripts.data.split_of
    assert split_of("heapq.py") == "heldout"
    assert split_of("test/test_heapq.py") == "heldout-tests"
    assert split_of("test/test_calendar_extra.py") == "heldout-tests"
    assert split_of("idlelib/idle_test/test_calltip.py") == "heldout-tests"
    assert split_of("ftplib.py") == "validation"
    assert split_of("json/decoder.py") == "train"
    assert split_of("test/test_json/test_decode.py") == "train"


def test_the_library_still_has_the_modules_that_are_kept_aside(scripts):
    missing = [module for module in scripts.data.HELDOUT if not (LIBRARY / module).is_file()]
    assert [module for module in missing if not module.startswith(("tkinter", "idlelib"))] == []


def test_the_checkpoint_is_small_enough_to_be_committed():
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 12_000_000
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["max_position_embeddings"] >= 2048
    assert config["vocab_size"] <= 8192
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"] is True


def test_the_card_is_made_from_the_figures(scripts):
    table = json.loads((TRAINING / "figures.json").read_text())
    best = min(table, key=lambda name: table[name]["bits_per_byte_validation"])
    assert (CHECKPOINT / "README.md").read_text() == scripts.card.card(table[best], best)


@pytest.mark.rest
def test_held_out_modules_need_fewer_bits_than_promised(scripts):
    model = scripts.model.load(CHECKPOINT, torch.device("cpu"))
    tokenizer = scripts.evaluate.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    texts = [(LIBRARY / module).read_text() for module in ("heapq.py", "netrc.py", "sched.py")]
    bits = scripts.evaluate.bits_per_byte(model, tokenizer, texts, batch=1)
    assert 0.3 < bits < 1.2, "below 1.5 is promised; near 0 would mean that the model has seen them"


def test_the_tokenizer_gives_back_every_text(scripts):
    tokenizer = scripts.evaluate.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    for text in ("def f(x):\n    return x\n", "\t\u4f60\u597d \U0001f469\u200d\U0001f680 \x00\r\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
