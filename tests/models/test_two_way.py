"""ChatGLM 1: tokens of a prompt see each other, answers stand at two positions; against fp64."""

import logging
import random
from pathlib import Path

import pytest
import torch
from fixtures.engine.ticks import ticks
from fixtures.models.adapters import Pairs, scale_of, write_adapter, write_prefix
from fixtures.models.checkpoints import GREEDY, make_runner
from fixtures.models.remote import Remote
from fixtures.models.two_way import chatglm1, logits_of, prompt, turned
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch, Row
from slipstream.core.two_way import Sight
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.engine.settings import limits_of
from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels.attention.backend import TorchCpu
from slipstream.kernels.attention.spec import PREFIX, AttentionSpec
from slipstream.layers.dims import RopeConfig
from slipstream.layers.two_way import SECOND, TwoWays
from slipstream.models.hf import read_config
from slipstream.models.transforms import arranged, head_order
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import Submit
from slipstream_contract.beams import Beams
from slipstream_contract.drafts import Drafts
from slipstream_contract.errors import ContractError
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

SEEDS = [pytest.param(seed, marks=[] if seed < 2 else [pytest.mark.rest]) for seed in range(6)]
RANK = 5  # of adapters
SIZES = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
_log = logging.getLogger(__name__)


def made(path: Path, **changes: object) -> tuple[ModelRunner, Limits]:
    """A runner on the CPU in fp32, and the limits of its engine."""
    runner = make_runner(path, **SIZES | changes)
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 8192, "block_size": 8}
    config = EngineConfig(checkpoint=str(path), **(settings | SIZES | changes))
    return runner, limits_of(config, resolve(config))


def run(engine: Engine, prompts: list[list[int]], num_outputs: int) -> list[list[int]]:
    """Greedy tokens of prompts: one comes, then all others at once."""
    outputs: list[list[int]] = [[] for _ in prompts]
    sampling = SamplingParams(max_tokens=num_outputs, temperature=0.0)
    asked = [Submit(i, pack(each), sampling, 0) for i, each in enumerate(prompts)]
    engine.submit(b"bridge", asked[0])
    while engine.has_work:
        for tokens in engine.step().get(b"bridge", []):
            outputs[tokens.request] += tokens.token_ids
        engine.check_integrity()
        while len(asked) > 1:
            engine.submit(b"bridge", asked.pop(1))
    return outputs


def check(model: Remote, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Every token is the likeliest of one dense pass over the whole sequence."""
    for asked, said in zip(prompts, outputs, strict=True):
        truth = model(torch.tensor([asked + said])).logits[0][len(asked) - 1 : -1]
        assert said == truth.argmax(-1).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_configuration(seed: int, tmp_path: Path) -> None:
    """The same tokens beside decodes, over borders of blocks and preemption; logits by 1e-4."""
    rng = random.Random(f"chatglm1 {seed}")
    model = chatglm1(rng)
    model.save(tmp_path)
    _log.warning("seed %d: %s", seed, model.keys)
    lengths = [rng.randrange(2, 20), *(rng.randrange(20, 58) for _ in range(4))]
    prompts = [prompt(rng, model.keys, n, rng.choice(["gmask", "mask"])) for n in lengths]
    prompts[1].append(prompts[1][0])  # behind where the answer begins: seen one way
    runner, limits = made(tmp_path, kv_cache_tokens=rng.choice([136, 152]))
    engine = Engine(limits, runner, None, clock=ticks())
    outputs = run(engine, prompts, 24)
    assert [len(each) for each in outputs] == [24] * len(prompts)
    assert engine._scheduler.num_preemptions > 0
    check(model, prompts, outputs)
    runner = make_runner(tmp_path, max_num_batched_tokens=256)
    sequences = [a + b for a, b in zip(prompts, outputs, strict=True)][:3]
    for logits, truth in logits_of(runner, model, sequences, rng):
        assert (logits - truth).abs().max() <= 1e-4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Remote]:
    path = tmp_path_factory.mktemp("chatglm1")
    model = chatglm1(random.Random(1))
    return model.save(path), model


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculation", "lookup"),
        ("tensor_parallel", 2),
        ("pipeline_parallel", 2),
        ("attention_window", 20),
        ("deterministic", True),
        ("kv_cache_dtype", "int8"),
        ("kv_cache_host_bytes", 1 << 20),
    ],
)
def test_what_needs_prompts_of_one_way_is_refused(
    field: str, value: object, small: tuple[Path, Remote]
) -> None:
    with pytest.raises(ConfigError, match=f"{field} = {value!r} does not go with ") as error:
        made(small[0], **{field: value})
    assert "ChatGLM1Model, whose tokens of a prompt see each other" in str(error.value)


def test_requests_that_are_refused(small: tuple[Path, Remote]) -> None:
    """Prompts that do not fit a step, or do not say where the answer is; and what cannot be had."""
    path, model = small
    runner, limits = made(path)
    engine = Engine(limits, runner, None)
    own = {name: int(str(model.keys[f"{name}_token_id"])) for name in ("bos", "mask", "gmask")}
    text = prompt(random.Random(0), model.keys, 61)

    def refusal(ids: list[int], **asked: object) -> str:
        sampling = SamplingParams(**{"max_tokens": 1, "temperature": 0.0} | asked)
        with pytest.raises(ContractError) as error:
            engine.submit(b"bridge", Submit(0, pack(ids), sampling, 0))
        return error.value.message

    long = refusal([text[0], *text])
    assert "the prompt is 62 tokens long" in long
    assert "64 tokens (max_num_batched_tokens), of which 3 are for other sequences" in long
    assert long.endswith("(max_num_seqs), has room for 61")
    assert f"has no token {own['bos']} (bos_token_id)" in refusal(text[:-1])
    unmasked = [i for i in text if i not in (own["mask"], own["gmask"])]
    assert f"no token {own['gmask']} or {own['mask']} (gmask_token_id" in refusal(unmasked)
    assert "beam_width = 2 does not go with this model" in refusal(text, beams=Beams(width=2))
    assert "speculation of a request" in refusal(text, drafts=Drafts(token_ids=(1, 2)))


def test_answers_of_one_prompt_and_a_probe(small: tuple[Path, Remote]) -> None:
    """Siblings compute the prompt anew; a probe, which is any token, is answered."""
    path, model = small
    runner, limits = made(path)
    assert not limits.kv_cache_reuse
    engine = Engine(limits, runner, None)
    text = prompt(random.Random(3), model.keys, 40)
    sampling = SamplingParams(max_tokens=9, temperature=0.0, n=2)
    engine.submit(b"bridge", Submit(0, pack(text), sampling, 0))
    probe = SamplingParams(max_tokens=1, temperature=0.0)
    engine.submit(b"bridge", Submit(1, pack([1]), probe, 0, is_probe=True))
    outputs: dict[tuple[int, int], list[int]] = {}
    while engine.has_work:
        for tokens in engine.step().get(b"bridge", []):
            outputs.setdefault((tokens.request, tokens.index), []).extend(tokens.token_ids)
    assert outputs[0, 0] == outputs[0, 1]
    assert len(outputs[1, 0]) == 1
    check(model, [text], [outputs[0, 0]])


@pytest.mark.parametrize("padded", [16, 24])
def test_heads_with_zeros_turn_by_two_positions(padded: int) -> None:
    """Products of queries and keys as kernels have them, whose heads may be larger: the stored."""
    size = 16
    order = head_order(size, size, interleaved=False, padded=padded, has_two=True)
    first, second = torch.tensor([0, 7, 7, 90]), torch.tensor([0, 0, 1, 55])
    kinds = (torch.float32, torch.float32, 1, 1, padded, 8)
    spec = AttentionSpec("cpu", *kinds, form=PREFIX)
    maker = TwoWays(RopeConfig(rotated=size, has_two=True), TorchCpu(spec), torch.device("cpu"))
    cos, sin = maker.turns(first + (second << SECOND)).chunk(2, -1)
    stored, made = torch.randn(2, 4, size), []
    for x in stored:
        a, b = arranged(x, order, size, dim=1).chunk(2, -1)
        made.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    halves = [x[:, None].double().chunk(2, -1) for x in stored]
    q, k = (torch.cat((turned(a, first), turned(b, second)), -1)[:, 0] for a, b in halves)
    assert torch.allclose(made[0] @ made[1].T, (q @ k.T).float(), atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("gmask_token_id", 1 << 20, "is outside of a vocabulary of "),
        ("hidden_size", 6, "gives heads of 6: two halves of pairs need a multiple of 4"),
        ("pre_seq_len", 128, "pre_seq_len = 128 is not implemented"),
        ("quantization_bit", 4, "quantization_bit = 4 is not implemented"),
    ],
)
def test_keys_that_are_refused(key: str, value: int, words: str, tmp_path: Path) -> None:
    model = chatglm1(random.Random(1))
    model.keys |= {key: value} | ({"num_attention_heads": 1} if key == "hidden_size" else {})
    model.save(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        read_config(tmp_path)


def changed_by(model: Remote, name: str, seed: int) -> tuple[Pairs, Remote]:
    """Draw a term of rank 5 for a linear layer of every block, and the model with it."""
    drawn, tensors, pairs = torch.Generator().manual_seed(seed), dict(model.tensors), Pairs()
    for i in range(int(str(model.keys["num_layers"]))):
        module = f"transformer.layers.{i}.{name}"
        outputs, inputs = tensors[f"{module}.weight"].shape
        a = torch.randn(RANK, inputs, generator=drawn) * inputs**-0.5
        b = torch.randn(outputs, RANK, generator=drawn) * 0.3
        pairs[module] = a, b
        term = scale_of(RANK) * b.double() @ a.double()
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"].double() + term
    return pairs, Remote(model.keys, tensors, model.decode)


def test_adapters_match_merged_weights(small: tuple[Path, Remote], tmp_path: Path) -> None:
    """Adapters of each linear layer, and none, share a step of whole prompts."""
    path, model = small
    runner = make_runner(path, max_num_batched_tokens=256)
    names = ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h"]
    rng, blocks, rows, truths = random.Random(8), list(range(runner.num_blocks)), [], []
    for i, name in enumerate([*names, "mlp.dense_4h_to_h", ""]):
        ids, changed, number = prompt(rng, model.keys, 20 + i), model, 0
        if name:
            pairs, changed = changed_by(model, name, i)
            folder = write_adapter(tmp_path / str(i), pairs, RANK)
            number = runner.adapters.add(runner.adapters.read(str(folder)))
        truths.append(changed(torch.tensor([ids])).logits[0][-1])
        sight = Sight(ids.index(model.keys["gmask_token_id"]), len(ids) - 1)
        own = ([blocks.pop() for _ in range(4)],)
        row = Row(i, i, pack(ids), 0, own, True, GREEDY, 0, 1, adapter=number, sight=sight)
        rows.append(row)
    logits = runner.logits(Batch(tuple(rows), 0))
    for found, truth in zip(logits, truths, strict=True):
        assert (found - truth).abs().max() <= 2e-4
    plain = model(torch.tensor([list(rows[0].token_ids)])).logits[0][-1]
    assert (logits[0] - plain).abs().max() > 0.1


def test_adapters_that_bring_keys_are_refused(small: tuple[Path, Remote], tmp_path: Path) -> None:
    path, model = small
    runner, layers = make_runner(path), int(str(model.keys["num_layers"]))
    size = int(str(model.keys["hidden_size"]))
    folder = write_prefix(tmp_path / "prefix", torch.zeros(3, 2 * layers * size), layers)
    with pytest.raises(CheckpointError, match="tokens of a prompt see each other, and have two"):
        runner.adapters.read(str(folder))
