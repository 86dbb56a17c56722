"""Bad inputs 34 to 60: sampling, words, requests as a whole. See sixty.py."""

import numpy as np
from server.sixty import SIXTY
from server.sixty_cases import (
    BY_SERVER,
    CLOSED,
    OURS,
    TWO_DIMENSIONS,
    Beside,
    Call,
    Grpc,
    Http,
    Item,
    Raw,
    in_turn,
    refused,
    text,
    vllm,
)
from server.sixty_tensors import TENSORS
from tritonclient.grpc import service_pb2 as messages

I32 = np.int32
NAN = float("nan")
FINITE = "not a finite number from"
NOT_YET = "is not supported yet: it is"
OUT = "leave it out"
COUNT = "not a whole number from"
VOCABULARY = "is outside the vocabulary 0 .. 4095"
FAULTS = "tests/server/test_bad_starts.py"
RESTRICTED = "restricted, expecting header"
KEY = "Bearer " + "k" * 10**6


def unknown(name: str) -> tuple[Http, ...]:
    """A field that no model has, of the body and of vllm_model's sampling parameters."""
    said = f"{OURS}unknown request parameter '{name}'"
    return (Http("{n}", Beside({name: "x"}), 400, said), *refused("x", **{name: said[18:]}))


REST: dict[int, Item] = {
    34: Item(
        "temperature -1, above the limit, NaN, infinite, text",
        (
            *in_turn(
                "temperature",
                {
                    "-1": rf"temperature is -1, {FINITE} 0 to 1e\+06",
                    "2e6": rf"temperature is 2000000, {FINITE} 0 to 1e\+06",
                    "NaN": rf"temperature is nan, {FINITE} 0 to 1e\+06",
                    "Infinity": rf"temperature is inf, {FINITE} 0 to 1e\+06",
                    "-Infinity": rf"temperature is -inf, {FINITE} 0 to 1e\+06",
                    '"hot"': BY_SERVER,
                },
            ),
            *in_turn(
                "temperature",
                {
                    "-1": f"temperature is -1, {FINITE} 0 to",
                    "2e6": f"temperature is 2000000, {FINITE} 0 to",
                    "NaN": f"temperature is nan, {FINITE} 0 to",
                    "Infinity": f"temperature is inf, {FINITE} 0 to",
                    '"hot"': "temperature is 'hot', not a number",
                },
                "{v}",
            ),
        ),
    ),
    35: Item("temperature 1e-300", why="it is greedy: the answer is the canary's"),
    36: Item(
        "top_p, top_k and min_p out of range",
        (
            *in_turn(
                "top_p",
                {
                    "-0.1": f"top_p.* is -0.1, {FINITE} 0 to 1",
                    "1.1": f"top_p.* is 1.1, {FINITE} 0 to 1",
                    "NaN": f"top_p.* is nan, {FINITE} 0 to 1",
                },
            ),
            *in_turn(
                "top_p",
                {
                    "0": "top_p is 0, not a number above 0 and at most 1",
                    "1.1": "top_p is 1.1, not a number above 0 and at most 1",
                    "NaN": "top_p is nan, not a number above 0 and at most 1",
                },
                "{v}",
            ),
            *in_turn("top_k", {"-2": f"top_k.* is -2, {COUNT} 0 to 2147483647"}),
            *in_turn(
                "top_k",
                {
                    "-2": f"top_k is -2, {COUNT} -1 to 2147483647",
                    "1099511627776": f"top_k is 1099511627776, {COUNT} -1 to 2147483647",
                },
                "{v}",
            ),
            *in_turn("min_p", {"2": f"min_p is 2, {FINITE} 0 to 1"}),
            *in_turn("min_p", {"2": f"min_p is 2, {FINITE} 0 to 1"}, "{v}"),
        ),
    ),
    37: Item(
        "penalties out of range",
        (
            *in_turn(
                "presence_penalty", {"1001": f"presence_penalty is 1001, {FINITE} -1000 to 1000"}
            ),
            *in_turn(
                "frequency_penalty",
                {"-1001": f"frequency_penalty is -1001, {FINITE} -1000 to 1000"},
            ),
            *(
                case
                for models in ("{n}", "{v}")
                for case in in_turn(
                    "repetition_penalty",
                    {
                        "0": f"repetition_penalty is 0, {FINITE} 0.001 to 1000",
                        "NaN": f"repetition_penalty is nan, {FINITE} 0.001 to 1000",
                    },
                    models,
                )
            ),
            *(
                case
                for field in ("presence_penalty", "frequency_penalty")
                for case in in_turn(field, {"2.1": f"{field} is 2.1, {FINITE} -2 to 2"}, "{v}")
            ),
        ),
    ),
    38: Item(
        "n 0, -1, 10^6; n with temperature 0",
        (
            *in_turn(
                "num_return_sequences",
                {
                    value: f"num_return_sequences is {value}, {COUNT} 1 to 256"
                    for value in ("0", "-1", "1000000")
                },
            ),
            *in_turn(
                "n",
                {value: f"n is {value}, {COUNT} 1 to 256" for value in ("0", "-1", "1000000")},
                "{v}",
            ),
            Http("{v}", vllm(n=2, temperature=0), 400, "n is 2, but greedy .* has one answer"),
        ),
    ),
    39: Item(
        "best_of",
        (
            *refused(5, best_of=f"best_of {NOT_YET} 5, only 1 is served"),
            Http("{n}", Beside(best_of=5), 400, "unknown request parameter 'best_of'"),
        ),
    ),
    40: Item(
        "logprobs 10^6, top_logprobs",
        (
            *refused(10**6, logprobs="logprobs is 1000000, at most 0 is supported yet"),
            *refused(-1, logprobs=f"logprobs is -1, {COUNT} 0 to"),
            *unknown("top_logprobs"),
        ),
    ),
    41: Item(
        "log probs of a prompt, echo",
        (
            *refused(1, prompt_logprobs=f"prompt_logprobs {NOT_YET} 1, {OUT}"),
            *(
                Http("{n}", Beside({name: True}), 400, f"{name} {NOT_YET} True, only 0 is served")
                for name in ("return_context_logits", "return_generation_logits")
            ),
        ),
    ),
    42: Item(
        "stop words: empty, 5,000, 1 MB, no text",
        (
            Http("{t}", text(stop_words=["w"] * 5000), 400, "stop_words has 5000 words, .* 1024"),
            Http(
                "{t}",
                text(stop_words="x" * 10**6),
                400,
                "stop_words has a word of 1000000 bytes, at most 4096 .*x{50,64}",
            ),
            Http("{t}", text(stop_words=[5]), 500, "Unable to parse"),
            Http(
                "{t}",
                text(stop_words=["x" * 4096] * 5),
                400,
                "stop_words has 20480 bytes, at most 16384",
            ),
            Http(
                "{t}",
                text(bad_words=["x" * 4096] * 17),
                400,
                "bad_words has 69632 bytes, at most 65536",
            ),
            *refused("", stop=r"stop\[0\] is empty"),
            *refused(["w"] * 5000, stop="stop has 5000 words, at most 1024"),
            *refused("x" * 10**6, stop="stop has a word of 1000000 bytes, at most 4096 .*x{50,64}"),
            *refused([5], stop=r"stop\[0\] is 5, not a text"),
        ),
    ),
    43: Item(
        "stop and bad token ids out of the vocabulary",
        (
            *refused([4096], stop_token_ids=f"stop_token_ids: token id 4096 {VOCABULARY}"),
            *refused([-1], stop_token_ids=rf"stop_token_ids\[0\] is -1, {COUNT} 0 to"),
            *refused([2**70], stop_token_ids=rf"stop_token_ids\[0\] is {2**70}, {COUNT} 0 to"),
            Grpc(
                "tensorrt_llm",
                {"bad_words_list": np.array([[[4096], [1]]], I32)},
                f"bad_words: token id 4096 {VOCABULARY}",
                TWO_DIMENSIONS,
            ),
            Grpc(
                "tensorrt_llm",
                {"stop_words_list": np.array([[[1, 2], [9, -1]]], I32)},
                r"stop_words_list .* ends \[9, -1\], not flat .* padded with -1",
                TWO_DIMENSIONS,
            ),
            Http("{n}", Beside(end_id=4096), 400, f"end_id: token id 4096 {VOCABULARY}"),
        ),
    ),
    44: Item(
        "biases: 10^5, no ids, out of the vocabulary, 1e9, NaN",
        (
            *refused(
                {str(i): 1 for i in range(10**5)},
                logit_bias=r"sampling_parameters has \d+ bytes, at most 1048576",
            ),
            *refused(
                {str(i): 1 for i in range(5000)},
                logit_bias="logit_bias has 5000 token ids, at most 4096",
            ),
            *refused({"x": 1}, logit_bias="logit_bias key is 'x', not a whole number"),
            *refused({"4096": 1}, logit_bias=f".*logit_bias: token id 4096 {VOCABULARY}"),
            *refused(
                {"5": 1e9}, logit_bias=rf"logit_bias of token 5 is 1e\+09, {FINITE} -100 to 100"
            ),
            *refused({"5": NAN}, logit_bias=f"logit_bias of token 5 is nan, {FINITE} -100 to 100"),
            *(
                Http(
                    "{t}",
                    text(embedding_bias_words=["a"], embedding_bias_weights=[weight]),
                    400,
                    rf"embedding_bias_weights\[0\] is {said}, {FINITE} -1000 to 1000",
                )
                for weight, said in ((1e9, r"1e\+09"), (NAN, "nan"))
            ),
            Http(
                "{t}",
                text(embedding_bias_words=["a", "b"], embedding_bias_weights=[1.0]),
                400,
                "embedding_bias_weights has 1 values for 2 embedding_bias_words",
            ),
            Http(
                "tensorrt_llm",
                Beside(embedding_bias=[1.0] * 4097),
                400,
                "embedding_bias .*has 4097 biased tokens, at most 4096",
            ),
        ),
    ),
    45: Item(
        "seeds: text, 2^70, -1",
        (
            *in_turn("seed", {'"x"': BY_SERVER, str(2**70): BY_SERVER, "-1": BY_SERVER}),
            *refused("x", seed="seed is 'x', not a whole number"),
            *refused(2**70, seed=f"seed is {2**70}, {COUNT} -{2**63} to {2**63 - 1}"),
        ),
    ),
    46: Item(
        "response_format",
        (
            *unknown("response_format"),
            Http(
                "tensorrt_llm_bls",
                Beside(guided_decoding_guide_type="json"),
                400,
                f"guided_decoding_guide_type {NOT_YET} b'json', {OUT}",
            ),
        ),
    ),
    47: Item(
        "schemas that are too much",
        (
            *refused(
                {"json": {"$ref": "http://x/"}},
                guided_decoding=f"guided_decoding {NOT_YET} .*http://x/.*, {OUT}",
            ),
            *refused(
                {"json": "x" * 2**20},
                structured_outputs=r"sampling_parameters has \d+ bytes, at most 1048576",
            ),
        ),
    ),
    48: Item(
        "patterns that are too much",
        refused(
            {"regex": "(a+)+$"},
            structured_outputs=rf"structured_outputs {NOT_YET} .*\(a\+\)\+\$.*, {OUT}",
        ),
    ),
    49: Item(
        "a schema that nothing satisfies",
        refused(
            {"json": {"minLength": 2, "maxLength": 1}},
            structured_outputs=f"structured_outputs {NOT_YET} .*'minLength': 2.*, {OUT}",
        ),
    ),
    50: Item("tools", (*unknown("tools"), *unknown("tool_choice"))),
    51: Item(
        "stream that is no flag, stream_options",
        (
            Http("{x}", Beside(stream="yes"), 500, "Unable to parse"),
            Http("tensorrt_llm", Beside(streaming="yes"), 500, "Unable to parse"),
            *unknown("stream_options"),
        ),
    ),
    52: Item(
        "unknown fields",
        (
            Http("{n}", Beside(temprature=1), 400, "unknown .*'temprature'; do you mean temp"),
            Http("{v}", text(stop_words="a"), 400, "unknown request parameter 'stop_words'"),
            Http("{n}", Beside({"f" * 10_000: 1}), 400, r"unknown .*'f{50,64}\.\.\."),
            *refused(1, temprature="unknown .*'temprature'; do you mean temperature"),
            *refused(1, **{"f" * 10_000: r"unknown .*'f{50,64}\.\.\."}),
            Http("{m}", Beside(zz=1), 400, "request parameter 'zz'"),
        ),
    ),
    53: Item("a client that closes", why="tests/server/test_ends.py and test_cancels.py"),
    54: Item("a client that stops reading", why="tests/faults"),
    55: Item(
        "bearer tokens",
        (
            Raw(
                f"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nAuthorization: {KEY}\r\n\r\n".encode(),
                CLOSED,
            ),
            Call("ServerLive", b"", "RESOURCE_EXHAUSTED", "metadata", (("authorization", KEY),)),
        ),
        "There are no keys: the server listens on loopback, what is in front of it asks for them.",
    ),
    56: Item(
        "admin verbs",
        (
            *(
                Raw(
                    f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
                    403,
                    RESTRICTED,
                )
                for path in (
                    "/v2/repository/models/ensemble/unload",
                    "/v2/repository/models/ensemble/load",
                    "/v2/systemsharedmemory/region/x/register",
                    "/v2/logging",
                    "/v2/trace/setting",
                )
            ),
            *(
                Call(method, request.SerializeToString(), "UNAVAILABLE", RESTRICTED)
                for method, request in (
                    (
                        "RepositoryModelUnload",
                        messages.RepositoryModelUnloadRequest(model_name="ensemble"),
                    ),
                    (
                        "RepositoryModelLoad",
                        messages.RepositoryModelLoadRequest(model_name="ensemble"),
                    ),
                    (
                        "SystemSharedMemoryRegister",
                        messages.SystemSharedMemoryRegisterRequest(name="x", key="/x", byte_size=8),
                    ),
                    ("LogSettings", messages.LogSettingsRequest()),
                    ("TraceSetting", messages.TraceSettingRequest()),
                )
            ),
        ),
    ),
    57: Item(
        "tensors: type, rank, shape, batch, unknown, missing, twice",
        TENSORS,
        "An output that is asked for twice is answered once.",
    ),
    58: Item(
        "a request id that is in use, or of 1 MB",
        (
            Http(
                "{m}",
                Beside(id="i" * 10**6),
                400,
                r"the request id has 1000000 bytes, at most 512 are served: 'i{50,64}\.\.\.",
            ),
        ),
        "Beside these: a second request under the id of one that runs; the first goes on.",
    ),
    59: Item("checkpoint faults", why=FAULTS),
    60: Item("configuration faults", why=FAULTS),
}
ALL = SIXTY | REST
