"""Masks in the sampling of steps: those of bans by edits, in time, late, or never."""

import dataclasses
import json
import random
from pathlib import Path

import msgspec
import pytest
import torch
from fixtures.models.checkpoints import DEVICES
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch, Outcome, Row, Sampled
from slipstream.core.edits import EDIT
from slipstream.runner.launched import LaunchedStep
from slipstream.runner.masks import MaskPlaces
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

VOCAB = 512
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.2},
]


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def runner_of(folder: Path, device: str) -> ModelRunner:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(
        checkpoint=str(folder),
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        load_format="random",
        kv_cache_tokens=1024,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=256,
    )
    return ModelRunner(resolve(config))


def mask_of(rng: random.Random) -> bytes:
    legal = rng.choice([1, 3, 100, VOCAB])
    bits = bytearray(VOCAB // 8)
    for token_id in rng.sample(range(VOCAB), legal):
        bits[token_id // 8] |= 1 << token_id % 8
    return bytes(bits)


def bans_of(mask: bytes) -> bytes:
    banned = [i for i in range(VOCAB) if not mask[i // 8] >> i % 8 & 1]
    return b"".join(EDIT.pack(token_id, -float("inf")) for token_id in banned)


def rows_of(rng: random.Random, count: int) -> list[Row]:
    rows = []
    for number in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))]
        sampling = SamplingParams(max_tokens=9, **rng.choice(KINDS))
        table = [2 * number, 2 * number + 1]
        seed = rng.getrandbits(60)
        row = Row(number, number, prompt, 0, (table,), True, sampling, seed, 0, history=prompt)
        rows.append(msgspec.structs.replace(row, num_prompt=len(prompt)))
    return rows


def next_rows(rows: list[Row], sources: bool, token_ids: list[int]) -> list[Row]:
    """Return the rows of the next tokens, known or in flight."""
    return [
        msgspec.structs.replace(
            row,
            token_ids=[0 if sources else token_ids[i]],
            start=row.start + len(row.token_ids),
            num_outputs=row.num_outputs + 1,
            source=i if sources else -1,
            is_new=False,
            history=None,
            mask=None,
            edits=b"",
        )
        for i, row in enumerate(rows)
    ]


def batch_of(rows: list[Row], num_decodes: int = 0, **more: object) -> Batch:
    has_masks = any(row.mask is not None for row in rows)
    return Batch(tuple(rows), num_decodes, has_masks=has_masks, **more)  # type: ignore[arg-type]


def hold(runner: ModelRunner) -> None:
    """Keep the device from the next step for 0.1 s: on a loaded machine, masks take their time."""
    if runner._device.type == "cuda":
        torch.cuda._sleep(200_000_000)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_is_the_bans_of_what_it_forbids(tmp_path: Path, device: str) -> None:
    """Known at the launch, or given while the step runs, in graphs and in eager steps."""
    rng = random.Random(7)
    runner = runner_of(tmp_path, device)
    for trial in range(6):
        rows = rows_of(rng, 1 + trial * 2)
        masks = [rng.choice([None, mask_of(rng)]) for _ in rows]
        results = []
        for has_masks in (True, False):
            own = []
            for row, mask in zip(rows, masks, strict=True):
                if mask is not None and has_masks:
                    row = msgspec.structs.replace(row, mask=mask)
                elif mask is not None:
                    row = msgspec.structs.replace(row, edits=bans_of(mask))
                own.append(row)
            first = runner.run(batch_of(own))
            after = next_rows(rows, False, first.token_ids)
            if has_masks:
                waiting = [
                    row if mask is None else msgspec.structs.replace(row, mask=b"")
                    for row, mask in zip(after, masks, strict=True)
                ]
                hold(runner)
                step = runner.launch(batch_of(waiting, len(waiting)))
                for sample, mask in enumerate(masks):
                    if mask is not None:
                        step.give_mask(sample, mask)
                second = step.wait()
            else:
                banned = [
                    row if mask is None else msgspec.structs.replace(row, edits=bans_of(mask))
                    for row, mask in zip(after, masks, strict=True)
                ]
                second = runner.run(batch_of(banned, len(banned)))
            results.append((dataclasses.astuple(first), dataclasses.astuple(second)))
        assert results[0] == results[1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_late_row_has_no_token_and_others_do_not_notice(tmp_path: Path, device: str) -> None:
    """Without its mask a row is late, or unmasked if it may be; later masks are dropped."""
    rng = random.Random(8)
    runner = runner_of(tmp_path, device)
    rows = rows_of(rng, 6)
    first = runner.run(batch_of(rows))
    plain = runner.run(batch_of(next_rows(rows, False, first.token_ids), 6))
    runner.run(batch_of(rows))
    asked = [
        msgspec.structs.replace(row, mask=mask, needs_mask=needs)
        for row, mask, needs in zip(
            next_rows(rows, False, first.token_ids),
            [None, b"", b"", b"", None, b""],
            [True, True, False, True, True, False],
            strict=True,
        )
    ]
    everything = bytes([255]) * (VOCAB // 8)
    hold(runner)
    step = runner.launch(batch_of(asked, 6))
    step.give_mask(3, everything)
    late = step.wait()
    sampled, unmasked = Outcome.SAMPLED, Outcome.UNMASKED
    assert late.outcomes == [sampled, Outcome.LATE, unmasked, sampled, sampled, unmasked]
    for i in (0, 2, 3, 4, 5):
        assert late.token_ids[i] == plain.token_ids[i]
    # Two steps further the places are used again: what comes now must not reach them.
    runner.run(batch_of(rows))
    again = [msgspec.structs.replace(row, mask=b"", needs_mask=True) for row in asked]
    hold(runner)
    other = runner.launch(batch_of(again, 6))
    for sample in range(6):
        step.give_mask(sample, everything)
    assert other.wait().outcomes == [Outcome.LATE] * 6


@pytest.mark.parametrize("device", DEVICES)
def test_steps_that_continue_want_their_own_masks(tmp_path: Path, device: str) -> None:
    """The records of a step are those of the step before but for numbers: tags are not kept."""
    rng = random.Random(9)
    runner = runner_of(tmp_path, device)
    count = 5
    rows = rows_of(rng, count)
    token_ids = runner.run(batch_of(rows)).token_ids
    tokens = [list(token_ids)]
    masks = [[rng.choice([None, mask_of(rng)]) for _ in range(count)] for _ in range(4)]
    for step_masks in masks:
        rows = next_rows(rows, True, [])
        asked = [
            row if mask is None else msgspec.structs.replace(row, mask=b"")
            for row, mask in zip(rows, step_masks, strict=True)
        ]
        hold(runner)
        step = runner.launch(batch_of(asked, count, continues=len(tokens) > 1))
        for sample, mask in enumerate(step_masks):
            if mask is not None:
                step.give_mask(sample, mask)
        got = step.wait()
        assert got.outcomes == [Outcome.SAMPLED] * count
        for token_id, mask in zip(got.token_ids, step_masks, strict=True):
            assert mask is None or mask[token_id // 8] >> token_id % 8 & 1
        tokens.append(got.token_ids)
    rng = random.Random(9)
    rows = rows_of(rng, count)
    assert runner.run(batch_of(rows)).token_ids == tokens[0]
    for before, after, step_masks in zip(tokens, tokens[1:], masks, strict=False):
        rows = next_rows(rows, False, before)
        banned = [
            row if mask is None else msgspec.structs.replace(row, edits=bans_of(mask))
            for row, mask in zip(rows, step_masks, strict=True)
        ]
        assert runner.run(batch_of(banned, count)).token_ids == after


def test_a_step_that_failed_takes_no_mask():
    """Another step may have its places by then, with a mask of its own."""
    places = MaskPlaces(2, VOCAB, torch.device("cpu"))
    row = Row(0, 0, pack([1]), 0, ([0],), True, SamplingParams(max_tokens=1), 0, 0, mask=b"")
    batch = Batch((row,), 1, False, has_masks=True)

    def fail() -> Sampled:
        raise ValueError("planted")

    failed = LaunchedStep(fail, places.start(batch, 0))
    with pytest.raises(ValueError, match="planted"):
        failed.wait()
    own, late = bytes(range(64)), bytes(64)
    places.start(dataclasses.replace(batch, rows=(msgspec.structs.replace(row, mask=own),)), 0)
    failed.give_mask(0, late)
    assert bytes(places.masks.bits[0].numpy()[:64]) == own
