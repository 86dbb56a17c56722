"""The stages' Triton side, with a stand-in for the module that only exists inside the server.

What the stand-in cannot show (dtypes on the wire, ordering, dynamic batching) is in tests/server.
"""

import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fixtures.stages.zoo import byte_level_bpe, save
from fixtures.tiers import quick_of
from slipstream_contract.errors import REASONS
from slipstream_contract.parameters import StageParameters
from slipstream_contract.stream_state import BeamState, StreamState, pack_beams
from slipstream_runtime import admission, stub
from slipstream_runtime.admission import MAX_RETRY_MS, Load, LoadFile, path_of
from slipstream_runtime.credit import CreditFile
from slipstream_runtime.waking import wake_at_once


class Tensor:
    def __init__(self, name: str, value: Any) -> None:
        self._name, self.value = name, value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self.value


class TritonError:
    INVALID_ARG, INTERNAL, UNAVAILABLE = "invalid", "internal", "unavailable"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class Response:
    def __init__(self, tensors: list[Tensor] = [], error: TritonError | None = None) -> None:  # noqa: B006
        self.outputs = {tensor.name(): tensor.value for tensor in tensors}
        self.error = error


class Request:
    def __init__(
        self,
        is_cancelled: bool = False,
        outputs: tuple[str, ...] = (),
        parameters: str = "",
        **tensors: Any,
    ) -> None:
        self.tensors, self._is_cancelled, self._outputs = tensors, is_cancelled, outputs
        self._parameters = parameters

    def requested_output_names(self) -> list[str]:
        return list(self._outputs)

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, value) for name, value in self.tensors.items()]

    def request_id(self) -> str:
        return ""

    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def parameters(self) -> str:
        return self._parameters


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = ModuleType("triton_python_backend_utils")
    module.Tensor, module.TritonError, module.InferenceResponse = Tensor, TritonError, Response
    stages = ("slipstream_preprocessing.stage", "slipstream_postprocessing.stage")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(stub, "close_inherited", lambda: None)  # sockets here are other tests'
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()  # a stage puts its process's collector to rest
    gc.set_threshold(*thresholds)
    wake_at_once()  # as this process did before
    for name in stages:
        sys.modules.pop(name, None)


def arguments(repository: Path, model: str, **config: Any) -> dict[str, str]:
    parameters = {key: {"string_value": config.pop(key)} for key in list(config) if key != "config"}
    (repository / model / "1").mkdir(parents=True, exist_ok=True)
    given = {"parameters": parameters, "input": [], "output": []}
    return {
        "model_config": json.dumps(given),
        "model_repository": str(repository / model),
        "model_version": "1",
        "model_name": model,
    }


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    save(byte_level_bpe(), tmp_path / "tensorrt_llm" / "1" / "checkpoint")
    engine = {"wiring": "composed", "engine": {"checkpoint": "checkpoint", "max_model_len": 9}}
    (tmp_path / "tensorrt_llm" / "1" / "model.json").write_text(json.dumps(engine))
    return tmp_path


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("SLIPSTREAM_RUNTIME_DIR", str(directory))
    return directory


def post_stage(repository: Path, dynamic: bool) -> Any:
    args = arguments(repository, "postprocessing")
    config = json.loads(args["model_config"]) | ({"dynamic_batching": {}} if dynamic else {})
    model = importlib.import_module("slipstream_postprocessing.stage").TritonPythonModel()
    model.initialize(args | {"model_config": json.dumps(config)})
    return model


def test_a_stage_that_starts_in_this_process_leaves_its_sockets(utils, repository, runtime) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socketpair()[0] as end:
        post_stage(repository, dynamic=True)
        os.fstat(server.fileno())
        os.fstat(end.fileno())


def streamed(ids: list[int], slot: int, number: int, **more: Any) -> Request:
    return Request(STREAM_STATE=np.array([StreamState(slot, number).pack(ids)]), **more)


def whole(*ids: int) -> Request:
    tokens, length = np.array([[ids]], np.int32), np.array([[len(ids)]], np.int32)
    return Request(TOKENS_BATCH=tokens, SEQUENCE_LENGTH=length)


@pytest.mark.usefixtures("utils")
def test_postprocessing_answers_in_order_and_gives_credits_back(
    repository: Path, runtime: Path
) -> None:
    model = post_stage(repository, dynamic=True)
    file = CreditFile(runtime / "credits")
    tokenizer = byte_level_bpe()
    fox, dog = tokenizer.encode("fox").ids, tokenizer.encode("dog").ids
    for slot in (1, 2, 3):
        file.expect(slot, slot + 9)
    bad = streamed([-5], slot=3, number=12)
    requests = [streamed(fox, 1, 10), streamed(dog, 2, 11), bad]
    first, second, third = model.execute(requests)
    assert first.outputs["OUTPUT"].tolist() == [b"fox"]
    assert second.outputs["OUTPUT"].tolist() == [b"dog"]
    assert third.error.code == TritonError.INVALID_ARG
    assert third.error.message.startswith("INVALID_ARGUMENT: STREAM_STATE holds the neg")
    assert [file.is_acknowledged(slot, slot + 9) for slot in (1, 2, 3)] == [True] * 3
    assert model.execute([whole(*fox)])[0].outputs["OUTPUT"].tolist() == [b"fox"]
    model.finalize()


@pytest.mark.usefixtures("utils")
def test_credits_come_back_when_the_server_has_sent_what_it_was_given(
    repository: Path, runtime: Path
) -> None:
    model = post_stage(repository, dynamic=True)
    file = CreditFile(runtime / "credits")
    [taker] = file.takers()
    file.expect(1, 10)
    responses = model.execute([streamed([5], 1, 10)])  # the stub has it now
    time.sleep(0.05)
    assert not file.is_acknowledged(1, 10)
    assert file.idle_since_ns(taker, time.monotonic_ns()) is None
    del responses
    assert file.is_acknowledged(1, 10)
    assert file.taken_by(1) == taker
    model.finalize()


@pytest.mark.usefixtures("utils")
@pytest.mark.parametrize("dynamic", quick_of([False, True], [True]))
def test_postprocessing_flags_cancelled_streams_where_the_server_does_not_drop_them(
    repository: Path, runtime: Path, dynamic: bool
) -> None:
    model = post_stage(repository, dynamic)
    file = CreditFile(runtime / "credits")
    file.expect(1, 10)
    file.expect(2, 11)
    model.execute([streamed([5], 1, 10), streamed([5], 2, 11, is_cancelled=True)])
    assert not file.is_cancelled(1, 10)
    assert file.is_cancelled(2, 11) == (not dynamic)
    model.finalize()


# Milliseconds before and between tokens; the first token with a query, and every how many.
PACES = [
    (0, 1, 30, 30),
    (0, 5, 6, 6),
    (0, 10, 3, 3),
    (0, 50, 2, 3),
    (0, 70, 2, 2),
    (0, 150, 1, 1),
    (119, 10, 1, 3),
    (120, 10, 0, 3),
    (5000, 200, 0, 1),
]


@pytest.mark.usefixtures("utils")
@pytest.mark.parametrize("paces", quick_of(PACES, PACES[2::3]), ids=str)
def test_the_server_is_queried_now_and_then_for_a_cancel(
    repository: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    paces: tuple[int, int, int, int],
) -> None:
    wait_ms, pace_ms, first, every = paces
    stage = importlib.import_module("slipstream_postprocessing.stage")
    models = [post_stage(repository, dynamic=False) for _ in range(2)]
    file, now_ns, asked = CreditFile(runtime / "credits"), [10**12], []
    monkeypatch.setattr(stage, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    for begin in (5000, 4000):  # two streams, one after the other in a slot
        asked.clear()
        file.note_check(1, begin, now_ns[0])
        now_ns[0] += wait_ms * 1_000_000
        for index in range(61):
            number = begin + 1 + index
            request = streamed([5], 1, number)
            monkeypatch.setattr(request, "is_cancelled", partial(asked.append, index))
            file.expect(1, number)
            models[index % 2].execute([request])
            now_ns[0] += pace_ms * 1_000_000
        assert asked == list(range(first, 61, every))
    for model in models:
        model.finalize()


@pytest.mark.usefixtures("utils")
@pytest.mark.parametrize("dynamic", quick_of([False, True], [True]))
def test_a_made_up_state_does_not_reach_the_stream_that_has_the_slot(
    repository: Path, runtime: Path, dynamic: bool
) -> None:
    model = post_stage(repository, dynamic)
    file = CreditFile(runtime / "credits")
    file.expect(1, 10)
    for number in (9, 11, 2**40):
        [response] = model.execute([streamed([5], 1, number, is_cancelled=True)])
        assert f"slot 1 has no response {number}" in response.error.message
        assert not file.is_acknowledged(1, number)
        assert not file.is_cancelled(1, number)
    model.execute([streamed([5], 1, 10)])
    assert file.is_acknowledged(1, 10)
    model.finalize()


@pytest.mark.usefixtures("utils")
def test_beams_are_texts_of_one_response(repository: Path, runtime: Path) -> None:
    model = post_stage(repository, dynamic=True)
    file = CreditFile(runtime / "credits")
    file.expect(1, 7)
    tokenizer = byte_level_bpe()
    beams = [BeamState(tokenizer.encode(text).ids) for text in ("fox", "dog")]
    [response] = model.execute([Request(STREAM_STATE=np.array([pack_beams(1, 7, beams)]))])
    assert response.outputs["OUTPUT"].tolist() == [b"fox", b"dog"]
    assert file.is_acknowledged(1, 7)
    model.finalize()


MALFORMED: list[list[list[int]]] = [
    [[0, 1, 1]],
    [[-1, 0, 4, 1, 0, 0, 9, 0, 1, 5]],
    [[-1, 0, 4, 1 << 62, 0, 0, 1, 0, 1, 5]],
    [],
    [[-1, 0, 3, 0, 0, 0]] * 2,
    [[-2, 1, 1, 0, 0, 0, 7]],
    [[1 << 20, 1, 1, 0, 0, 0]],
    [[0, 1, 4, 0, 0, 0]],
    [[0, 1, 1, 0, 9, 0]],
    [[0, 1, 1, 0, 1 << 62, 0]],  # bytes, were they made
]


@pytest.mark.usefixtures("utils")
@pytest.mark.parametrize("rows", quick_of(MALFORMED, MALFORMED[::4]))
def test_a_malformed_stream_state_is_refused(
    repository: Path, runtime: Path, rows: list[list[int]]
) -> None:
    model = post_stage(repository, dynamic=True)
    request = Request(STREAM_STATE=np.array(rows, np.int64))
    assert "STREAM_STATE is malformed" in model.execute([request])[0].error.message
    model.finalize()


@pytest.mark.usefixtures("utils")
def test_tokens_come_in_one_way_and_not_too_many(repository: Path, runtime: Path) -> None:
    model = post_stage(repository, dynamic=True)
    both, half = streamed([5], -1, 0), whole(5)
    both.tensors |= half.tensors
    del half.tensors["SEQUENCE_LENGTH"]
    for request, message in (
        (both, "STREAM_STATE contains its tokens: leave out SEQUENCE_LENGTH"),
        (half, "SEQUENCE_LENGTH is missing"),
        (Request(), "TOKENS_BATCH is missing"),
        (Request(STREAM_STATE=np.zeros((1, 2**20 + 1), np.int64)), "1048577 integers, at most"),
    ):
        assert message in model.execute([request])[0].error.message
    model.finalize()


@pytest.mark.usefixtures("utils")
def test_a_bug_in_a_stage_shows_no_traceback_and_keeps_the_credit(
    repository: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = post_stage(repository, dynamic=True)
    monkeypatch.setattr(model, "_vocab", None)
    # What pytest keeps of a log has the traceback, its frames and all that was in them.
    logged = Mock()
    monkeypatch.setattr(sys.modules[type(model).__module__].log, "exception", logged)
    CreditFile(runtime / "credits").expect(1, 10)
    [response] = model.execute([streamed([5], 1, 10)])
    logged.assert_called_once()
    assert response.error.message == "INTERNAL: postprocessing failed"
    assert response.error.code == TritonError.INTERNAL
    assert CreditFile(runtime / "credits").is_acknowledged(1, 10)
    model.finalize()


@pytest.mark.usefixtures("utils", "runtime")
def test_preprocessing_takes_the_checkpoint_and_the_context_of_the_engine(repository: Path) -> None:
    model = importlib.import_module("slipstream_preprocessing.stage").TritonPythonModel()
    args = arguments(repository, "preprocessing", tokenizer_dir="${tokenizer_dir}")
    names = ["QUERY", "REQUEST_OUTPUT_LEN", "STOP_WORDS_DICT"]
    config = json.loads(args["model_config"]) | {"input": [{"name": name} for name in names]}
    model.initialize(args | {"model_config": json.dumps(config)})
    limit = np.array([[4]], np.int32)
    texts = ["fox", "", "x" * 1000]
    queries = [np.array([[text.encode()]], object) for text in texts]
    good, empty, long = model.execute([Request(QUERY=q, REQUEST_OUTPUT_LEN=limit) for q in queries])
    assert good.outputs["INPUT_ID"].tolist() == [byte_level_bpe().encode("fox").ids]
    assert empty.error.message == "INVALID_ARGUMENT: text_input is empty"
    assert "the context has 9" in long.error.message
    asked = [
        Request(QUERY=queries[0], REQUEST_OUTPUT_LEN=limit, parameters=text, outputs=outputs)
        for text, outputs in (
            ('{"add_special_token": false}', ()),
            ('{"add_special_tokens": false, "probe": true, "x-tenant": "a"}', ()),
            ('{"min_p": 0.5}', ("INPUT_ID", "REQUEST_OUTPUT_LEN")),  # of a step of an ensemble
        )
    ]
    misspelt, known, step = model.execute(asked)
    assert "'add_special_token'; do you mean add_special_tokens?" in misspelt.error.message
    assert (known.error, step.error) == (None, None)
    model._encoder = Mock(encode=sys.exit)
    assert model.execute([Request(QUERY=queries[0])])[0].error.code == TritonError.INTERNAL
    model.finalize()


@pytest.mark.usefixtures("utils")
def test_steps_of_an_ensemble_are_refused_where_the_engine_is_full(
    repository: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = importlib.import_module("slipstream_preprocessing.stage")
    model, args = stage.TritonPythonModel(), arguments(repository, "preprocessing")
    names = ("INPUT_ID", "REQUEST_OUTPUT_LEN")
    tensors = {
        "input": [{"name": "QUERY"}, {"name": "REQUEST_OUTPUT_LEN"}],
        "output": [{"name": name} for name in (*names, "IMAGES")],
    }
    model.initialize(
        args | {"model_config": json.dumps(json.loads(args["model_config"]) | tensors)}
    )
    tokenised: list[Any] = []
    encode = stage.encode_batch
    monkeypatch.setattr(stage, "encode_batch", lambda *a: tokenised.append(a) or encode(*a))
    asked = {"QUERY": np.array([[b"fox"]], object), "REQUEST_OUTPUT_LEN": np.int32([[4]])}
    step = Request(outputs=names, **asked)
    others = [Request(outputs=asks, **asked) for asks in (("INPUT_ID",), (*names, "IMAGES"))]
    file = LoadFile(path_of(runtime / "engine.sock"))
    monkeypatch.setattr(admission, "MAX_AGE_NS", 10**12)

    def errors(load: Load, *requests: Request) -> list[str | None]:
        file.publish(load)
        return [each.error and each.error.message for each in model.execute(requests)]

    num_ids = len(byte_level_bpe().encode("fox").ids)
    room = Load(3, 20, 1, 4, 20 + num_ids)
    assert errors(room, step, *others) == [None] * 3
    room = room._replace(num_received=1, num_received_tokens=num_ids)
    full = errors(room._replace(num_requests=4), step, *others)
    assert full == [
        f"UNAVAILABLE: the engine is full: 4 requests wait with 20 tokens, max_waiting is 4 "
        f"(1 sequences are running); retry_after_ms: {MAX_RETRY_MS}",
        None,
        None,
    ]
    tokenised.clear()
    errors(room._replace(num_requests=4), step)
    assert tokenised == []
    [long] = errors(room._replace(max_tokens=19 + num_ids), step)
    assert long is not None
    assert f"max_waiting_tokens is {19 + num_ids}, this prompt has {num_ids} (" in long
    model.finalize()


@pytest.mark.usefixtures("utils")
def test_refusals_have_labels_of_a_known_set(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = importlib.import_module("slipstream_preprocessing.stage")
    family, refusals = Mock(), stage.Refusals("preprocessing")
    refusals.close()
    for reason in (*REASONS, "new", *(f"text of a client {number}" for number in range(9))):
        refusals.count(reason)
    refusals._report(family)
    refusals._report(family)
    told = {each.kwargs["labels"]["reason"]: each for each in family.Metric.call_args_list}
    assert told.keys() == set(REASONS)
    increments = [each.args[0] for each in family.Metric.return_value.increment.call_args_list]
    assert sorted(increments) == [1] * (len(REASONS) - 1) + [11]


def test_parameters_that_are_not_given(repository: Path) -> None:
    unset = StageParameters(
        arguments(repository, "postprocessing", skip_special_tokens="${skip_special_tokens}")
    )
    assert unset.flag("skip_special_tokens", True)
    checkpoint = (repository / "tensorrt_llm/1/checkpoint").resolve()
    assert unset.tokenizer_directory() == checkpoint
    args = arguments(
        repository, "postprocessing", skip_special_tokens="False", tokenizer_dir="../../other"
    )
    given = StageParameters(args)
    assert not given.flag("skip_special_tokens", True)
    assert given.tokenizer_directory() == (repository / "other").resolve()
    wrong = StageParameters(arguments(repository, "postprocessing", skip_special_tokens="maybe"))
    with pytest.raises(ValueError, match="skip_special_tokens is 'maybe'"):
        wrong.flag("skip_special_tokens", True)
    (repository / "tensorrt_llm/1/model.json").unlink()
    with pytest.raises(ValueError, match="tokenizer_dir is not set"):
        unset.tokenizer_directory()
