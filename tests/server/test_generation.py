"""Every model of the repository, over every protocol, against each other."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from fixtures.server.support import PROMPT, TEXT_MODELS, RequestError, text
from tritonclient.utils import InferenceServerException

pytestmark = [pytest.mark.triton, pytest.mark.beside]

PROMPTS = [
    f"def {name}(self, {argument}):\n    "
    for name in ("read", "close", "__init__", "find")
    for argument in ("path", "other", "value, key", "*args", "n=0")
]


@pytest.fixture(scope="session")
def encode(client):
    """Token ids by the served preprocessing step."""

    def encode(prompt: str) -> list[int]:
        inputs = client.tensors("preprocessing", {"QUERY": prompt, "REQUEST_OUTPUT_LEN": 1})
        with grpcclient.InferenceServerClient(client.address) as grpc:
            result = grpc.infer("preprocessing", inputs)
        return result.as_numpy("INPUT_ID").ravel().tolist()

    return encode


@pytest.fixture(scope="session")
def expected(client):
    """What greedy decoding adds to a prompt, one request at a time."""
    known: dict[tuple[str, int], str] = {}

    def expected(prompt: str, max_tokens: int) -> str:
        if (prompt, max_tokens) not in known:
            inputs = {"text_input": prompt, "max_tokens": max_tokens, "stream": True}
            known[prompt, max_tokens] = text(client.stream("tensorrt_llm_bls", **inputs))
        return known[prompt, max_tokens]

    return expected


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_same_text_over_every_protocol(idle, expected, model):
    body = {"text_input": PROMPT, "max_tokens": 24}
    want = expected(PROMPT, 24)
    assert want
    assert text(idle.stream(model, **body, stream=True)) == want
    assert text(idle.stream(model, **body, exclude_input_in_output=True)) == want
    assert idle.generate(model, **body, exclude_input_in_output=True)["text_output"] == want
    events = idle.events(model, **body, stream=True)
    assert "".join(event["text_output"] for event in events) == want


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_prompt_is_echoed_only_without_streaming_and_unless_excluded(idle, expected, model):
    body = {"text_input": PROMPT, "max_tokens": 8}
    want = expected(PROMPT, 8)
    assert idle.generate(model, **body)["text_output"] == PROMPT + want
    assert idle.generate(model, **body, exclude_input_in_output=True)["text_output"] == want
    for exclude in (True, False):
        events = idle.events(model, **body, stream=True, exclude_input_in_output=exclude)
        assert "".join(event["text_output"] for event in events) == want


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_has_one_dimension_as_old_clients_index_it(idle, model):
    for response in idle.stream(model, text_input=PROMPT, max_tokens=3, stream=True):
        assert response["text_output"].shape == (1,)


def test_token_ids_in_and_out(idle, encode, expected):
    ids = encode(PROMPT)
    body = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 12}
    answer = idle.generate("tensorrt_llm", **body)
    assert answer["output_ids"][: len(ids)] == ids
    assert answer["sequence_length"] == len(ids) + 12
    events = idle.events("tensorrt_llm", **body, streaming=True)
    new = [event["output_ids"] for event in events]
    flat = [i for each in new for i in (each if isinstance(each, list) else [each])]
    assert flat == answer["output_ids"][len(ids) :]
    inputs = {
        "input_ids": ids,
        "input_lengths": np.array([len(ids)], np.int32),
        "request_output_len": np.array([12], np.int32),
        "streaming": np.array([True]),
    }
    inputs = {
        name: value.reshape(1, 1) if isinstance(value, np.ndarray) else value
        for name, value in inputs.items()
    }
    responses = idle.stream("tensorrt_llm", **inputs)
    assert [i for r in responses for i in r["output_ids"].ravel().tolist()] == flat


def test_vllm_has_its_own_rules(idle, expected):
    want = expected(PROMPT, 10)
    body = {"text_input": PROMPT, "parameters": {"temperature": 0, "max_tokens": 10}}
    assert idle.generate("vllm_model", **body)["text_output"] == PROMPT + want
    body["exclude_input_in_output"] = True
    assert idle.generate("vllm_model", **body)["text_output"] == want
    events = idle.events("vllm_model", **body, stream=True)
    assert "".join(event["text_output"] for event in events) == want
    sampling = json.dumps({"seed": 5, "max_tokens": "10", "n": 2, "logprobs": 0})
    asked = [
        "finish_reason",
        "cumulative_logprob",
        "logprobs",
        "num_input_tokens",
        "num_output_tokens",
    ]
    (answer,) = idle.stream(
        "vllm_model",
        text_input=PROMPT,
        sampling_parameters=sampling,
        exclude_input_in_output=True,
        **{f"return_{name}": True for name in asked},
    )
    texts, counts = answer["text_output"].tolist(), answer["num_output_tokens"].tolist()
    assert len(set(texts)) == 2
    assert set(answer["finish_reason"].tolist()) <= {b"length", b"stop"}
    log_probs = [json.loads(each) for each in answer["logprobs"]]
    assert [len(each) for each in log_probs] == counts
    sums = [sum(next(iter(token.values()))["logprob"] for token in each) for each in log_probs]
    assert answer["cumulative_logprob"].tolist() == pytest.approx(sums, abs=1e-3)
    with pytest.raises(RequestError, match="INVALID_ARGUMENT"):
        idle.events("vllm_model", text_input="a", stream=True, exclude_input_in_output=False)


@pytest.mark.parametrize("model", [*TEXT_MODELS, "tensorrt_llm", "vllm_model"])
def test_unary_inference_is_refused_by_a_decoupled_model(idle, model):
    inputs = {"text_input": "a", "max_tokens": 1}
    if model == "tensorrt_llm":
        inputs = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1}
        inputs = {n: np.array(v, np.int32) for n, v in inputs.items()}
        inputs = {n: v.reshape(1, -1) for n, v in inputs.items()}
    if model == "vllm_model":
        del inputs["max_tokens"]
    with (
        grpcclient.InferenceServerClient(idle.address) as grpc,
        pytest.raises(InferenceServerException, match="decoupled"),
    ):
        grpc.infer(model, idle.tensors(model, inputs))
    status, answer = idle.post(f"{model}/infer", {"inputs": []})
    assert status >= 400
    assert "error" in json.loads(answer)


@pytest.mark.rest
def test_64_streams_at_once_have_the_texts_of_one_at_a_time(idle, expected):
    asked = [(PROMPTS[i % len(PROMPTS)], 16 + i % 9, TEXT_MODELS[i % 2]) for i in range(64)]
    want = [expected(prompt, max_tokens) for prompt, max_tokens, _ in asked]

    def one(ask: tuple[str, int, str]) -> str:
        prompt, max_tokens, model = ask
        inputs = {"text_input": prompt, "max_tokens": max_tokens, "stream": True}
        return text(idle.iterate(model, **inputs))

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(one, asked)) == want


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_batch_is_answered_stream_by_stream(idle, expected, model):
    prompts = PROMPTS[:5]
    inputs = {
        "text_input": np.array([[p.encode()] for p in prompts], dtype=object),
        "max_tokens": np.array([[8 + i] for i in range(5)], np.int32),
        "stream": np.ones((5, 1), np.bool_),
    }
    texts = [b""] * 5
    for response in idle.iterate(model, **inputs):
        (index,) = response["batch_index"].ravel().tolist()
        assert "sequence_index" not in response
        texts[index] += response["text_output"].ravel()[0]
    assert [t.decode() for t in texts] == [expected(p, 8 + i) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_several_sequences_of_one_prompt(idle, expected, model):
    inputs = {"text_input": PROMPT, "max_tokens": 10, "num_return_sequences": 3}
    responses = idle.stream(model, **inputs, exclude_input_in_output=True)
    assert sorted(r["sequence_index"].item() for r in responses) == [0, 1, 2]
    assert {r["text_output"].ravel()[0].decode() for r in responses} == {expected(PROMPT, 10)}
    assert all("batch_index" not in r for r in responses)
    sampled = {"temperature": 1.5, "top_k": 200, "seed": 7, "stream": True}
    texts = dict.fromkeys(range(3), b"")
    for response in idle.stream(model, **inputs, **sampled):
        texts[response["sequence_index"].item()] += response["text_output"].ravel()[0]
    assert len(set(texts.values())) == 3


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_word_ends_the_text_and_stays_in_it(idle, expected, model, streaming):
    whole = expected(PROMPT, 40)
    word = whole[12:15]  # wherever the borders of the tokens are
    inputs = {"text_input": PROMPT, "max_tokens": 40, "stop_words": ["@@@@", word]}
    got = text(idle.stream(model, **inputs, stream=streaming, exclude_input_in_output=True))
    assert got == whole[: whole.index(word) + 3]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_optional_outputs_come_only_if_asked_for(idle, encode, model):
    inputs = {"text_input": PROMPT, "max_tokens": 6, "stream": True}
    assert {name for r in idle.stream(model, **inputs) for name in r} == {"text_output"}
    asked = ["log_probs", "perf_metrics", "num_input_tokens", "num_output_tokens"]
    flags = {f"return_{name}": True for name in asked}
    if model == "tensorrt_llm_bls":  # declared without a dimension
        flags = {name: np.array([[True]]) for name in flags}
    responses = idle.stream(model, **inputs, **flags)
    last = responses[-1]
    log_probs = [x for r in responses for x in r["output_log_probs"].ravel().tolist()]
    assert len(log_probs) == 6
    assert last["cum_log_probs"].item() == pytest.approx(sum(log_probs), abs=1e-4)
    assert sum(r["num_output_tokens"].item() for r in responses) == 6
    assert {r["num_input_tokens"].item() for r in responses} == {len(encode(PROMPT))}
    times = ["arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns"]
    values = [last[name].item() for name in [*times, "last_token_time_ns"]]
    assert values == sorted(values)
    assert last["kv_cache_alloc_total_blocks"].item() > 0
    assert last["acceptance_rate"].item() == 0


def test_only_requested_outputs_are_sent(idle):
    inputs = idle.tensors("tensorrt_llm_bls", {"text_input": PROMPT, "max_tokens": 2})
    with grpcclient.InferenceServerClient(idle.address) as grpc:
        answers: list[object] = []
        grpc.start_stream(lambda result, error: answers.append((result, error)))
        outputs = [grpcclient.InferRequestedOutput("cum_log_probs")]
        grpc.async_stream_infer("tensorrt_llm_bls", inputs, outputs=outputs)
        grpc.stop_stream()
    ((result, error),) = answers
    assert error is None
    assert [output.name for output in result.get_response().outputs] in ([], ["cum_log_probs"])


def test_an_ending_inside_a_character_and_special_texts(idle):
    for prompt in ("é", "日本語", "🙂🙂", "a\u0301", " \n\t ", "\x00a"):
        for model in TEXT_MODELS:
            inputs = {"text_input": prompt, "max_tokens": 12}
            whole = idle.generate(model, **inputs)["text_output"]
            assert whole.startswith(prompt)
            assert prompt + text(idle.stream(model, **inputs, stream=True)) == whole


def test_curl_reads_the_stream(idle, expected):
    body = json.dumps({"text_input": PROMPT, "max_tokens": 5, "stream": True})
    url = f"{idle.http}/v2/models/ensemble/generate_stream"
    done = subprocess.run(["curl", "-sN", url, "-d", body], capture_output=True, check=True)
    events = [json.loads(line[6:]) for line in done.stdout.decode().splitlines() if line]
    assert "".join(event["text_output"] for event in events) == expected(PROMPT, 5)
