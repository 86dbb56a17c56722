"""What clients get wrong: they are told field, value and limit, and the server serves on."""

import json
import shutil

import numpy as np
import pytest
from server.support import (
    CHECKPOINT,
    KV_CACHE_TOKENS,
    PROMPT,
    TEXT_MODELS,
    RequestError,
    compose,
)
from slipstream_compose.triton import Endpoints, ServeError, TritonServer

pytestmark = pytest.mark.triton

I32 = np.int32
TOKENS = {
    "input_ids": np.array([[5, 6, 7]], I32),
    "input_lengths": np.array([[3]], I32),
    "request_output_len": np.array([[4]], I32),
}
BAD_TEXT = {
    "empty prompt": ({"text_input": ""}, "text_input"),
    "no tokens wanted": ({"max_tokens": 0}, "max_tokens.*0"),
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens.*-1"),
    "negative temperature": ({"temperature": -0.5}, "temperature.*-0.5"),
    "NaN temperature": ({"temperature": np.array([[np.nan]], np.float32)}, "temperature.*nan"),
    "infinite temperature": ({"temperature": np.array([[np.inf]], np.float32)}, "temperature.*inf"),
    "negative top_p": ({"top_p": -0.1}, "top_p.*-0.1"),
    "top_p above 1": ({"top_p": 1.1}, "top_p.*1.1"),
    "negative top_k": ({"top_k": -1}, "top_k.*-1"),
    "5,000 stop words": ({"stop_words": [f"w{i}" for i in range(5000)]}, "stop_words.*5000"),
    "invalid UTF-8": ({"text_input": b"a\xff"}, "text_input.*UTF-8"),
    "invalid UTF-8 in a stop word": ({"stop_words": [b"\xff"]}, "stop_words.*UTF-8"),
    "beam search": ({"beam_width": 2}, "beam_width.*not supported yet"),
    "guided decoding": ({"guided_decoding_guide_type": "json"}, "guided.*not supported yet"),
    "LoRA": ({"lora_task_id": np.array([[1]], np.uint64)}, "lora_task_id.*not supported yet"),
    "context beyond the model": ({"text_input": "x = 1\n" * 2000}, "token"),
    "context beyond the cache": ({"text_input": "x = 1\n" * 450}, f"{KV_CACHE_TOKENS}"),
}
BAD_TOKENS = {
    "negative id": ({"input_ids": np.array([[5, -1, 7]], I32)}, "input_ids.*-1"),
    "id beyond the vocabulary": ({"input_ids": np.array([[5, 10**6, 7]], I32)}, "1000000"),
    "length beyond the ids": ({"input_lengths": np.array([[9]], I32)}, "input_lengths.*9"),
    "length 0": ({"input_lengths": np.array([[0]], I32)}, "prompt|input_lengths"),
    "no ids": ({"input_ids": None}, "input_ids"),
    "misshapen stop words": ({"stop_words_list": np.ones((1, 3, 2), I32)}, "stop_words_list|shape"),
    "stop words that end nowhere": (
        {"stop_words_list": np.array([[[1, 2], [9, -1]]], I32)},
        "stop_words_list.*9",
    ),
    "generation only": ({"_parameters": {"request_type": "generation_only"}}, "request_type"),
}


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("case", BAD_TEXT)
def test_text_models_say_what_is_wrong(idle, model, case):
    change, message = BAD_TEXT[case]
    with pytest.raises(RequestError, match=f"(?s)INVALID_ARGUMENT: .*(?:{message})") as error:
        idle.stream(model, **{"text_input": PROMPT, "max_tokens": 4} | change)
    assert "Traceback" not in str(error.value)
    assert len(str(error.value)) < 600
    answer = idle.generate(model, text_input=PROMPT, max_tokens=1)
    assert answer["text_output"].startswith(PROMPT)


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_the_token_model_says_what_is_wrong(idle, case):
    change, message = BAD_TOKENS[case]
    change = dict(change)
    parameters = change.pop("_parameters", None)
    inputs = {name: value for name, value in (TOKENS | change).items() if value is not None}
    body = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 4}
    ask = idle.events if parameters else idle.stream
    asked = body | {"parameters": parameters} if parameters else inputs
    with pytest.raises(RequestError, match=f"(?s)(?:{message})") as error:
        ask("tensorrt_llm", **asked)
    assert "Traceback" not in str(error.value)
    assert idle.stream("tensorrt_llm", **TOKENS)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_what_triton_itself_refuses(idle, model):
    good = {"text_input": PROMPT, "max_tokens": 4}
    wrong = {
        "dtype": good | {"max_tokens": np.array([[4.0]], np.float32)},
        "rank": good | {"max_tokens": np.array([[[4]]], I32)},
        "missing": {"text_input": PROMPT},
        "unknown": good | {"max_tokenz": 4},
        "batch": good | {"max_tokens": np.array([[4], [4]], I32)},
    }
    for inputs in wrong.values():
        with pytest.raises(RequestError, match=r"INVALID_ARGUMENT|input|shape|inference"):
            idle.stream(model, **inputs)
    for body in (b"{", b"[]", b"5", b'{"text_input": "a", "max_tokens": 2147483648}', b"\xff"):
        status, answer = idle.post(f"{model}/generate", body)
        assert status >= 400 or "error" in json.loads(answer)
    assert idle.generate(model, **good)["text_output"].startswith(PROMPT)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_longest_output_there_can_be_is_no_error(idle, model):
    inputs = {"text_input": PROMPT, "max_tokens": 2**31 - 1, "stop_words": ["\n"], "stream": True}
    assert idle.stream(model, **inputs)


@pytest.mark.parametrize("name", ["temprature", "max_new_tokens"])
def test_a_misspelt_parameter_does_not_pass_in_silence(idle, name):
    with pytest.raises(RequestError, match=name):
        idle.events("tensorrt_llm_bls", text_input=PROMPT, max_tokens=2, **{name: 1})


def damage(checkpoint, kind: str) -> None:
    if kind == "empty":
        for path in checkpoint.iterdir():
            path.unlink()
    elif kind == "truncated":
        weights = checkpoint / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif kind == "architecture":
        config = json.loads((checkpoint / "config.json").read_text())
        config["architectures"] = ["SomethingElse"]
        (checkpoint / "config.json").write_text(json.dumps(config))
    elif kind == "bin":
        (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")


@pytest.mark.parametrize("kind", ["empty", "truncated", "architecture", "bin"])
def test_a_bad_checkpoint_ends_the_server_with_one_line(repository, tmp_path, kind):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, checkpoint)
    models = compose(checkpoint, tmp_path / "models")
    damage(checkpoint, kind)
    server = TritonServer(models, Endpoints.free(), tmp_path / "log")
    try:
        server.start()
        with pytest.raises(ServeError, match="checkpoint") as error:
            server.wait_ready(60)
        assert "\n" not in str(error.value)
        assert "Traceback" not in str(error.value)
    finally:
        server.stop()
    assert list(server.processes()) == []


def test_stop_is_not_for_the_ensemble(idle):
    body = {"text_input": PROMPT, "max_tokens": 2, "stop": True}
    status, text = idle.post("ensemble/generate", body)
    assert status != 200 or "error" in text
    assert "stop is no input of the ensemble" in text
