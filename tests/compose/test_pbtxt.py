"""config.pbtxt as Triton's own schema reads it, and the wiring of the ensemble."""

import msgspec
import pytest
from google.protobuf import text_format
from slipstream_compose.pbtxt import MARK, model_config
from slipstream_contract.tensors import LLMAPI, MODELS, TO_LLM
from tritonclient.grpc import model_config_pb2

PARAMETERS = {"tokenizer_dir": '/models/an "odd" \\ näme', "add_special_tokens": "true"}


def parse(name: str, is_fused: bool = False):
    text = model_config(MODELS[name], PARAMETERS, is_fused)
    assert text.startswith(MARK)
    assert text == model_config(MODELS[name], PARAMETERS, is_fused)
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_llmapi_model_is_written_as_it_is_asked_for():
    named = msgspec.structs.replace(LLMAPI, name="tensorrt_llm", is_decoupled=True)
    for model in (LLMAPI, named):
        config = text_format.Parse(model_config(model, {}), model_config_pb2.ModelConfig())
        assert (config.name, config.backend, config.max_batch_size) == (model.name, "slipstream", 0)
        assert config.model_transaction_policy.decoupled == model.is_decoupled
        assert [(t.name, type_name(t.data_type), tuple(t.dims)) for t in config.input] == [
            (t.name, t.dtype, t.dims) for t in LLMAPI.inputs
        ]
        assert [(t.name, type_name(t.data_type), tuple(t.dims)) for t in config.output] == [
            (t.name, t.dtype, t.dims) for t in LLMAPI.outputs
        ]
        assert [group.count for group in config.instance_group] == [1]


def type_name(value: int) -> str:
    return model_config_pb2.DataType.Name(value).removeprefix("TYPE_")


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_schema_reads_what_is_declared(name, is_fused):
    config, model = parse(name, is_fused), MODELS[name]
    assert config.name == name
    assert config.max_batch_size == model.max_batch_size
    assert {key: value.string_value for key, value in config.parameters.items()} == PARAMETERS
    read = [
        (t.name, type_name(t.data_type), tuple(t.dims), t.optional, t.allow_ragged_batch)
        for t in config.input
    ]
    assert read == [(t.name, t.dtype, t.dims, t.is_optional, t.is_ragged) for t in model.inputs]
    outputs = [(t.name, type_name(t.data_type), tuple(t.dims)) for t in config.output]
    assert outputs == [(t.name, t.dtype, t.dims) for t in model.outputs]
    for tensor in config.input:
        is_scalar = tensor.HasField("reshape") and list(tensor.reshape.shape) == []
        assert is_scalar == model.input(tensor.name).is_scalar


def test_each_model_has_its_backend():
    backends = {name: parse(name).backend or parse(name).platform for name in MODELS}
    assert backends == {
        "ensemble": "ensemble",
        "preprocessing": "slipstream_preprocessing",
        "tensorrt_llm": "slipstream",
        "postprocessing": "slipstream_postprocessing",
        "tensorrt_llm_bls": "slipstream",
        "vllm_model": "slipstream",
        "slipstream_health": "slipstream",
    }
    for name in MODELS:
        config = parse(name)
        is_stage = name in ("preprocessing", "postprocessing")
        assert config.HasField("dynamic_batching") == (name == "preprocessing")
        # A text that lies about its length fails all that are handed over with it.
        preferred = list(config.dynamic_batching.preferred_batch_size)
        assert preferred == ([1] if name == "preprocessing" else [])
        groups = [(group.count, group.Kind.Name(group.kind)) for group in config.instance_group]
        kind = "KIND_CPU" if is_stage else "KIND_MODEL"
        count = 1 if name in ("tensorrt_llm", "slipstream_health") else 2
        assert groups == ([] if name == "ensemble" else [(count, kind)])
    decoupled = {n for n in MODELS if parse(n).model_transaction_policy.decoupled}
    assert decoupled == {"tensorrt_llm", "tensorrt_llm_bls", "vllm_model"}


def test_the_fused_ensemble_is_the_same_to_its_clients():
    composed, fused = parse("ensemble"), parse("ensemble", is_fused=True)
    assert list(fused.input) == list(composed.input)
    assert list(fused.output) == list(composed.output)
    assert fused.backend == "slipstream"
    assert fused.model_transaction_policy.decoupled
    assert not fused.HasField("ensemble_scheduling")


def steps():
    found = {step.model_name: step for step in parse("ensemble").ensemble_scheduling.step}
    assert list(found) == ["preprocessing", "tensorrt_llm", "postprocessing"]
    return found


def test_every_edge_of_the_ensemble_joins_tensors_of_one_type():
    sources = {tensor.name: tensor for tensor in MODELS["ensemble"].inputs}
    sinks = []
    for name, step in steps().items():
        model = MODELS[name]
        for inner, outer in step.input_map.items():
            sinks.append((name, model.input(inner), outer))
        for inner, outer in step.output_map.items():
            assert outer not in sources, f"{outer} has two sources"
            sources[outer] = model.output(inner)
    for name, tensor, outer in sinks:
        source = sources[outer]
        assert source.dtype == tensor.dtype, (name, tensor.name)
        assert len(source.dims) == len(tensor.dims), (name, tensor.name)
        pairs = zip(source.dims, tensor.dims, strict=True)
        assert all(-1 in pair or pair[0] == pair[1] for pair in pairs), (name, tensor.name)
        # What may be missing must be optional where it arrives.
        assert tensor.is_optional or not source.is_optional
    for tensor in MODELS["ensemble"].outputs:
        assert sources[tensor.name].dtype == tensor.dtype


def test_every_input_of_the_ensemble_arrives_somewhere():
    used = {outer for step in steps().values() for outer in step.input_map.values()}
    assert used >= {tensor.name for tensor in MODELS["ensemble"].inputs}


def test_required_inputs_of_every_step_are_mapped():
    for name, step in steps().items():
        required = {t.name for t in MODELS[name].inputs if not t.is_optional}
        assert required <= set(step.input_map)


def test_names_that_differ():
    mapped = steps()["tensorrt_llm"].input_map
    assert {outer: inner for inner, outer in mapped.items() if outer in TO_LLM} == TO_LLM
    assert dict(steps()["postprocessing"].output_map) == {"OUTPUT": "text_output"}


def test_postprocessing_takes_nothing_from_preprocessing():
    made = set(steps()["preprocessing"].output_map.values())
    assert not made & set(steps()["postprocessing"].input_map.values())
