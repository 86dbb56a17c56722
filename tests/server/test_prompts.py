"""Prompts that hold their special tokens already, to every model that takes text, by every way in.

The tokenizer of this server puts a token in front of each prompt; a rendered chat template has it.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from fixtures.server.support import (
    CHECKPOINT,
    PROMPT,
    TEXT_MODELS,
    Client,
    RequestError,
    compose,
    serving,
)
from slipstream_client import SlipstreamClient
from slipstream_preprocessing.encode import Encoder
from slipstream_serve.server import server_directory
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from tritonclient.utils import InferenceServerException

pytestmark = [pytest.mark.triton, pytest.mark.rest, pytest.mark.beside]

BEGINNING = "<|endoftext|>"
NAME = "add_special_tokens"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("begins") / "checkpoint"
    shutil.copytree(CHECKPOINT, directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BEGINNING} $A", special_tokens=[(BEGINNING, tokenizer.token_to_id(BEGINNING))]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def begins(checkpoint, tmp_path_factory) -> Iterator[Client]:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    base = tmp_path_factory.mktemp("repository")
    options = ["--kv-cache-tokens", "256", "--dtype", "float32"]
    repository = compose(checkpoint, base / "models", *options)
    with serving(repository, base / "server.log") as client:
        yield client


def counts(client: Client, model: str, **said: object) -> set[int]:
    """Input tokens of a request over HTTP and over gRPC; what is said goes in as an input."""
    body = {"text_input": PROMPT, "return_num_input_tokens": True, "stream": True} | said
    if model == "vllm_model":
        body["sampling_parameters"] = json.dumps({"max_tokens": 1})
    else:
        body["max_tokens"] = 1
    answer = client.generate(model, **body | {"stream": False})
    return {
        answer["num_input_tokens"],
        *(int(event["num_input_tokens"]) for event in client.events(model, **body)),
        *(int(each["num_input_tokens"].item()) for each in client.stream(model, **body)),
    }


@pytest.mark.parametrize("model", [*TEXT_MODELS, "vllm_model"])
def test_a_request_says_whether_special_tokens_are_added(begins, checkpoint, model):
    plain = len(Encoder.load(checkpoint, add_special_tokens=False).encode(PROMPT))
    assert counts(begins, model) == {plain + 1}
    assert counts(begins, model, add_special_tokens=True) == {plain + 1}
    assert counts(begins, model, add_special_tokens=False) == {plain}
    rendered = BEGINNING + PROMPT
    assert counts(begins, model, text_input=rendered, add_special_tokens=False) == {plain + 1}
    with SlipstreamClient(begins.address, model=model, timeout_s=120.0) as client:
        done = client.complete(PROMPT, max_tokens=1, add_special_tokens=False)
    assert done.num_input_tokens == plain


@pytest.mark.parametrize("model", [*TEXT_MODELS, "vllm_model"])
def test_a_grpc_parameter_says_the_same(begins, checkpoint, model):
    plain = len(Encoder.load(checkpoint, add_special_tokens=False).encode(PROMPT))
    inputs = {"text_input": PROMPT, "return_num_input_tokens": True, "stream": True}
    if model != "vllm_model":
        inputs["max_tokens"] = 1
    for value, number in ((False, plain), ("true", plain + 1)):
        responses = list(begins.iterate(model, parameters={NAME: value}, **inputs))
        assert responses[0]["num_input_tokens"].item() == number
    with pytest.raises(RequestError, match=f"INVALID_ARGUMENT: {NAME} is 'maybe'"):
        list(begins.iterate(model, parameters={NAME: "maybe"}, **inputs))
    with pytest.raises(RequestError, match=f"INVALID_ARGUMENT: .*{NAME}.* one is enough"):
        list(begins.iterate(model, parameters={NAME: False}, **inputs, add_special_tokens=False))


def test_preprocessing_alone(begins, checkpoint):
    expected = Encoder.load(checkpoint, add_special_tokens=False).encode(PROMPT)
    asked = {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": 1}
    tensors = begins.tensors("preprocessing", asked | {"ADD_SPECIAL_TOKENS": False})
    with grpcclient.InferenceServerClient(begins.address) as grpc:
        result = grpc.infer("preprocessing", tensors)
        assert result.as_numpy("INPUT_ID").tolist() == [expected]
        plain = begins.tensors("preprocessing", asked)
        result = grpc.infer("preprocessing", plain, parameters={NAME: False})
        assert result.as_numpy("INPUT_ID").tolist() == [expected]
        for model, inputs in (("preprocessing", plain), ("slipstream_health", [])):
            with pytest.raises(InferenceServerException, match="unknown request parameter 'min_p'"):
                grpc.infer(model, inputs, parameters={"min_p": 0.5})
    body = {
        "inputs": [
            {"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": [PROMPT]},
            {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "data": [1]},
            {"name": "ADD_SPECIAL_TOKENS", "datatype": "BOOL", "shape": [1, 1], "data": [False]},
        ]
    }
    status, answer = begins.post("preprocessing/infer", body)
    assert status == 200
    outputs = {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
    assert outputs["INPUT_ID"] == expected
    assert np.ravel(outputs["REQUEST_INPUT_LEN"]).tolist() == [len(expected)]
