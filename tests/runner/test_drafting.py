"""Drafters with weights: tokens are those without, drafts those of plain references."""

import json
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drafters import (
    PlainEagle3,
    SpeculatingDriver,
    medusa_logits,
    save_eagle3,
    save_medusa,
)
from fixtures.tiers import quick_of
from msgspec.structs import replace
from slipstream.core.batch import Batch
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.drafts.choices import chain_length
from slipstream.models.drafts.tokens import check_same_tokens
from slipstream.runner.step_shape import StepShape
from slipstream_contract.sampling import SamplingParams

SAMPLED = SamplingParams(max_tokens=1, temperature=0.8, top_k=40, top_p=0.9)
LENGTHS = [37, 1, 90, 8, 16]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    model = make_model("llama", num_hidden_layers=3)
    return save(model, tmp_path_factory.mktemp("target")), model


def generations(sampling: SamplingParams, count: int = 12) -> list[Generation]:
    return [
        Generation(prompt, count + i, sampling, seed=i)
        for i, prompt in enumerate(random_prompts(LENGTHS))
    ]


def plain(directory: Path, sampling: SamplingParams, **overrides: object) -> list[list[int]]:
    found = generations(sampling)
    Driver(make_runner(directory, **overrides)).finish(found, 13)
    return [g.outputs for g in found]


def speculate(
    directory: Path, sampling: SamplingParams, num_drafts: int = 3, **overrides: object
) -> tuple[list[list[int]], SpeculatingDriver]:
    runner = make_runner(directory, num_draft_tokens=num_drafts, **overrides)
    driver, found = SpeculatingDriver(runner, num_drafts), generations(sampling)
    driver.finish(found, 13)
    return [g.outputs for g in found], driver


def draft_directory(name: str, tmp_path: Path) -> Path:
    """A random drafter's checkpoint."""
    if name == "medusa":
        save_medusa(tmp_path / name)
    elif name == "eagle3":
        save_eagle3(tmp_path / name)
    else:
        small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2}
        save(make_model("qwen3", **small, num_key_value_heads=1), tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("draft", 0.8),
        pytest.param("draft", 0.0, marks=pytest.mark.rest),
        pytest.param("medusa", 0.8, marks=pytest.mark.rest),
        ("medusa", 0.0),
        pytest.param("eagle3", 0.8, marks=pytest.mark.rest),
        ("eagle3", 0.0),
    ],
)
def test_tokens_are_those_without_drafts(name, temperature, target, tmp_path) -> None:
    sampling = SAMPLED if temperature else SamplingParams(max_tokens=1, temperature=0.0)
    found, driver = speculate(
        target[0], sampling, speculation=name, draft_checkpoint=str(draft_directory(name, tmp_path))
    )
    assert found == plain(target[0], sampling)
    assert sum(driver.drafted.proposed) > 0
    assert driver.drafted.rate < 0.2  # random weights


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_target_as_its_own_draft_is_always_right(temperature, target) -> None:
    sampling = SAMPLED if temperature else SamplingParams(max_tokens=1, temperature=0.0)
    found, driver = speculate(
        target[0], sampling, speculation="draft", draft_checkpoint=str(target[0])
    )
    assert found == plain(target[0], sampling)
    assert driver.drafted.rate == 1.0
    # A step makes four tokens, but for the end of each.
    assert len(driver.drafted.proposed) == 3


def test_medusa_drafts_are_those_of_the_definition(target, tmp_path) -> None:
    for blocks, has_outputs in ((1, True), (2, False)):
        directory = tmp_path / str(blocks)
        tensors = save_medusa(directory, 3, blocks, has_outputs=has_outputs)
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        _, driver = speculate(
            target[0], greedy, speculation="medusa", draft_checkpoint=str(directory)
        )
        model = target[1]
        for tokens, drafts in driver.drafted.chains:
            with torch.no_grad():
                states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
            heads = [medusa_logits(tensors, i, states, model.lm_head.weight) for i in range(3)]
            assert drafts == [int(logits.argmax()) for logits in heads]


@pytest.mark.parametrize("chunk", quick_of([5, 1000], [5]))
def test_eagle3_drafts_are_those_of_the_definition(chunk, target, tmp_path) -> None:
    tensors = save_eagle3(tmp_path)
    overrides = {"speculation": "eagle3", "draft_checkpoint": str(tmp_path)}
    runner = make_runner(target[0], num_draft_tokens=4, **overrides)
    driver = SpeculatingDriver(runner, 4)
    found = [Generation(prompt, 9) for prompt in random_prompts(LENGTHS)]
    driver.finish(found, chunk)
    model = target[1]
    reference = PlainEagle3(tensors, model.model.embed_tokens.weight.detach())
    assert len(driver.drafted.chains) > 20
    for tokens, drafts in driver.drafted.chains:
        with torch.no_grad():
            states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        taps = torch.cat([states[i][0] for i in (0, 1, 2)], -1)
        assert drafts == reference.greedy(tokens, taps, 4)


def test_draft_model_drafts_are_those_of_transformers(target, tmp_path) -> None:
    small = make_model("qwen3", num_hidden_layers=2, hidden_size=64)
    save(small, tmp_path)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    _, driver = speculate(target[0], greedy, speculation="draft", draft_checkpoint=str(tmp_path))
    for tokens, drafts in driver.drafted.chains:
        for draft in drafts:
            with torch.no_grad():
                logits = small(torch.tensor([tokens])).logits[0, -1]
            assert draft == int(logits.argmax())
            tokens = [*tokens, draft]


def test_a_table_without_room_has_shorter_chains(target) -> None:
    runner = make_runner(
        target[0], speculation="draft", draft_checkpoint=str(target[0]), num_draft_tokens=3
    )
    driver = SpeculatingDriver(runner, 3)
    generation = Generation(random_prompts([6])[0], 4)
    rows = driver._rows(0, generation, 100)
    cut = [replace(row, tables=([row.tables[0][0]],)) for row in rows]
    drafts = runner.run(Batch(tuple(cut), 0)).drafts
    assert len(drafts[0]) == 2  # places 6 and 7 of a block of 8


@pytest.mark.parametrize("name", quick_of(["draft", "medusa", "eagle3"], ["eagle3"]))
def test_deterministic_mode(name, target, tmp_path) -> None:
    directory = str(draft_directory(name, tmp_path))
    found, _ = speculate(
        target[0], SAMPLED, speculation=name, draft_checkpoint=directory, deterministic=True
    )
    assert found == plain(target[0], SAMPLED, deterministic=True)


@pytest.mark.parametrize("name", quick_of(["draft", "medusa", "eagle3"], ["medusa"]))
def test_warming_changes_nothing(name, target, tmp_path) -> None:
    runner = make_runner(
        target[0], speculation=name, draft_checkpoint=str(draft_directory(name, tmp_path))
    )
    runner._warm_drafts(StepShape(20, 4, 3, 4, 17))
    assert all(not bool(cache.any()) or name == "eagle3" for cache in runner._in_blocks)


# --- refused by name ---------------------------------------------------------------------------


def test_choices() -> None:
    assert chain_length("medusa_choices", "{0}, {0, 0}, {0,0,0}") == 3
    assert chain_length("medusa_choices", "{{0}, {0, 0}}") == 2
    for wrong, why in (
        ("{0}, {1}", "is a tree"),
        ("{0, 0}", "is a tree"),
        ("0, 0", "is not a list"),
        ("{0}" * 2000, "more than 4096"),
    ):
        with pytest.raises(ConfigError, match=f"medusa_choices.*{why}"):
            chain_length("medusa_choices", wrong)


def refused(target: Path, message: str, **overrides: object) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        make_runner(target, **overrides)


def test_configurations_that_are_refused(target, tmp_path) -> None:
    save_medusa(tmp_path / "medusa")
    medusa = {"speculation": "medusa", "draft_checkpoint": str(tmp_path / "medusa")}
    path = target[0]
    refused(path, "speculation = medusa needs a draft_checkpoint", speculation="medusa")
    refused(path, "draft_checkpoint needs a speculation", draft_checkpoint=str(path))
    four = "{0}, {0, 0}, {0, 0, 0}, {0, 0, 0, 0}"
    refused(path, "asks for 4 drafts, but medusa_num_heads = 3", **medusa, medusa_choices=four)
    known = "none, lookup, suffix, auto, forced, synthetic, draft, "
    refused(path, f"speculation = 'tree' is not one of {known}", speculation="tree")
    refused(path, "eagle_choices needs speculation = eagle3", **medusa, eagle_choices="{0}")
    refused(path, "medusa_choices = .* is a tree", **medusa, medusa_choices="{0},{1}")
    refused(path, "num_draft_tokens = 99 is above 64", **medusa, num_draft_tokens=99)
    refused(path, "no such directory", speculation="medusa", draft_checkpoint="/nowhere")
    own = {"speculation": "draft", "draft_checkpoint": str(path)}
    refused(path, "draft does not go with attention_window", **own, attention_window=64)


def test_windows_everywhere_are_refused(tmp_path) -> None:
    model = save(make_model("mistral", sliding_window=16), tmp_path / "model")
    own = {"speculation": "draft", "draft_checkpoint": str(model)}
    refused(model, "needs a layer of full attention", **own)


def test_medusa_checkpoints_that_are_refused(target, tmp_path) -> None:
    path, medusa = target[0], {"speculation": "medusa", "num_draft_tokens": 2}
    save_medusa(tmp_path / "wide", hidden_size=64)
    refused(path, r"0.0.linear.weight is \[64, 64\]", **medusa, draft_checkpoint=tmp_path / "wide")
    save_medusa(tmp_path / "vocab", vocab_size=1010)
    refused(path, r"0.1.weight is \[1010, 128\]", **medusa, draft_checkpoint=tmp_path / "vocab")
    save_medusa(tmp_path / "fewer")
    edit_config(tmp_path / "fewer", medusa_num_heads=2)
    refused(path, "has no place", **medusa, draft_checkpoint=tmp_path / "fewer")
    edit_config(tmp_path / "fewer", "medusa_num_heads")
    refused(path, "medusa_num_heads is missing", **medusa, draft_checkpoint=tmp_path / "fewer")


EAGLE_CASES = {
    "hidden_size": ({"hidden_size": 64}, "hidden_size = 64 is not the target's, 128"),
    "vocab": ({"vocab_size": 1010}, "vocab_size = 1010 is not the target's, 1009"),
    "layers": ({"num_hidden_layers": 2}, "num_hidden_layers = 2 is not 1"),
    "taps": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "is not a list of three"),
    "eagle 1": ({"draft_vocab_size": None}, "an EAGLE-1 or EAGLE-2 draft"),
    "family": ({"architectures": ["EagleForCausalLM"]}, "architectures = .* no EAGLE-3"),
    "no taps": ({"eagle_aux_hidden_state_layer_ids": None}, "no low, middle and high layer"),
}


@pytest.mark.parametrize("name", EAGLE_CASES)
def test_eagle3_configurations_that_are_refused(name, target, tmp_path) -> None:
    changes, message = EAGLE_CASES[name]
    save_eagle3(tmp_path)
    edit_config(tmp_path, **changes)
    refused(target[0], message, speculation="eagle3", draft_checkpoint=str(tmp_path))


def test_eagle3_tensors_that_are_refused(target, tmp_path) -> None:
    from safetensors.torch import save_file

    tensors = save_eagle3(tmp_path)
    first = int(tensors["d2t"][0])

    def with_(name: str, value: torch.Tensor, message: str) -> None:
        changed = {k: v.clone() for k, v in tensors.items()} | {name: value}
        save_file(changed, tmp_path / "model.safetensors")
        refused(target[0], message, speculation="eagle3", draft_checkpoint=str(tmp_path))

    with_("fc.weight", torch.zeros(128, 256), "an EAGLE-1 or EAGLE-2 draft")
    with_("d2t", torch.zeros(399, dtype=torch.int64), r"d2t is \[399\], not \[400\]")
    with_("d2t", torch.full((400,), 5000), "d2t leaves a vocabulary of 1009")
    with_("d2t", tensors["d2t"].index_fill(0, torch.tensor([1]), first - 1), "gives a token twice")
    with_("t2d", ~tensors["t2d"], "t2d contradicts d2t")


def test_tokenizers_are_compared(tmp_path) -> None:
    def write(name: str, **vocab: int) -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        added = [{"id": 9, "content": "<end>", "special": name != "plain"}]
        data = {"model": {"vocab": vocab}, "added_tokens": added}
        (directory / "tokenizer.json").write_text(json.dumps(data))
        return directory

    own = write("own", a=0, b=1)
    check_same_tokens(own, write("same", a=0, b=1))
    check_same_tokens(tmp_path, own)  # a target without one
    for directory, message in (
        (write("swapped", a=1, b=0), "token 'a' is 1, but 0"),
        (write("more", a=0, b=1, c=2), "token 'c' is 2, but None"),
        (write("plain", a=0, b=1), "token '<end>' is special in only one"),
        (tmp_path / "none", "no such file to compare"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_same_tokens(own, directory)
