"""Log probs through the engine: the log-softmax of transformers, however a prompt is computed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.models.checkpoints import make_model, make_runner, random_prompts, save
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.layers.residual import Residual
from slipstream.runner import values
from slipstream.wire import Likely, Submit, Tokens
from slipstream_contract.ids import pack
from slipstream_contract.log_probs import WHOLE, LogProbs
from slipstream_contract.sampling import SamplingParams

TOLERANCE = 1e-4
VOCAB = 1009


class Collected:
    """What came for one sequence."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.outputs: list[Likely] = []
        self.prompt: list[Likely] = []
        self.logits: list[bytes] = []
        self.context: list[bytes] = []
        self.error: str | None = None

    def add(self, tokens: Tokens) -> None:
        self.ids += tokens.token_ids
        if (values := tokens.values) is not None:
            self.outputs += [] if values.likely is None else [values.likely]
            self.prompt += values.prompt
            self.logits += values.logits
            self.context += values.context
        if tokens.finished is not None:
            self.error = tokens.finished.error


def generate(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]]
) -> dict[tuple[int, int], Collected]:
    """Run requests at the same time; what came, by number and index."""
    found: dict[tuple[int, int], Collected] = {}
    for number, (prompt, sampling) in enumerate(requests):
        engine.submit(b"a", Submit(number, pack(prompt), sampling, 0))
    while engine.has_work:
        for tokens in engine.step().get(b"a", []):
            found.setdefault((tokens.request, tokens.index), Collected()).add(tokens)
        engine.check_integrity()
    return found


def joined(parts: list[Likely]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ids and values of the likeliest, ranks, and own values, of all places."""
    columns = [
        (
            np.frombuffer(p.top_ids, np.int32).reshape(p.num, p.num_top),
            np.frombuffer(p.top_values, np.float32).reshape(p.num, p.num_top),
            np.frombuffer(p.ranks, np.int32),
            np.frombuffer(p.values, np.float32),
        )
        for p in parts
    ]
    ids, values, ranks, own = (np.concatenate(column) for column in zip(*columns, strict=True))
    return ids, values, ranks, own


def assert_likely(parts: list[Likely], want: torch.Tensor, ids: list[int], k: int) -> None:
    """Hold places against log probs `[places, vocab]`, at which `ids` are."""
    top_ids, top_values, ranks, own = joined(parts)
    assert len(own) == len(ids) == len(want)
    tops = want.topk(k)
    np.testing.assert_allclose(top_values, tops.values.numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(
        np.take_along_axis(want.numpy(), top_ids.astype(np.int64), 1), top_values, atol=TOLERANCE
    )
    mine = want[torch.arange(len(ids)), torch.tensor(ids)]
    np.testing.assert_allclose(own, mine.numpy(), atol=TOLERANCE)
    lowest = 1 + (want > mine[:, None] + TOLERANCE).sum(-1)
    highest = 1 + (want > mine[:, None] - TOLERANCE).sum(-1)
    assert np.all((lowest.numpy() <= ranks) & (ranks <= highest.numpy()))


@torch.inference_mode()
def oracle(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Logits of transformers at every position."""
    return model(torch.tensor([ids])).logits[0].float()


def wanted(**fields: object) -> SamplingParams:
    values = LogProbs(**{"top": 5, "prompt": 3} | fields)  # type: ignore[arg-type]
    return SamplingParams(max_tokens=24, temperature=1.0, seed=3, values=values)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model("llama")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tokens_a_step", [7, 256])
def test_outputs_and_prompts(
    model: torch.nn.Module, tokens_a_step: int, deterministic: bool, tmp_path: Path
) -> None:
    """In chunks, beside each other, some preempted, with a prefix in the cache, and n."""
    runner = make_runner(
        save(model, tmp_path), kv_cache_tokens=144, block_size=8, deterministic=deterministic
    )
    engine = Engine(Limits(6, tokens_a_step), runner, None)
    prompts = random_prompts([40, 23, 1, 2, 33, 17])
    prompts[4] = prompts[0][:33]  # what it needs is in the cache, and is computed again
    plain = SamplingParams(max_tokens=24, temperature=0.0)
    sampling = [wanted(), plain, wanted(), wanted(), wanted(top=None), wanted(prompt=None)]
    requests = list(zip(prompts, sampling, strict=True))
    found = generate(engine, requests) | {
        (n + 6, i): got for (n, i), got in generate(engine, requests).items()
    }
    assert engine.status().num_preemptions > 0
    for (number, _), got in found.items():
        assert got.error is None
        prompt, values = prompts[number % 6], sampling[number % 6].values
        ids = prompt + got.ids
        want = oracle(model, ids).log_softmax(-1)
        if values is not None and values.top is not None:
            assert_likely(got.outputs, want[len(prompt) - 1 : -1], got.ids, 5)
        else:
            assert not got.outputs
        if values is not None and values.prompt is not None and len(prompt) > 1:
            assert_likely(got.prompt, want[: len(prompt) - 1], prompt[1:], 3)
        else:
            assert sum(part.num for part in got.prompt) == 0


def test_of_several_sequences_one_has_the_prompt(model: torch.nn.Module, tmp_path: Path) -> None:
    runner = make_runner(save(model, tmp_path), kv_cache_tokens=512, block_size=16)
    engine = Engine(Limits(6, 64), runner, None)
    [prompt] = random_prompts([40])
    values = LogProbs(top=2, prompt=3)
    sampling = SamplingParams(max_tokens=5, n=3, seed=4, values=values)
    found = generate(engine, [(prompt, sampling)])
    for (_, index), got in found.items():
        want = oracle(model, prompt + got.ids).log_softmax(-1)
        assert_likely(got.outputs, want[len(prompt) - 1 : -1], got.ids, 2)
        assert (index == 0) == bool(got.prompt)
    assert_likely(found[0, 0].prompt, want[: len(prompt) - 1], prompt[1:], 3)


@pytest.mark.parametrize("tokens_a_step", [7, 256])
def test_whole_logits(model: torch.nn.Module, tokens_a_step: int, tmp_path: Path) -> None:
    runner = make_runner(save(model, tmp_path), kv_cache_tokens=512, block_size=16)
    engine = Engine(Limits(6, tokens_a_step), runner, None)
    prompts = random_prompts([30, 1, 12])
    logits = LogProbs(context_logits=True, generation_logits=True)
    whole = LogProbs(top=WHOLE, prompt=WHOLE, mode="processed_logprobs")
    requests = [
        (prompts[0], SamplingParams(max_tokens=4, temperature=0.0, values=logits)),
        (prompts[1], SamplingParams(max_tokens=4, temperature=0.0, values=logits)),
        (prompts[2], SamplingParams(max_tokens=4, temperature=0.5, seed=1, values=whole)),
    ]
    for (number, _), got in generate(engine, requests).items():
        prompt = prompts[number]
        want = oracle(model, prompt + got.ids)
        context = np.frombuffer(b"".join(got.context), np.float32).reshape(len(prompt), VOCAB)
        np.testing.assert_allclose(context, want[: len(prompt)].numpy(), atol=2e-4)
        rows = np.frombuffer(b"".join(got.logits), np.float32).reshape(4, VOCAB)
        scale = 0.5 if number == 2 else 1.0
        np.testing.assert_allclose(rows * scale, want[len(prompt) - 1 : -1].numpy(), atol=2e-4)
        assert bool(got.outputs) == (number == 2)


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_processed(model: torch.nn.Module, mode: str, tmp_path: Path) -> None:
    """After bias, bans, penalties and temperature, in this order, which is vLLM's."""
    runner = make_runner(save(model, tmp_path), kv_cache_tokens=512, block_size=16)
    engine = Engine(Limits(6, 64), runner, None)
    [prompt] = random_prompts([20])
    sampling = SamplingParams(
        max_tokens=12,
        temperature=0.7,
        seed=5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.2,
        bias=((7, 4.0), (9, -3.0)),
        bad_words=((11,),),
        values=LogProbs(top=5, mode=mode),
    )
    [got] = generate(engine, [(prompt, sampling)]).values()
    raw = oracle(model, prompt + got.ids)[len(prompt) - 1 : -1]
    rows = []
    for i, logits in enumerate(raw):
        edited, output = logits.clone(), got.ids[:i]
        edited[7] += 4.0
        edited[9] -= 3.0
        edited[11] = -torch.inf
        seen = torch.tensor(sorted({*prompt, *output}))
        edited[seen] = torch.where(edited[seen] > 0, edited[seen] / 1.2, edited[seen] * 1.2)
        for token_id in set(output):
            edited[token_id] -= 0.5 + 0.25 * output.count(token_id)
        rows.append(edited / 0.7)
    want = torch.stack(rows)
    if mode == "processed_logprobs":
        want = want.log_softmax(-1)
    assert_likely(got.outputs, want, got.ids, 5)


def test_logits_of_a_long_prompt_are_made_in_pieces(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No call of the head makes more than `LOGITS_BYTES`, and the values are the same."""
    piece = 16 * VOCAB * 4
    monkeypatch.setattr(values, "LOGITS_BYTES", piece + 99)
    runner = make_runner(save(model, tmp_path), kv_cache_tokens=512, block_size=16)
    sizes: list[int] = []
    make = runner._model.logits

    def noting(residual: Residual) -> torch.Tensor:
        logits = make(residual)
        sizes.append(logits.nbytes)
        return logits

    monkeypatch.setattr(runner._model, "logits", noting)
    [prompt] = random_prompts([200])
    asked = wanted(context_logits=True)
    [got] = generate(Engine(Limits(6, 256), runner, None), [(prompt, asked)]).values()
    assert max(sizes) == piece
    assert sum(size == piece for size in sizes) == len(prompt) // 16
    logits = oracle(model, prompt)
    assert_likely(got.prompt, logits.log_softmax(-1)[:-1], prompt[1:], 3)
    context = np.frombuffer(b"".join(got.context), np.float32).reshape(len(prompt), VOCAB)
    np.testing.assert_allclose(context, logits.numpy(), atol=2e-4)


def test_preempted_in_the_middle_of_a_prompt(model: torch.nn.Module, tmp_path: Path) -> None:
    """Computed again in larger chunks, of which the first has values for its end alone."""
    runner = make_runner(save(model, tmp_path), kv_cache_tokens=512, block_size=16)
    engine = Engine(Limits(6, 7), runner, None)
    [prompt] = random_prompts([40])
    asked = SamplingParams(max_tokens=3, temperature=0.0, values=LogProbs(prompt=3))
    engine.submit(b"a", Submit(0, pack(prompt), asked, 0))
    for _ in range(2):
        engine.step()
    scheduler = engine._scheduler
    [sequence] = scheduler._running.sequences.values()
    assert sequence.wanted is not None
    assert 0 < sequence.wanted.num_given < len(prompt)
    scheduler._running.preempt(sequence)
    scheduler._max_tokens = 18
    got = Collected()
    while engine.has_work:
        for tokens in engine.step().get(b"a", []):
            got.add(tokens)
    assert engine.status().num_preemptions == 1
    assert_likely(got.prompt, oracle(model, prompt).log_softmax(-1)[:-1], prompt[1:], 3)


@pytest.mark.parametrize("vocab_size", [1009, 128_256, 10**6])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_piece_is_at_most_a_quarter_of_the_bound(vocab_size: int, itemsize: int) -> None:
    rows = values.piece_rows(vocab_size, itemsize)
    assert rows * vocab_size * itemsize <= values.LOGITS_BYTES == (256 << 20) // 4
    assert rows < 128 or rows % 128 == 0
