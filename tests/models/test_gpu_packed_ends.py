"""Head and embedding that stay packed on a GPU: lookups, products of a vocabulary, and models."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.kernels.checking import Judge, naive_linear, poison, random, same_bits
from fixtures.kernels.packed_cases import (
    FLOATS,
    FORMS,
    HALVES,
    RECORDS,
    SHARED,
    Form,
    packed_pair,
)
from fixtures.models.adapters import merged, scale_of, write_adapter
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drafters import SpeculatingDriver, save_eagle3, save_medusa
from fixtures.models.ends_of_gpu import packings_of
from fixtures.models.gguf_files import SIZES, unpacked, write_gguf
from slipstream.kernels.gemm.linear import linear, route_of
from slipstream.kernels.gemm.lookup import lookup
from slipstream.kernels.gemm.unpacked import PIECE
from slipstream.kernels.gemm.unpacked import unpacked as whole_matrix
from slipstream.layers.packed_rows import PackedRows
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.sampling import SamplingParams

pytestmark = pytest.mark.gpu
VOCABULARY, HIDDEN = 128_256, 4096
PLAIN = [each for each in (*FORMS, *FLOATS, *RECORDS) if not (each.has_order or each.has_factors)]
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("form", PLAIN, ids=str)
def test_rows_are_those_of_the_whole_matrix(form: Form, dtype: torch.dtype) -> None:
    """Bit for bit those that become 16 bits, and near the weights themselves."""
    for outputs, inputs in ((37, 264), (1000, 576), (5003, 2048)):
        (values, factors, groups), weight = packed_pair(form, outputs, inputs, "cuda", dtype)
        whole = whole_matrix(values, groups, dtype, factors)
        for count in (1, 7, 8, 9, 300, 4097):
            ids = torch.randint(0, outputs, (count,), device="cuda")
            poison((count, inputs), dtype=dtype)
            rows = lookup(values, ids, groups, dtype, factors)
            assert same_bits(rows, whole[ids]), (outputs, inputs, count)
            near = 2.0**-7 if dtype == BF16 else 2.0**-9
            torch.testing.assert_close(rows.float(), weight[ids].float(), rtol=near, atol=1e-6)


@pytest.mark.parametrize("form", [SHARED, HALVES], ids=str)
def test_graphs_look_up_the_ids_of_each_replay(form: Form) -> None:
    matrix, _ = packed_pair(form, VOCABULARY, HIDDEN, "cuda")
    table = PackedRows(matrix, BF16)
    ids = torch.zeros(48, dtype=torch.int64, device="cuda")
    table(ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = table(ids + 0)  # which a kernel before makes
    for seed in range(5):
        drawn = torch.randint(0, VOCABULARY, (48,), generator=torch.Generator().manual_seed(seed))
        ids.copy_(drawn)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(rows, table(drawn.cuda()))
    assert same_bits(table(torch.tensor([VOCABULARY - 1], device="cuda")), table.whole()[-1:])


@pytest.mark.parametrize("form", [SHARED, HALVES, FORMS[7]], ids=str)
def test_products_of_a_vocabulary(form: Form) -> None:
    """Few rows and many are compared; many never make all of the matrix in 16 bits."""
    matrix, weight = packed_pair(form, VOCABULARY, HIDDEN, "cuda")
    judge = Judge(f"head {form}")
    exact, rounded = weight.double(), weight.to(BF16)  # as weights of many rows are
    for rows in (1, 3, 8, 9, 64, 128, 129, 256, 257, 512):
        x = random(rows, HIDDEN, dtype=BF16, seed=rows)

        def run(x: torch.Tensor = x) -> torch.Tensor:
            return linear(x, matrix)

        name = f"{rows} rows by {route_of(x, matrix).gemm.name}"
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = run()
        taken = torch.cuda.max_memory_allocated() - before
        assert taken < 2 * PIECE + 3 * found.nbytes + (64 << 20), name
        expected = naive_linear(x.double(), exact), naive_linear(x, rounded)
        judge.close(name, found, *expected)
        judge.repeats(name, run)
    judge.verdict()


# ---- models ----

KINDS = [("Q4_K", "Q6_K", False), ("Q6_K", "Q6_K", True), ("Q8_0", "Q5_K", False)]


def made(
    tmp_path: Path, embedding: str, head: str, tied: bool, **sizes: int
) -> tuple[torch.nn.Module, Path, Path]:
    """A model, a file of it whose ends are of blocks, and the same numbers in 32 bits."""
    tmp_path.mkdir(exist_ok=True)
    model = make_model("llama", **(SIZES | sizes), tie_word_embeddings=tied)
    others = {"embed_tokens": embedding, "lm_head": head}
    path = write_gguf(model, "llama", tmp_path / "model.gguf", "F32", others=others)
    plain = save(model, tmp_path / "plain")
    return model, unpacked(path, tmp_path / "checkpoint"), plain


def on_gpu(directory: Path, **options: object) -> ModelRunner:
    return make_runner(directory, device="cuda", dtype="bfloat16", **options)


def near(ours: list[Generation], theirs: list[Generation], most: float = 0.03) -> None:
    """Hold the first logits of each against others; later ones may follow other tokens."""
    for one, other in zip(ours, theirs, strict=True):
        expected = other.logits[0].float()
        assert (one.logits[0].float() - expected).abs().max() <= most * expected.abs().max()


def generated(runner: ModelRunner, adapters: tuple[int, ...] = (0, 0, 0)) -> list[Generation]:
    prompts = random_prompts([40, 7, 100], SIZES["vocab_size"])
    rows = [Generation(p, 12, adapter=n) for p, n in zip(prompts, adapters, strict=True)]
    Driver(runner, keep_logits=True).finish(rows, 64)
    return rows


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("embedding", "head", "tied"), KINDS)
def test_logits_are_those_of_numbers(
    embedding: str, head: str, tied: bool, fixed: bool, tmp_path: Path
) -> None:
    _, directory, plain = made(tmp_path, embedding, head, tied)
    runner = on_gpu(directory, deterministic=fixed)
    assert None not in packings_of(runner)
    assert runner._graphs is not None
    near(generated(runner), generated(on_gpu(plain, deterministic=fixed)))
    again = generated(runner) if fixed else []
    for one, other in zip(again, generated(runner) if fixed else [], strict=True):
        assert one.tokens == other.tokens


def test_weights_take_the_memory_that_is_counted(tmp_path: Path) -> None:
    """Less than in 16 bits by what both ends save; a tied matrix is there once."""
    sizes = {"vocab_size": 16_384, "hidden_size": 1024, "num_hidden_layers": 1}
    for tied in (False, True):
        _, directory, _ = made(tmp_path / str(tied), "Q4_K", "Q6_K", tied, **sizes)
        taken = {}
        for scheme in ("none", "auto"):
            gc.collect()  # runners of tests before
            before = torch.cuda.memory_allocated()
            runner = on_gpu(directory, quantization=scheme, kv_cache_tokens=4096, max_num_seqs=8)
            taken[scheme] = torch.cuda.memory_allocated() - before
            del runner
            torch.cuda.empty_cache()
        count = sizes["vocab_size"] * sizes["hidden_size"]
        saved = count * ((2 - 5 / 8) if tied else (2 - 5 / 8) + (2 - 9 / 8))
        assert abs(taken["none"] - taken["auto"] - saved) < 4 << 20, tied


def test_adapters_of_both_ends(tmp_path: Path) -> None:
    model, directory, _ = made(tmp_path, "Q4_K", "Q6_K", False)
    runner = on_gpu(directory)
    rng = torch.Generator().manual_seed(1)
    rows, width = model.lm_head.weight.shape
    pair = tuple(torch.randn(n, generator=rng) * 0.1 for n in ((4, width), (rows, 4)))
    path = write_adapter(tmp_path / "a", {"lm_head": pair}, 4)
    number = runner.adapters.add(runner.adapters.read(str(path)))
    base, own, _ = generated(runner, (0, number, number))
    for each, terms in ((base, {}), (own, {"lm_head": pair})):
        with merged(model, terms, scale_of(4)), torch.no_grad():
            truth = model(torch.tensor([each.tokens])).logits[0, len(each.prompt) - 1]
        assert (each.logits[0].cpu() - truth).abs().max() < 0.05 * truth.abs().max()


@pytest.mark.parametrize("kind", ["draft", "medusa", "eagle3"])
def test_drafts(kind: str, tmp_path: Path) -> None:
    """Tokens are those without drafts; modules read the model's packed ends."""
    sizes = {"hidden_size": 128, "vocab_size": 1009, "num_hidden_layers": 3}
    _, directory, _ = made(tmp_path, "Q8_0", "Q5_1", False, **sizes)
    draft = tmp_path / "draft"
    if kind == "draft":
        draft = directory
    elif kind == "medusa":
        save_medusa(draft, 3, 1, has_outputs=False)
    else:
        save_eagle3(draft)
    settings = {"block_size": 16, "deterministic": True}
    options = {"speculation": kind, "draft_checkpoint": str(draft), "num_draft_tokens": 3}
    found, driver = drafted(lambda: on_gpu(directory, **settings, **options), 3)
    assert found == drafted(lambda: on_gpu(directory, **settings), 0)[0]
    assert sum(driver.drafted.proposed) > 20


def drafted(
    make: Callable[[], ModelRunner], count: int
) -> tuple[list[list[int]], SpeculatingDriver]:
    driver, greedy = SpeculatingDriver(make(), count), SamplingParams(max_tokens=1, temperature=0.0)
    prompts = random_prompts([37, 1, 90, 8])
    rows = [Generation(prompt, 12 + i, greedy, seed=i) for i, prompt in enumerate(prompts)]
    driver.finish(rows, 13)
    return [row.outputs for row in rows], driver
