"""Models with mixtures of experts on a GPU: against transformers, in graphs, rows alone."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.gpu
SIZES = {"intermediate_size": 192, "hidden_size": 256}
# Every row has all experts: in 16 bits some would have others than transformers'.
ALL = {"num_experts_per_tok": 6}
QWEN = {"num_experts": 6, "moe_intermediate_size": 96}
CASES = {
    "mixtral": ("mixtral", {"num_local_experts": 6}),
    "qwen2 moe": ("qwen2_moe", QWEN | {"shared_expert_intermediate_size": 64}),
    "qwen3 moe": ("qwen3_moe", QWEN | {"norm_topk_prob": True}),
    "olmoe": ("olmoe", {"num_experts": 6}),
    "phimoe": ("phimoe", {"num_local_experts": 2, "num_experts_per_tok": 2}),
}


def generate(directory: Path, prompts: list[list[int]], **settings: object) -> list[Generation]:
    runner = make_runner(directory, device="cuda", block_size=16, **settings)
    generations = [Generation(prompt, 6 + i) for i, prompt in enumerate(prompts)]
    driver = Driver(runner, keep_logits=True)
    driver.step(generations[:1], 7)
    driver.finish(generations, chunk=50)
    return generations


def teacher_forced(model: torch.nn.Module, generations: list[Generation]) -> torch.Tensor:
    """Logits at every sampled position, on our tokens."""
    parts = []
    for g in generations:
        with torch.no_grad():
            logits = model(torch.tensor([g.tokens], device="cuda")).logits[0]
        parts.append(logits[len(g.prompt) - 1 : -1])
    return torch.cat(parts).double().cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_error_is_at_most_twice_the_naive_one(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    family, overrides = CASES[name]
    save(make_model(family, **(SIZES | ALL | overrides)).to(dtype), tmp_path)
    prompts = random_prompts([37, 1, 90, 8, 160])
    generations = generate(tmp_path, prompts, dtype=str(dtype).removeprefix("torch."))
    ours = torch.stack([logits for g in generations for logits in g.logits]).double()
    found = []
    for kind in (torch.float32, dtype):
        oracle = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=kind, attn_implementation="eager", experts_implementation="eager"
        )
        found.append(teacher_forced(oracle.eval().cuda(), generations))
    truth, naive = found
    tolerance = 4e-3 if dtype == torch.bfloat16 else 5e-4
    assert (ours - truth).abs().max() <= 2 * (naive - truth).abs().max() + tolerance


@pytest.mark.parametrize("scheme", ["none", "fp8"])
def test_deterministic_rows_do_not_depend_on_others(scheme: str, tmp_path: Path) -> None:
    """Bit for bit, with a choice among experts: tiles of another size for other batches."""
    overrides = QWEN | {"num_experts": 16, "num_experts_per_tok": 3}
    save(make_model("qwen3_moe", **(SIZES | overrides)).bfloat16(), tmp_path)
    prompts = random_prompts([33, 5, 140, 61])
    how = {"deterministic": True, "dtype": "bfloat16", "quantization": scheme}
    together = generate(tmp_path, prompts, **how)
    for g in together:
        (alone,) = generate(tmp_path, [g.prompt], **how)
        shared = min(len(alone.logits), len(g.logits))
        assert alone.outputs[:shared] == g.outputs[:shared]
        assert all(map(torch.equal, alone.logits[:shared], g.logits[:shared]))


def test_runs_repeat_bit_for_bit(tmp_path: Path) -> None:
    """In any mode: nothing is summed in the order in which it happens to come."""
    save(make_model("qwen3_moe", **(SIZES | QWEN | {"num_experts_per_tok": 2})).half(), tmp_path)
    prompts = random_prompts([64, 3, 100])
    first, second = (generate(tmp_path, prompts, dtype="float16") for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.outputs == other.outputs
        assert all(map(torch.equal, one.logits, other.logits))
