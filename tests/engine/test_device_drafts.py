"""Drafts of the device through the engine: tokens, log probs and endings are those without."""

from pathlib import Path

import pytest
from fixtures.models.checkpoints import Asker, make_model, make_runner, random_prompts, save
from fixtures.models.drafters import EveryDraft, save_eagle3, save_medusa
from slipstream.engine.device_drafts import DeviceDrafts
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream_contract.sampling import SamplingParams

LIMITS = Limits(6, 64, max_num_rows=16)
SAMPLINGS = [
    SamplingParams(max_tokens=14, temperature=0.0, log_probs=True),
    SamplingParams(max_tokens=14, temperature=0.9, top_k=30, seed=5, log_probs=True),
    SamplingParams(max_tokens=11, temperature=0.7, seed=6, repetition_penalty=1.2),
    SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=2, min_tokens=3, end_ids=(3,)),
    SamplingParams(max_tokens=9, temperature=0.0, bad_words=((4, 5), (7,))),
    SamplingParams(max_tokens=1, temperature=0.0),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama", num_hidden_layers=3), tmp_path_factory.mktemp("target"))


def answers(directory: Path, **overrides: object) -> tuple[dict, EveryDraft | None]:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64} | overrides
    runner = make_runner(directory, **settings)
    asker, speculation = Asker(runner, LIMITS), None
    if overrides.get("speculation"):
        drafts = DeviceDrafts("draft", 3)
        speculation = EveryDraft(drafts)
        asker.engine = Engine(LIMITS, runner, None, speculation=speculation, device_drafts=drafts)
    for prompt, sampling in zip(random_prompts([30, 1, 90, 8, 16, 40]), SAMPLINGS, strict=True):
        asker.submit(prompt, sampling)
        asker.step()
    asker.drain()
    return asker.answers, speculation


@pytest.mark.parametrize("kind", ["draft", "medusa", "eagle3"])
@pytest.mark.parametrize("tokens", [8192, 200])  # of the cache: with 200 some are preempted
def test_answers_are_those_without(kind, tokens, target, tmp_path) -> None:
    draft = target  # always right
    if kind == "medusa":
        save_medusa(draft := tmp_path)
    elif kind == "eagle3":
        save_eagle3(draft := tmp_path)
    expected, _ = answers(target, kv_cache_tokens=tokens)
    found, speculation = answers(
        target, kv_cache_tokens=tokens, speculation=kind, draft_checkpoint=str(draft),
        num_draft_tokens=3,
    )  # fmt: skip
    assert [(a.token_ids, a.reason) for a in found.values()] == [
        (a.token_ids, a.reason) for a in expected.values()
    ]
    for a, b in zip(found.values(), expected.values(), strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
    assert speculation is not None
    assert speculation.num_drafted > 20
    if kind == "draft" and tokens == 8192:
        assert speculation.num_accepted > 0.8 * speculation.num_drafted
