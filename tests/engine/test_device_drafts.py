"""Drafts of the device through the engine: tokens, log probs and endings are those without."""

from pathlib import Path

import pytest
from fixtures.models.checkpoints import Asker, make_model, make_runner, random_prompts, save
from fixtures.models.drafters import EveryDraft, save_eagle3, save_medusa
from msgspec.structs import replace
from slipstream.engine.device_drafts import DeviceDrafts
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream_contract.drafts import Drafts
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


def answers(
    directory: Path, given: dict[int, tuple[int, ...]] | None = None, **overrides: object
) -> tuple[dict, EveryDraft | None]:
    """Return all answers; `given` are drafts of clients, by the number of the request."""
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64} | overrides
    runner = make_runner(directory, **settings)
    asker, speculation = Asker(runner, LIMITS), None
    if overrides.get("speculation"):
        device = DeviceDrafts("draft", 3)
        speculation = EveryDraft(device)
        asker.engine = Engine(LIMITS, runner, None, speculation=speculation, device_drafts=device)
    asked = zip(random_prompts([30, 1, 90, 8, 16, 40]), SAMPLINGS, strict=True)
    for number, (prompt, sampling) in enumerate(asked):
        drafts = None if given is None else Drafts(token_ids=given[number])
        asker.submit(prompt, replace(sampling, drafts=drafts))
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
    engine = {"kv_cache_tokens": tokens, "speculation": kind, "draft_checkpoint": str(draft)}
    found, speculation = answers(target, num_draft_tokens=3, **engine)
    check(found, expected)
    assert speculation is not None
    assert speculation.num_drafted > 20
    is_right = kind == "draft" and tokens == 8192
    assert not is_right or speculation.num_accepted > 0.8 * speculation.num_drafted
    first = [expected[key].token_ids for key in sorted(expected) if key[1] == 0]
    given = {number: (*token_ids[:5], 1, 2) for number, token_ids in enumerate(first)}
    found, speculation = answers(target, given, num_draft_tokens=3, **engine)
    check(found, expected)
    assert speculation is not None
    assert not is_right or speculation.num_accepted > 0.8 * speculation.num_drafted > 0


def check(found: dict, expected: dict) -> None:
    assert [(a.token_ids, a.reason) for a in found.values()] == [
        (a.token_ids, a.reason) for a in expected.values()
    ]
    for a, b in zip(found.values(), expected.values(), strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
