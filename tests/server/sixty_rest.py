"""Bad inputs 34 to 60: sampling, words, requests as a whole. See sixty.py."""

import numpy as np
from server.sixty import (
    F32,
    I32,
    IDS,
    MODELS,
    SERVER,
    SIXTY,
    TEXTS,
    Grpc,
    Http,
    Item,
    Raw,
    over_http,
    text,
    vllm,
)

ALONE = dict.fromkeys(("TOKENS_BATCH", "SEQUENCE_LENGTH"))  # left out
NAN, INF = float("nan"), float("inf")
FINITE = "not a finite number from"
NOT_YET = "not supported yet"
FAULTS = "tests/server/test_bad_starts.py"


def f32(*values: float) -> np.ndarray:
    return np.array([values], F32)


def refused(value: object, **extra: object) -> tuple[Http, ...]:
    """A sampling parameter of vllm_model, and what the refusal says."""
    ((name, message),) = extra.items()
    return (Http("{v}", vllm(**{name: value}), 400, f"INVALID_ARGUMENT: {message}"),)


REST: dict[int, Item] = {
    34: Item(
        "temperature -1, above the limit, NaN, infinite, text",
        (
            *over_http(
                "temperature",
                {
                    "-1": f"temperature is -1, {FINITE} 0",
                    "2e6": f"temperature is 2000000, {FINITE} 0",
                    "NaN": f"temperature is nan, {FINITE}",
                    "Infinity": "temperature is inf",
                    '"hot"': SERVER,
                },
            ),
            *over_http(
                "temperature",
                {"-1": "temperature is -1", "NaN": "temperature is nan", '"hot"': "is 'hot'"},
                "{v}",
            ),
            *(
                Grpc(m, {"temperature": f32(value)}, f"temperature is {value:g}")
                for m in ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
                for value in (-1.0, NAN, INF, -INF)
            ),
        ),
    ),
    35: Item("temperature 1e-300", why="it is greedy: the answer is the canary's"),
    36: Item(
        "top_p, top_k and min_p out of range",
        (
            *over_http("top_p", {"-0.1": "top_p.* is -0.1", "1.1": "top_p.* is 1.1"}),
            *over_http("top_p", {"0": "top_p is 0, not", "1.1": "top_p is 1.1"}, "{v}"),
            *over_http("top_k", {"-2": "top_k.* is -2"}),
            *over_http("top_k", {"-2": "is -2", "1099511627776": "is 1099511627776"}, "{v}"),
            *over_http("min_p", {"2": f"min_p is 2, {FINITE} 0 to 1"}),
            *over_http("min_p", {"2": f"min_p is 2, {FINITE} 0 to 1"}, "{v}"),
            *(Grpc(m, {"top_p": f32(NAN)}, "top_p.* is nan") for m in TEXTS),
        ),
    ),
    37: Item(
        "penalties out of range",
        (
            *over_http("presence_penalty", {"1001": f"is 1001, {FINITE} -1000 to 1000"}),
            *over_http("frequency_penalty", {"-1001": "frequency_penalty is -1001"}),
            *over_http("repetition_penalty", {"0": "repetition_penalty is 0", "NaN": "is nan"}),
            *over_http("presence_penalty", {"2.1": f"is 2.1, {FINITE} -2 to 2"}, "{v}"),
            *over_http("repetition_penalty", {"0": "repetition_penalty is 0"}, "{v}"),
        ),
    ),
    38: Item(
        "n 0, -1, 10^6; n with temperature 0",
        (
            *over_http(
                "num_return_sequences",
                {"0": "is 0, .* 1 to 256", "-1": "is -1", "1000000": "is 1000000, .* 1 to 256"},
            ),
            *over_http("n", {"0": "n is 0", "1000000": "n is 1000000, .* 1 to 256"}, "{v}"),
            Http("{v}", vllm(n=2, temperature=0), 400, "n is 2, but greedy"),
        ),
    ),
    39: Item(
        "best_of",
        (
            *refused(5, best_of=f"best_of is {NOT_YET}"),
            Http("{t}", text(best_of=5), 400, "best_of"),
        ),
    ),
    40: Item(
        "logprobs 10^6, top_logprobs",
        (
            *refused(10**6, logprobs="logprobs is 1000000, at most 0"),
            *refused(-1, logprobs="logprobs is -1"),
            *refused(5, top_logprobs="unknown request parameter 'top_logprobs'"),
        ),
    ),
    41: Item(
        "log probs of a prompt, echo",
        (
            *refused(1, prompt_logprobs=f"prompt_logprobs is {NOT_YET}"),
            Grpc("ensemble", {"return_context_logits": np.array([[True]])}, NOT_YET),
            Grpc("tensorrt_llm", {"return_generation_logits": np.array([[True]])}, NOT_YET),
        ),
    ),
    42: Item(
        "stop words: empty, 5,000, 1 MB, no text",
        (
            Http("{t}", text(stop_words=["w"] * 5000), 400, "stop_words has 5000 words, .* 1024"),
            Http("{t}", text(stop_words="x" * 10**6), 400, "a word of 1000000 bytes, .* 4096"),
            Http("{t}", text(stop_words=[5]), 500),
            Http("{t}", text(stop_words=["x" * 4096] * 5), 400, "20480 bytes, at most 16384"),
            Http("{t}", text(bad_words=["x" * 4096] * 17), 400, "69632 bytes, at most 65536"),
            *refused("", stop=r"stop\[0\] is empty"),
            *refused(["w"] * 5000, stop="stop has 5000 words, at most 1024"),
            *refused("x" * 10**6, stop="stop has a word of 1000000 bytes, at most 4096 .*x{50,64}"),
            *refused([5], stop=r"stop\[0\] is 5, not a text"),
        ),
    ),
    43: Item(
        "stop and bad token ids out of the vocabulary",
        (
            *refused([4096], stop_token_ids="stop_token_ids: token id 4096 .* 0 .. 4095"),
            *refused([-1], stop_token_ids=r"stop_token_ids\[0\] is -1"),
            *refused([2**70], stop_token_ids=r"stop_token_ids\[0\] is \d+, not"),
            Grpc(
                "tensorrt_llm",
                {"bad_words_list": np.array([[[4096], [1]]], I32)},
                "bad_words: token id 4096",
            ),
            Grpc(
                "tensorrt_llm",
                {"stop_words_list": np.array([[[1, 2], [9, -1]]], I32)},
                "stop_words_list .* ends",
            ),
            Grpc("tensorrt_llm", {"end_id": 4096}, "end_id: token id 4096"),
        ),
    ),
    44: Item(
        "biases: 10^5, no ids, out of the vocabulary, 1e9, NaN",
        (
            *refused(
                {str(i): 1 for i in range(10**5)}, logit_bias="sampling_parameters has .* bytes"
            ),
            *refused({str(i): 1 for i in range(5000)}, logit_bias="logit_bias has 5000 .* 4096"),
            *refused({"x": 1}, logit_bias="logit_bias key is 'x'"),
            *refused({"4096": 1}, logit_bias="logit_bias: token id 4096|.*logit_bias: token"),
            *refused({"5": 1e9}, logit_bias=f"logit_bias of token 5 is 1e.09, {FINITE} -100"),
            *refused({"5": NAN}, logit_bias="logit_bias of token 5 is nan"),
            Http(
                "{t}",
                text(embedding_bias_words=["a"], embedding_bias_weights=[1e9]),
                400,
                "embedding_bias_weights.*1e.09, not a finite number from -1000",
            ),
            Http(
                "{t}",
                text(embedding_bias_words=["a", "b"], embedding_bias_weights=[1.0]),
                400,
                "embedding_bias_weights has 1 values for 2",
            ),
            Grpc("tensorrt_llm", {"embedding_bias": np.ones((1, 4097), F32)}, "4097 biased tokens"),
        ),
    ),
    45: Item(
        "seeds: text, 2^70, -1",
        (
            *over_http("seed", {'"x"': SERVER, str(2**70): SERVER, "-1": SERVER}),
            *refused("x", seed="seed is 'x'"),
            *refused(2**70, seed="seed is 1180591620717411303424, not a whole number from -9"),
        ),
    ),
    46: Item(
        "response_format",
        (
            *refused({"type": "json_object"}, response_format="unknown .*'response_format'"),
            Grpc(
                "tensorrt_llm_bls",
                {"guided_decoding_guide_type": b"json"},
                f"guide_type is {NOT_YET}",
            ),
        ),
    ),
    47: Item(
        "schemas that are too much",
        (
            *refused(
                {"json": {"$ref": "http://x/"}}, guided_decoding=f"guided_decoding is {NOT_YET}"
            ),
            *refused({"json": "x" * 2**20}, structured_outputs="sampling_parameters has .* bytes"),
        ),
    ),
    48: Item(
        "patterns that are too much",
        refused({"regex": "(a+)+$"}, structured_outputs=f"structured_outputs is {NOT_YET}"),
    ),
    49: Item(
        "a schema that nothing satisfies",
        refused(
            {"json": {"minLength": 2, "maxLength": 1}},
            structured_outputs=f"structured_outputs is {NOT_YET}",
        ),
    ),
    50: Item(
        "tools",
        (
            *refused([{}] * 1000, tools="unknown request parameter 'tools'"),
            Http("{t}", text(tool_choice="x"), 400, "unknown .*'tool_choice'"),
        ),
    ),
    51: Item(
        "stream that is no flag, stream_options",
        (
            Http("{t}", text(stream="yes"), 500),
            Http("{t}", text(stream_options=1), 400, "unknown .*'stream_options'"),
        ),
    ),
    52: Item(
        "unknown fields",
        (
            Http("{t}", text(temprature=1), 400, "unknown .*'temprature'; do you mean temperature"),
            Http("{v}", text(stop_words="a"), 400, "unknown request parameter 'stop_words'"),
            Http("{t}", text(**{"f" * 10_000: 1}), 400, r"unknown .*f{50,64}\.\.\."),
            *refused(1, temprature="unknown .*'temprature'; do you mean temperature"),
            *(Grpc(m, {}, "request parameter 'zz'", parameters={"zz": 1}) for m in MODELS),
        ),
    ),
    53: Item("a client that closes", why="tests/server/test_ends.py and test_cancels.py"),
    54: Item("a client that stops reading", why="tests/faults"),
    55: Item(
        "bearer tokens",
        (
            Raw(
                b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
                + b"k" * 10**6
                + b"\r\n\r\n",
                (0, 200, 400, 431),
            ),
        ),
        "There are no keys: the server listens on loopback, what is in front of it asks for them.",
    ),
    56: Item(
        "admin verbs",
        tuple(
            Raw(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
                (403,),
            )
            for path in (
                "/v2/repository/models/ensemble/unload",
                "/v2/repository/models/ensemble/load",
                "/v2/systemsharedmemory/region/x/register",
                "/v2/logging",
                "/v2/trace/setting",
            )
        ),
    ),
    57: Item(
        "tensors: type, rank, shape, batch, unknown, missing",
        (
            *(
                case
                for m in TEXTS
                for case in (
                    Grpc(m, {"max_tokens": f32(4)}, "'max_tokens' data-type is 'FP32'"),
                    Grpc(m, {"max_tokens": np.array([[[4]]], I32)}, "'max_tokens'.*1,1,1"),
                    Grpc(m, {"max_tokens": np.array([[4], [4]], I32)}, "batch size"),
                    Grpc(m, {"max_tokens": None}, "'max_tokens'"),
                    Grpc(m, {"zz": 4}, "'zz'"),
                    Grpc(m, {"stop_words": np.zeros((1, 1, 1), I32)}, "stop_words"),
                )
            ),
            Grpc("tensorrt_llm", {"input_ids": None}, "input_ids is missing"),
            Grpc("tensorrt_llm", {"input_lengths": 9}, "input_lengths is 9, .* 1 to 3"),
            Grpc("tensorrt_llm", {"stop_words_list": np.ones((1, 3, 2), I32)}, "stop_words_list"),
            Grpc("vllm_model", {"text_input": None}, "text_input is missing"),
            Grpc("preprocessing", {"QUERY": b""}, "text_input is empty"),
            Grpc("preprocessing", {"QUERY": b"\xff"}, "text_input is not valid UTF-8"),
            Grpc("preprocessing", {"REQUEST_OUTPUT_LEN": None}, "REQUEST_OUTPUT_LEN"),
            Grpc("postprocessing", {"TOKENS_BATCH": -IDS[None]}, "TOKENS_BATCH .* -7"),
            Grpc("postprocessing", {"SEQUENCE_LENGTH": 9}, "SEQUENCE_LENGTH is 9"),
            Grpc(
                "postprocessing",
                ALONE | {"STREAM_STATE": np.array([[5, 2**40, 3, 0, 0, 0]])},
                "STREAM_STATE is malformed",
            ),
            Grpc(
                "postprocessing",
                ALONE | {"STREAM_STATE": np.array([[-1, 0, 3, 0, 0, 0, 5, -7]])},
                "STREAM_STATE holds the negative id -7",
            ),
            Grpc(
                "postprocessing",
                {"STREAM_STATE": np.array([[-1, 0, 3, 0, 0, 0, 5]])},
                "STREAM_STATE holds its tokens itself",
            ),
            Grpc(
                "postprocessing",
                {"TOKENS_BATCH": np.ones((1, 1, 2**20 + 1), I32)},
                "TOKENS_BATCH has 1048577 token ids, at most 1048576",
            ),
        ),
    ),
    58: Item(
        "a request id that is in use, or of 1 MB",
        tuple(
            Grpc(m, {}, "the request id has 1000000 bytes, at most 512", request_id="i" * 10**6)
            for m in MODELS
        ),
        "Beside these: a second request under the id of one that runs; the first goes on.",
    ),
    59: Item("checkpoint faults", why=FAULTS),
    60: Item("configuration faults", why=FAULTS),
}
ALL = SIXTY | REST
