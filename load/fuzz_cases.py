"""Requests over the whole contract, and what each must come to, drawn by hypothesis.

A case starts from values that must be served. Up to two faults are put into it: in a value, in a
request parameter, or in what Triton itself looks at (types, shapes, missing and unknown tensors).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from fuzz_fields import (
    FIELDS,
    PARAMETERS,
    REQUIRED,
    VLLM,
    VOCABULARY,
    flags,
    later,
    later_values,
)
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from slipstream_contract.declarations import DType
from slipstream_contract.inputs import NUMPY
from slipstream_contract.tensors import ALIASES, MODELS

T = TypeVar("T")
GENERATING = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "vllm_model")
STAGES = ("preprocessing", "postprocessing")
ANY = ("",)  # every error holds it: Triton refuses some things without their name
_MODELS = GENERATING * 2 + STAGES
_STREAM = {"tensorrt_llm": "streaming"}
_WEIGHTS = "embedding_bias_weights"
_RANGE = "retention_token_range_"
_STARTS = f"{_RANGE}starts"
_WIRE_FAULTS = ("dtype", "rank", "batch", "unknown", "missing", "short", "output", "twice")
_LONG_ID = "i" * 513
_NO_OBJECTS = ("[" * 9999, "7" * 9999, "7" * 999, '{"n": 1, "n": 1}', '{"n": 0x1}')


class _NoConstants(HypothesisProvider):
    """Hypothesis's provider without constants of the modules that happen to be imported."""

    def _maybe_draw_constant(self, *args: Any, **kwargs: Any) -> None:
        return None


AVAILABLE_PROVIDERS["no-constants"] = _NoConstants


@dataclass
class Given:
    """A tensor as it is sent; `elements` are flat."""

    name: str
    dtype: str
    shape: list[int]
    elements: list[Any]
    raw: bytes

    def __repr__(self) -> str:
        return f"{self.name} {self.dtype}{self.shape} {str(self.elements)[:300]}"


@dataclass
class Case:
    """One request. Of each of `faults`, the error must hold one of the names."""

    model: str
    wire: str  # grpc; http: generate_stream, or generate where there is one answer
    size: int = 1  # of the batch
    tensors: list[Given] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""
    outputs: list[str] = field(default_factory=list)
    num_sequences: int = 1  # of each prompt
    is_streaming: bool = False
    is_stop: bool = False  # asks for nothing: a cancel under an id that nobody has
    faults: list[tuple[str, ...]] = field(default_factory=list)
    mutation: tuple[int, bytes] | None = None  # bytes put over the message: anything may come of it

    def body(self) -> bytes:
        """Return the request as JSON for HTTP."""
        told: dict[str, Any] = {"id": self.request_id} if self.request_id else {}
        for tensor in self.tensors:
            values = [_json(each) for each in tensor.elements]
            told[tensor.name] = values[0] if len(values) == 1 else values
        return self.mutated(json.dumps(told | self.parameters).encode())

    def mutated(self, message: bytes) -> bytes:
        """The message with `mutation` in it."""
        if self.mutation is None:
            return message
        at, put = self.mutation
        at %= len(message) + 1
        return message[:at] + put + message[at + len(put) :]


def _json(element: Any) -> Any:
    if isinstance(element, bytes):
        return element.decode(errors="surrogateescape")  # bytes that are no UTF-8: lone surrogates
    return element


def _is_text(tensor: Given) -> bool:
    try:
        return all(each.decode() or True for each in tensor.elements if isinstance(each, bytes))
    except UnicodeDecodeError:
        return False


def _raw(dtype: DType, elements: list[Any]) -> bytes:
    if dtype is DType.STRING:
        return b"".join(len(each).to_bytes(4, "little") + each for each in elements)
    return np.array(elements, NUMPY[dtype]).tobytes()


def _tensor(model: str, name: str, rows: list[Any]) -> Given:
    """The rows of a batch; a row is a list, or a list of equally long lists."""
    spec = MODELS[model].input(name)
    array = np.array(rows, dtype=object)
    is_batched = MODELS[model].max_batch_size > 0
    shape = list(array.shape if is_batched else array.shape[1:])
    elements = array.reshape(-1).tolist()
    dtype = "BYTES" if spec.dtype is DType.STRING else spec.dtype.value
    return Given(name, dtype, shape, elements, _raw(spec.dtype, elements))


class _Draft:
    """A case while it is drawn."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        model = self.one(_MODELS)
        self.case = Case(
            model, self.one(("grpc", "grpc", "http")) if model in GENERATING else "grpc"
        )
        self.is_http = self.case.wire == "http"
        if MODELS[model].max_batch_size and not (self.is_http and model == "tensorrt_llm"):
            self.case.size = self.one((1, 1, 1, 2, 3))
        self.rows: dict[str, list[Any]] = {}

    def one(self, values: Any) -> Any:
        return self.draw(st.sampled_from(list(values)))

    def rarely(self, percent: int) -> bool:
        """So often; a draw's ends come up more often than its middle."""
        return 40 <= self.draw(st.integers(0, 99)) < 40 + percent

    def put(self, name: str, is_bad: bool) -> None:
        """Values of an input: of several prompts each may have its own, but all lists are one."""
        spec = FIELDS[self.case.model][name]
        size = self.case.size
        if MODELS[self.case.model].input(name).dims == (1,):
            self.rows[name] = [self.draw(spec.good) for _ in range(size)]
            if is_bad:
                self.rows[name][self.draw(st.integers(0, size - 1))] = self.draw(spec.bad)
        else:
            self.rows[name] = [self.draw(spec.bad if is_bad else spec.good)] * size
        if is_bad:
            self.case.faults.append((name, *spec.names))

    def names(self) -> list[str]:
        """Inputs that may be given; over HTTP only what has one dimension, and lists only alone."""
        inputs = [MODELS[self.case.model].input(name) for name in FIELDS[self.case.model]]
        if self.is_http:
            inputs = [
                t for t in inputs if t.dims == (1,) or (len(t.dims) == 1 and self.case.size == 1)
            ]
        return [tensor.name for tensor in inputs]

    def values(self) -> None:
        """Required inputs, some others, and at most one bad value."""
        names = self.names()
        chosen = {*REQUIRED[self.case.model]} & {*FIELDS[self.case.model]}
        chosen |= set(self.draw(st.lists(st.sampled_from(names), max_size=5)))
        bad = self.one(sorted(chosen)) if self.rarely(25) else ""
        if bad and FIELDS[self.case.model][bad].bad is None:
            bad = ""
        for name in sorted(chosen):
            self.put(name, name == bad)
        self.settle()

    def settle(self) -> None:
        """What inputs must have in common."""
        rows, case = self.rows, self.case
        if "input_ids" in rows:
            rows["input_lengths"] = [[len(row)] for row in rows["input_ids"]]
        is_length_bad = any("SEQUENCE_LENGTH" in names for names in case.faults)
        if "TOKENS_BATCH" in rows and not is_length_bad:
            rows["SEQUENCE_LENGTH"] = [[len(row[0])] for row in rows["TOKENS_BATCH"]]
        if "STREAM_STATE" in rows:
            self.stream()
        for name, twin in ALIASES.items():
            if name in rows and twin in rows:
                if case.faults:
                    case.faults.append((name,))
                else:
                    del rows[name]
        for words in {"embedding_bias_words", "EMBEDDING_BIAS_WORDS"} & rows.keys():
            count = len(rows[words][0])
            wrong = self.rarely(20)
            weight = self.one(
                [1.0, -1000.0, 1000.0] if count == 1 else [5.0, -250.0]
            )  # they add up
            weights = [weight] * (count + 1 if wrong else count)
            if wrong:
                case.faults.append((_WEIGHTS, "embedding_bias"))
            rows[words.replace("ords", "eights").replace("ORDS", "EIGHTS")] = [weights] * case.size
        if _STARTS in rows:
            self.ranges(rows[_STARTS][0])
        if "draft_input_ids" in rows or "lookahead_ngram_size" in rows:
            self.drafts()
        if "num_return_sequences" in rows:
            first = rows["num_return_sequences"][0][0]
            if not case.faults:
                rows["num_return_sequences"] = [[first]] * case.size
                case.num_sequences = first

    def stream(self) -> None:
        """A response of a stream: its tokens stand in its state, and only there."""
        case = self.case
        is_whole_too = self.rarely(20)
        if not is_whole_too:
            for name in REQUIRED[case.model]:
                self.rows.pop(name, None)
            case.faults = [names for names in case.faults if names[0] == "STREAM_STATE"]
        if is_whole_too or case.size > 1:
            case.faults.append(("STREAM_STATE",))

    def drafts(self) -> None:
        """Logits of drafts, for each a row of the vocabulary, and the rest of a lookahead."""
        rows, case = self.rows, self.case
        if "lookahead_ngram_size" in rows:
            window, count = self.one([1, 4, 1024]), self.one([0, 4, 1024])
            if self.rarely(20):
                window = self.one([0, 1025, -1])
                case.faults.append(("lookahead_window_size",))
            rows["lookahead_window_size"] = [[window]] * case.size
            rows["lookahead_verification_set_size"] = [[count]] * case.size
        has_ids = "draft_input_ids" in rows and not case.faults
        if has_ids and not self.is_http and self.rarely(20):
            is_bad = self.rarely(50)
            row = [0.5] * (VOCABULARY - is_bad)
            rows["draft_logits"] = [[row] * len(rows["draft_input_ids"][0])] * case.size
            if is_bad:
                case.faults.append(("draft_logits",))

    def ranges(self, starts: list[int]) -> None:
        """The rest of what ranges of tokens have, each ten tokens long at most."""
        size = self.case.size
        what: dict[str, list[int]] = {"ends": [max(start, 0) + 9 for start in starts]}
        what["priorities"] = [self.one([0, 50, 100])] * len(starts)
        if self.draw(st.booleans()):
            what["durations_ms"] = [self.one([-1, 1, 60_000])] * len(starts)
        if self.rarely(20):
            name, wrong = self.one([("ends", -2), ("priorities", 101), ("durations_ms", 0)])
            what[name] = [wrong] * len(starts)
            self.case.faults.append((_RANGE,))
        for name, values in what.items():
            self.rows[_RANGE + name] = [values] * size

    def switches(self) -> None:
        """Flags, and inputs of what is not there."""
        case = self.case
        chosen = self.draw(st.lists(st.sampled_from([*flags(case.model), ""]), max_size=3))
        twins = {ALIASES.get(name) for name in chosen}  # one of two names of one thing is enough
        for name in chosen:
            if name and ALIASES.get(name) not in self.rows and name not in twins:
                self.rows[name] = [[self.draw(st.booleans())]] * case.size
        others = later(case.model)
        if others and self.rarely(12):
            tensor = self.one(others)
            good, bad = later_values(tensor)
            is_bad = not good or self.draw(st.booleans())
            self.rows[tensor.name] = [[self.one(bad if is_bad else good)]] * case.size
            if is_bad:
                known_as = tensor.name.lower().replace("decoder_query", "decoder_text_input")
                case.faults.append((tensor.name, known_as))
        if case.model in GENERATING:
            case.is_streaming = self.draw(st.booleans())
            name = _STREAM.get(case.model, "stream")
            self.rows[name] = [[case.is_streaming]] * case.size
            if case.model == "tensorrt_llm" and self.rarely(5):
                self.rows["stop"] = [[True]] * case.size
                case.is_stop = True

    def parameters(self) -> None:
        """Request parameters; for vllm_model those of all models, and its sampling parameters."""
        case = self.case
        own = VLLM if case.model == "vllm_model" else {}
        for name in self.draw(
            st.lists(st.sampled_from(sorted(PARAMETERS)), max_size=2, unique=True)
        ):
            good, bad = PARAMETERS[name]
            if own and name not in ("request_priority", "timeout_ms"):
                continue
            is_bad = not good or self.rarely(20)
            case.parameters[name] = self.one(bad if is_bad else good)
            if is_bad:
                case.faults.append((name[:48],))
        if own:
            self.sampling_parameters()

    def sampling_parameters(self) -> None:
        case = self.case
        outside = list(case.faults)
        chosen = self.draw(st.lists(st.sampled_from(sorted(VLLM)), max_size=5, unique=True))
        bad = self.one(chosen) if chosen and self.rarely(30) else ""
        asked: dict[str, Any] = {"max_tokens": 3}
        for name in chosen:
            good, wrong = VLLM[name]
            if not good and not self.rarely(15):
                continue
            is_bad = name == bad or not good
            asked[name] = self.one(wrong if is_bad else good)
            if is_bad:
                is_many = name in ("stop_token_ids", "logit_bias")
                case.faults.append(ANY if is_many else (name[:48],))
        if isinstance(asked.get("n"), int) and 1 < asked["n"] <= 3:
            if bad != "temperature":
                asked["temperature"] = 0.5  # greedy, there would be one answer
            case.num_sequences = asked["n"]
        text = json.dumps(asked)
        if self.rarely(5):
            text = self.one(["{", "[]", "5", "null", *_NO_OBJECTS])
            case.faults = [*outside, ("sampling_parameters",)]
        self.rows["sampling_parameters"] = [[text.encode()]]

    def wire_fault(self) -> None:
        """Something that Triton itself must see. Its words are its own."""
        kind = self.one(_WIRE_FAULTS)
        case = self.case
        if not case.tensors or self.is_http:
            return
        tensor = self.one(case.tensors)
        match kind:
            case "dtype":
                tensor.dtype = "INT16" if tensor.dtype != "INT16" else "INT8"
            case "rank":
                tensor.shape = [*tensor.shape, 1]
            case "batch":
                # The server looks at the first tensor's size, at 32 bits of it: behind that one,
                # what is 0 in them counts as the same, and one row is read.
                wrong = [-1, 65, 2**31] + [0, 2**60] * (tensor is case.tensors[0])
                tensor.shape = [self.one(wrong), *tensor.shape[1:]]
            case "unknown":
                case.tensors.append(Given("zz", "INT32", [case.size, 1], [1], bytes(4 * case.size)))
            case "missing":
                name = self.one(sorted(self.rows.keys() & {*REQUIRED[case.model]}) or self.rows)
                case.tensors = [each for each in case.tensors if each.name != name]
            case "short":
                tensor.raw = tensor.raw[:-1]
            case "output":
                case.outputs = ["zz"]
            case "twice":
                case.tensors.append(tensor)
        case.faults = [ANY]

    def finish(self) -> Case:
        """The tensors, and faults of the message itself."""
        case = self.case
        case.tensors = [_tensor(case.model, name, rows) for name, rows in self.rows.items()]
        if self.is_http and not all(map(_is_text, case.tensors)):
            case.faults.append(ANY)  # the server refuses the JSON
        if not case.is_stop and self.rarely(10):
            self.wire_fault()
        elif self.rarely(5):
            case.parameters["timeout_ms"] = 5000  # in case it now asks for a long answer
            case.mutation = (self.draw(st.integers(0, 4000)), self.draw(st.binary(max_size=6)))
        elif case.model in GENERATING and self.rarely(2):
            case.request_id = _LONG_ID
            case.faults.append(("request id",))
        if case.is_stop and case.faults != [ANY]:
            # Nothing else of it counts, but what says when it should be done.
            case.faults = [f for f in case.faults if f[0] in ("timeout_ms", "request_priority")]
            case.faults += [("request id",)] * (case.request_id == _LONG_ID)
        return case


@st.composite
def _cases(draw: Any) -> Case:
    draft = _Draft(draw)
    draft.values()
    draft.switches()
    if draft.case.model in GENERATING:
        draft.parameters()
    return draft.finish()


def cases(count: int, number: int) -> Iterator[Case]:
    """So many requests; the same for the same number, in any process."""
    return drawn(_cases(), count, number)


def drawn(strategy: st.SearchStrategy[T], count: int, number: int) -> Iterator[T]:
    """So many examples of a strategy; the same for the same number, in any process."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=count,
        backend="no-constants",
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: T) -> None:
        found.append(case)

    collect()
    yield from found[:count]
