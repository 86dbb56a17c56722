"""Bad input 57: tensors that are not what the contract says, to every model and stage.

Tritonserver sees nearly all of it itself, and names the tensor. Over HTTP the stages have `infer`,
which takes shapes and types; `generate` makes tensors itself, so what is left of this there are
values of other types, missing and unknown fields. What `infer` says of a shape below 0 is a failed
parse: status 500.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from server.sixty_cases import GOOD, MODELS, NO_TYPES, STAGES, TEXTS, Beside, Grpc, Http

I32 = np.int32
IDS = np.array([[5, 6, 7]], I32)
ALONE = dict.fromkeys(("TOKENS_BATCH", "SEQUENCE_LENGTH"))  # left out
HUGE = 2**60
NO_SHAPE = "Unable to parse 'shape'"
NOT_NEGATIVE = {"status": 500, "infer_expected": NO_SHAPE}


def typed(name: str) -> Callable[[Any], None]:
    """The first tensor has a type of this name."""

    def change(request: Any) -> None:
        request.inputs[0].datatype = name

    return change


def sized(at: int, size: int) -> Callable[[Any], None]:
    """The first tensor's shape says something else than its data."""

    def change(request: Any) -> None:
        request.inputs[0].shape[at] = size

    return change


def deeper(request: Any) -> None:
    """Of a higher rank."""
    request.inputs[0].shape.append(1)


def twice(request: Any) -> None:
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])


def shorter(request: Any) -> None:
    request.raw_input_contents[0] = request.raw_input_contents[0][:-1]


def longer(request: Any) -> None:
    request.raw_input_contents[0] += b"abcd"


def bare(request: Any) -> None:
    """No data at all."""
    del request.raw_input_contents[:]


def asking(request: Any) -> None:
    """For an output that is none."""
    request.outputs.add(name="zz")


def shapes(model: str) -> Iterator[Grpc]:
    """The first tensor of a good request, changed."""
    name = next(iter(GOOD[model]))
    alone = "" if model in STAGES else NO_TYPES
    by_size = rf"'{name}'.*(batch size|\[-1\]|{HUGE})"
    inner = f"'({name}|QUERY)'"  # of the ensemble's step
    for change, expected, more in (
        (typed("INT16"), f"'{name}' data-type is 'INT16', but .* expects", {}),
        (typed("NOPE"), f"'{name}' data-type is '<invalid>', but .* expects", {}),
        (deeper, f"unexpected shape for input '{name}' .* Expected .*, got", {}),
        (sized(0, -1), by_size, NOT_NEGATIVE),
        (sized(0, HUGE), by_size, {}),
        (sized(-1, -5), f"'{name}'.*(got .*-5|Expected -20, got)", NOT_NEGATIVE),
        (sized(-1, HUGE), f"'{name}'.*(got .*{HUGE}|Expected {4 * HUGE}, got)", {}),
        (twice, f"input '{name}' already exists", {}),
        (shorter, rf"{inner}.*([Ee]xpect.* \d+ )?(got|only) \d+", {}),
        (longer, f"'{name}'.*[Ee]xpect", {}),
        (bare, f"unable to find data for input tensor '{name}'", {"alone": alone or "no tensor"}),
        (asking, "unexpected inference output 'zz'", {}),
    ):
        yield Grpc(model, {}, expected, **({"alone": alone, "change": change} | more))


def fields(model: str) -> Iterator[Http | Grpc]:
    """A required field that is missing, one that is unknown, one of another type."""
    alone = "" if model in STAGES else "`generate` makes a parameter of it: see item 52"
    yield Grpc(model, {"zz": 4}, "unexpected inference input 'zz'", alone)
    for name in GOOD[model]:
        if name == "sampling_parameters":
            continue
        if model in STAGES:
            yield Grpc(model, {name: None}, f"{name}")
        else:
            yield Http(model, Beside({name: ...}), 400, f"{name}")
            yield Http(model, Beside({name: {"a": 1}}), 500, "Unable to parse")
            yield Http(model, Beside({name: True}), 500, "Unable to parse")


def of_texts(model: str) -> Iterator[Grpc]:
    """Shapes of an input that is not the first."""
    for values, expected in (
        (np.array([[4.0]], np.float32), "'max_tokens' data-type is 'FP32', but .* expects 'INT32'"),
        (np.array([[[4]]], I32), r"'max_tokens'.* Expected \[-1,1\], got \[1,1,1\]"),
        (np.array([[4], [4]], I32), "'text_input' batch size does not match other inputs"),
    ):
        yield Grpc(model, {"max_tokens": values}, expected, NO_TYPES)
    words = np.zeros((1, 1, 1), I32)
    yield Grpc(model, {"stop_words": words}, "'stop_words' data-type is 'INT32'", NO_TYPES)


def of_postprocessing(tensors: dict[str, Any], expected: str) -> Grpc:
    return Grpc("postprocessing", tensors, expected)


TENSORS: tuple[Http | Grpc, ...] = (
    *(case for model in (*MODELS, *STAGES) for case in shapes(model)),
    *(case for model in (*MODELS, *STAGES) for case in fields(model)),
    *(case for model in TEXTS for case in of_texts(model)),
    Http(
        "tensorrt_llm",
        Beside(input_lengths=9),
        400,
        "input_lengths is 9, not a whole number from 1 to 3",
    ),
    Grpc(
        "tensorrt_llm",
        {"stop_words_list": np.ones((1, 3, 2), I32)},
        r"'stop_words_list' .* Expected \[-1,2,-1\], got \[1,3,2\]",
        NO_TYPES,
    ),
    Grpc("preprocessing", {"QUERY": b""}, "text_input is empty"),
    Grpc("preprocessing", {"QUERY": b"\xff"}, r"text_input is not valid UTF-8 at byte 0: b'\\xff'"),
    of_postprocessing({"TOKENS_BATCH": -IDS[None]}, "TOKENS_BATCH holds the negative id -7"),
    of_postprocessing({"SEQUENCE_LENGTH": 9}, "SEQUENCE_LENGTH is 9, TOKENS_BATCH has 3 tokens"),
    of_postprocessing(
        ALONE | {"STREAM_STATE": np.array([[5, 2**40, 3, 0, 0, 0]])},
        f"STREAM_STATE is malformed: slot 5 has no response {2**40}",
    ),
    of_postprocessing(
        ALONE | {"STREAM_STATE": np.array([[-1, 0, 3, 0, 0, 0, 5, -7]])},
        "STREAM_STATE holds the negative id -7",
    ),
    of_postprocessing(
        {"STREAM_STATE": np.array([[-1, 0, 3, 0, 0, 0, 5]])},
        "STREAM_STATE holds its tokens itself: leave out SEQUENCE_LENGTH",
    ),
    of_postprocessing(
        {"TOKENS_BATCH": np.ones((1, 1, 2**20 + 1), I32)},
        "TOKENS_BATCH has 1048577 token ids, at most 1048576",
    ),
)
