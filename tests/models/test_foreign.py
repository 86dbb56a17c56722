"""Transformers' own classes with paged attention: their logits and tokens, and what is refused."""

import contextlib
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Asker,
    Driver,
    Generation,
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    rewrite,
    save,
)
from fixtures.models.foreign import SHAPES, make_foreign
from slipstream.config import EngineConfig
from slipstream.engine.scheduler import Limits
from slipstream.errors import CheckpointError, ConfigError
from slipstream.layers.decoder import Decoder
from slipstream.models.backends import read_checkpoint
from slipstream.models.check import check_tensors
from slipstream.models.foreign import decoder as foreign_decoder
from slipstream.models.foreign.parts import empty_model
from slipstream.models.hf import supported
from slipstream.models.padding import with_heads_of
from slipstream.preflight import preflight
from slipstream.runner import plan as plan_module
from slipstream.runner.plan import settle
from slipstream_contract.sampling import SamplingParams

NAME = "transformers"
JAIS, PERSIMMON, EXAONE, _, HYPERCLOVA, BITNET = SHAPES


def is_greedy(model: torch.nn.Module, prompt: list[int], outputs: list[int]) -> bool:
    """Whether transformers' class gives each token behind those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + outputs[:-1]])).logits[0, len(prompt) - 1 :]
    return bool(logits.argmax(-1).tolist() == outputs)


def check(model: torch.nn.Module, generation: Generation, tolerance: float = 1e-4) -> None:
    with torch.no_grad():
        truth = model(torch.tensor([generation.tokens])).logits[0]
    first = len(generation.prompt) - 1
    for i, (token, logits) in enumerate(zip(generation.outputs, generation.logits, strict=True)):
        assert (logits - truth[first + i]).abs().max() <= tolerance
        assert token == int(truth[first + i].argmax())


def test_an_architecture_is_not_ours() -> None:
    """Others are: their classes run them because that is asked for."""
    assert BITNET not in supported()


@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_chunks_and_decodes(name: str, tmp_path: Path) -> None:
    """Chunks of 13 beside decodes, blocks of 8, windows of 21: logits within 1e-4."""
    model = make_foreign(name)
    driver = Driver(make_runner(save(model, tmp_path), backend_model=NAME), keep_logits=True)
    generations = [Generation(p, 5 + i) for i, p in enumerate(random_prompts([37, 1, 90, 8, 16]))]
    driver.step(generations[:1], 7)
    driver.finish(generations, chunk=13)
    for generation in generations:
        check(model, generation)


MIXTURES: dict[str, dict[str, object]] = {
    # Routers by logistic scores with corrections, dense layers first.
    "HYV3ForCausalLM": {"num_experts": 8, "first_k_dense_replace": 1},
    "AfmoeForCausalLM": {"num_experts": 8, "layer_types": ["full_attention"] * 3},
    "Cohere2MoeForCausalLM": {"num_experts": 8, "tie_word_embeddings": True},
    # Names of checkpoints that the class does not have.
    "MixtralForCausalLM": {"num_local_experts": 4, "sliding_window": 9},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_whose_experts_are_stored_one_by_one(name: str, tmp_path: Path) -> None:
    own = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "pad_token_id": 0}
    model = make_foreign(name, **own | MIXTURES[name])
    driver = Driver(make_runner(save(model, tmp_path), backend_model=NAME), keep_logits=True)
    generations = [Generation(p, 4) for p in random_prompts([37, 1, 16])]
    driver.finish(generations, chunk=13)
    for generation in generations:
        check(model, generation)


def test_what_a_class_keeps_in_float32_is_so(tmp_path: Path) -> None:
    model = make_foreign("HYV3ForCausalLM", num_experts=8, moe_intermediate_size=48, pad_token_id=0)
    runner = make_runner(save(model, tmp_path), backend_model=NAME, dtype="bfloat16")
    decoder = runner._model
    assert isinstance(decoder, foreign_decoder.ForeignDecoder)
    wide = [x.shape for x in decoder.tensors if x.dtype == torch.float32 and x.shape == (8,)]
    assert len(wide) == sum("correction" in name for name in model.state_dict())
    generation = Generation(random_prompts([40])[0], 1)
    Driver(runner, keep_logits=True).finish([generation])
    with torch.no_grad():
        truth = model(torch.tensor([generation.prompt])).logits[0, -1]
    assert (generation.logits[0] - truth).pow(2).mean().sqrt() <= 0.3 * truth.std()


def test_models_made_at_once_leave_the_default_dtype() -> None:
    """Each sets the dtype of the process and restores what it found, as transformers does."""
    found: list[torch.dtype] = []
    both = threading.Barrier(2)

    class Kind:
        @staticmethod
        def _from_config(config: object, dtype: torch.dtype, **_: object) -> torch.nn.Module:
            before = torch.get_default_dtype()
            found.append(before)
            torch.set_default_dtype(dtype)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)
            torch.set_default_dtype(before)
            return torch.nn.Identity()

    before = torch.get_default_dtype()
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda _: empty_model(Kind, None, torch.bfloat16), range(2)))
        assert found == [before, before]
        assert torch.get_default_dtype() == before
    finally:
        torch.set_default_dtype(before)


def test_a_preempted_sequence_goes_on(tmp_path: Path) -> None:
    model = make_foreign(EXAONE)
    driver = Driver(make_runner(save(model, tmp_path), backend_model=NAME), keep_logits=True)
    generation = Generation(random_prompts([30])[0], 9)
    for _ in range(4):
        driver.step([generation], 19)
    driver.preempt(generation)
    driver.finish([generation], 19)
    check(model, generation)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (JAIS, {}),
        pytest.param(EXAONE, {"speculation": "lookup"}, marks=pytest.mark.rest),
        pytest.param(PERSIMMON, {"block_size": 16}, marks=pytest.mark.rest),
    ],
)
def test_tokens_of_the_engine(name: str, options: dict[str, object], tmp_path: Path) -> None:
    """Greedy tokens with shared prefixes, small steps and a cache that does not hold all."""
    model = make_foreign(name)
    settings = {"backend_model": NAME, "kv_cache_tokens": 320 if name == EXAONE else 176} | options
    asker = Asker(make_runner(save(model, tmp_path), **settings), Limits(6, 37))
    shared, *ends = random_prompts([40, 3, 20, 1, 33, 9, 28])
    prompts = [shared[: 40 - i % 2] + end for i, end in enumerate(ends)]
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    numbers = [asker.submit(prompts[0], sampling)]
    asker.drain()
    numbers += [asker.submit(prompt, sampling) for prompt in prompts[1:]]
    asker.drain()
    for number, prompt in zip(numbers, prompts, strict=True):
        outputs = asker.answers[number, 0].token_ids
        assert len(outputs) == 24
        assert is_greedy(model, prompt, outputs)
    counters = asker.engine.figures().counters
    assert counters["prefix_hits"] > 0 or name == EXAONE  # it lies outside of its windows
    assert counters["preemptions"] > 0 or "speculation" in options


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.rest)],
)
def test_other_dtypes(options: dict[str, object], tmp_path: Path) -> None:
    """Logits are near those of fp32, of a cache of 8 bits as of weights of 16."""
    model = make_foreign(JAIS)
    runner = make_runner(save(model, tmp_path), backend_model=NAME, block_size=32, **options)
    driver, generation = Driver(runner, keep_logits=True), Generation(random_prompts([50])[0], 1)
    driver.finish([generation], 17)
    with torch.no_grad():
        truth = model(torch.tensor([generation.prompt])).logits[0, -1]
    error = (generation.logits[0] - truth).pow(2).mean().sqrt()
    assert 0 < error <= 0.05 * truth.pow(2).mean().sqrt()


def test_larger_heads_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which has kernels for some sizes of heads."""
    model = make_foreign(EXAONE, head_dim=24)
    monkeypatch.setattr(plan_module, "model_on", lambda _, read: with_heads_of(read, (32, 64)))
    runner = make_runner(save(model, tmp_path), backend_model=NAME)
    assert runner._caches[0].shape[-1] == 32
    driver, generation = Driver(runner, keep_logits=True), Generation(random_prompts([50])[0], 3)
    driver.finish([generation], 17)
    check(model, generation)


def test_what_a_start_reads_and_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sizes, windows, matrices and the end token; one line says that it is slower."""
    model = make_foreign(EXAONE)
    config = read_checkpoint(save(model, tmp_path), NAME)
    assert config.windows == (21, 21, 0)
    assert (config.dims.num_layers, config.dims.head_size, config.eos_ids) == (3, 32, (2,))
    plan = settle(EngineConfig(checkpoint=str(tmp_path), backend_model=NAME), torch.device("cpu"))
    parameters = sum(p.numel() for p in model.parameters())
    assert 0 <= plan.weight_bytes - 4 * parameters < 1000  # frequencies of the rotation
    blocks = [p for p in model.model.layers.parameters() if p.ndim > 1]
    assert plan.block_elements == sum(p.numel() for p in blocks)
    others = save(make_foreign(BITNET), tmp_path / "others")
    for path, how in ((tmp_path, NAME), (others, "auto")):
        asked = EngineConfig(checkpoint=str(path), device="cpu", backend_model=how)
        assert "slower" in " ".join(preflight(asked).notes)
    with caplog.at_level(logging.WARNING):
        make_runner(tmp_path, backend_model=NAME, load_format="random")
    assert sum("transformers' own class" in record.message for record in caplog.records) == 1


def test_auto_prefers_a_family(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path / "llama")
    assert isinstance(make_runner(tmp_path / "llama", backend_model="auto")._model, Decoder)
    save(make_foreign(BITNET), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"is not supported.*--backend-model transformers"):
        make_runner(tmp_path / "other")
    with pytest.raises(ConfigError, match="backend_model = 'ours' is not one of auto, slipstream"):
        make_runner(tmp_path / "other", backend_model="ours")


def test_tied_weights_that_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is used as it is; a head alone is the embedding, too."""
    model = make_foreign(HYPERCLOVA)
    save(model, tmp_path)
    generation = Generation(random_prompts([20])[0], 2)

    def move(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(tmp_path, move)
    driver = Driver(make_runner(tmp_path, backend_model=NAME), keep_logits=True)
    driver.finish([generation])
    check(model, generation)
    head = torch.randn(1009, 128, generator=torch.Generator().manual_seed(3)) / 11
    embedding = model.model.embed_tokens.weight.detach().clone()
    rewrite(
        tmp_path,
        lambda t: t.update({"lm_head.weight": head, "model.embed_tokens.weight": embedding}),
    )
    model.lm_head.weight = torch.nn.Parameter(head)
    driver = Driver(make_runner(tmp_path, backend_model=NAME), keep_logits=True)
    generation = Generation(random_prompts([20])[0], 2)
    driver.finish([generation])
    check(model, generation)
    assert "differ: each is used" in caplog.text


def test_tensors_of_another_model(tmp_path: Path) -> None:
    """A tensor that is missing or has no place is named, before and while weights are read."""
    save(make_foreign(JAIS), tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    config = read_checkpoint(tmp_path, NAME)
    kept: list[torch.Tensor] = []
    rewrite(tmp_path, lambda tensors: kept.append(tensors.pop(name)))
    for look in (
        lambda: check_tensors(tmp_path, config),
        lambda: make_runner(tmp_path, backend_model=NAME),
    ):
        with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
            look()
    rewrite(
        tmp_path, lambda tensors: tensors.update({name: kept[0], "extra.weight": kept[0].clone()})
    )
    with pytest.raises(CheckpointError, match=r"extra\.weight .* has no place"):
        check_tensors(tmp_path, config)


def of_class(directory: Path, name: str, *removed: str, **keys: object) -> Path:
    """Write a config.json of the class, without weights: what is refused is so before they are."""
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(num_hidden_layers=2).to_dict() | {"architectures": [name]} | keys
    directory.mkdir(exist_ok=True)
    left = {key: value for key, value in config.items() if key not in removed}
    (directory / "config.json").write_text(json.dumps(left, default=str))
    return directory


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("GPTJForCausalLM", {}, "AttentionInterface"),
        ("BloomForCausalLM", {}, "takes no position_ids"),  # ALiBi
        ("MambaForCausalLM", {}, "states of another kind"),
        ("Gemma2ForCausalLM", {}, "softcap"),
        ("GraniteSWAForCausalLM", {}, "s_aux"),  # sinks
        ("BertLMHeadModel", {}, "is_causal = false"),
        ("MiniCPM3ForCausalLM", {}, "values of 64"),  # latent attention
        ("DiffLlamaForCausalLM", {}, "attention runs 4 times in num_hidden_layers = 2"),
        ("HrmTextForCausalLM", {}, "checkpoints have its tensors in other pieces"),
        ("DeepseekV3ForCausalLM", {}, "values of 128"),
        ("MarianForCausalLM", {"is_encoder_decoder": True}, "is_encoder_decoder = True"),
        ("T5ForConditionalGeneration", {}, "is no decoder that transformers"),
        ("MoshiForCausalLM", {}, "sliding_window = 3000 does not reach"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "runs 1 times"),
        (
            "ArceeForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotation is dynamic",
        ),
        ("ArceeForCausalLM", {"auto_map": {"AutoModelForCausalLM": "a.B"}}, "which is never run"),
        ("ArceeForCausalLM", {"model_type": "llama"}, "model_type = 'llama' is not that of"),
        ("ArceeForCausalLM", {"num_hidden_layers": 10**9}, "is above 10000"),
        ("ArceeForCausalLM", {"hidden_size": "wide"}, "is not read by transformers"),
        ("ArceeForCausalLM", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
    ],
)
def test_refused_by_name(name: str, keys: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(of_class(tmp_path, name, **keys), NAME)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantization", "int8"),
        ("deterministic", True),
        ("attention_window", 64),
        ("speculation", "medusa"),
    ],
)
def test_settings_that_need_a_family(field: str, value: object, tmp_path: Path) -> None:
    of_class(tmp_path, "ArceeForCausalLM", eos_token_id=2)
    with pytest.raises(ConfigError, match=f"^{field} = {value!r} does not go with backend_model"):
        make_runner(tmp_path, backend_model=NAME, load_format="random", **{field: value})


def test_tokens_that_see_others_beside_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that mixes a token with the one before, as a convolution does, is refused."""
    save(make_foreign(JAIS), tmp_path)
    usual = foreign_decoder.empty_model

    def mixed(*arguments: object) -> torch.nn.Module:
        model = usual(*arguments)
        mlp = model.model.layers[0].mlp
        mlp.register_forward_hook(lambda _, given, made: made + 0.1 * made.roll(1, 1))
        return model

    monkeypatch.setattr(foreign_decoder, "empty_model", mixed)
    with pytest.raises(CheckpointError, match="see others than through attention"):
        make_runner(tmp_path, backend_model=NAME)


def test_a_family_is_its_own_oracle(tmp_path: Path) -> None:
    """The class and the family of an architecture give the same logits."""
    model = make_model("llama")
    save(model, tmp_path)
    edit_config(tmp_path, unused=3)
    (prompt,) = random_prompts([30])
    found = []
    for backend in ("slipstream", NAME):
        driver = Driver(make_runner(tmp_path, backend_model=backend), keep_logits=True)
        generation = Generation(prompt, 4)
        driver.finish([generation], 11)
        found.append(generation)
    assert found[0].outputs == found[1].outputs
    torch.testing.assert_close(found[0].logits, found[1].logits, atol=1e-4, rtol=0)
