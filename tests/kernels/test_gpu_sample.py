"""Sampling on a GPU: the reference's tokens, but where scores or borders differ by rounding."""

import numpy as np
import pytest
import torch
from fixtures.kernels.checking import DTYPES, Judge, same_bits, short
from fixtures.kernels.sample_cases import (
    PARAMETERS,
    column,
    distributions,
    is_allowed,
    mixed_counts,
    mixed_edits,
    mixed_rows,
    parameter_rows,
)
from fixtures.kernels.sampling import Drawn, draw_rows, make_rows
from slipstream.kernels.sampling.sample import ROW, count_tokens, philox, sample
from slipstream.runner.sampling_rows import history_arrays

pytestmark = pytest.mark.gpu

VOCABULARIES = (1, 2, 5, 17, 1009, 4096, 32000, 128256, 151936)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("size", VOCABULARIES)
def test_sample(size: int, dtype: torch.dtype) -> None:
    judge = Judge(f"sample {size} {short(dtype)}")
    num_equal = num_rows = 0
    for kind, logits in distributions(len(PARAMETERS), size, dtype).items():
        for trial in range(3 if dtype == torch.float32 else 1):
            rows = parameter_rows(trial)
            drawn = draw_rows(logits, rows)
            want = draw_rows(logits, rows, is_reference=True).token_ids.tolist()
            tokens = drawn.token_ids.tolist()
            bits = philox(column(rows, "seed").cuda(), column(rows, "number").cuda(), size)
            noise = -torch.log(-torch.log(((bits >> 9).double() + 0.5) * 2.0**-23))
            judge.true(f"{kind}: not finite", bool(drawn.outcomes.all()))
            for n, (token, expected) in enumerate(zip(tokens, want, strict=True)):
                num_rows += 1
                num_equal += token == expected
                judge.true(
                    f"{kind} {PARAMETERS[n]}: {token}, reference {expected}",
                    token == expected
                    or (
                        0 <= token < size
                        and is_allowed(logits[n].float(), PARAMETERS[n], noise[n], token)
                    ),
                )
            inside = drawn.token_ids.clamp(0, size - 1)[:, None]
            exact = logits.double().log_softmax(-1).gather(-1, inside)[:, 0]
            error = (drawn.log_probs.double() - exact).abs() / (1 + exact.abs())
            judge.true(
                f"{kind}: log prob error {float(error.max()):.1e}", float(error.max()) < 1e-5
            )
            for _ in range(4):
                again = draw_rows(logits, rows)
                judge.true(
                    f"{kind}: repetition",
                    same_bits(again.token_ids, drawn.token_ids)
                    and same_bits(again.log_probs, drawn.log_probs),
                )
    share = num_equal / num_rows
    judge.true(f"only {share:.1%} equal the reference", share > 0.99)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_broken_rows(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 1009, device="cuda", dtype=dtype)
    logits[0, 1008] = float("nan")
    logits[1] = float("-inf")
    logits[2, 0] = float("inf")
    logits[3, :1008] = float("-inf")
    for temperature in (0.0, 1.0):
        for top_p in (1.0, 0.5):
            rows = make_rows(6, temperature=temperature, top_p=top_p, top_k=5)
            drawn = draw_rows(logits, rows)
            assert drawn.outcomes.tolist() == [False, False, False, True, True, True]
            assert drawn.token_ids[:4].tolist() == [0, 0, 0, 1008]
            assert drawn.log_probs.isnan().tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("size", [17, 1009, 4096, 32000, 151936])
def test_penalties_and_edits(size: int, dtype: torch.dtype) -> None:
    """Tokens and counts as the reference's; log probs against fp64 of the edited logits."""
    judge = Judge(f"penalties {size} {short(dtype)}")
    torch.manual_seed(size)
    rows = mixed_rows(40)
    edits = mixed_edits(rows, size)
    counts = mixed_counts(40, size)
    logits = (torch.randn(40, size, device="cuda") * 3).to(dtype)
    found, want = counts.clone(), counts.clone()
    drawn = draw_rows(logits, rows, edits, found)
    expected = draw_rows(logits, rows, edits, want, is_reference=True)
    judge.true("finite", bool(drawn.outcomes.all()))
    equal = drawn.token_ids == expected.token_ids
    share = float(equal.float().mean())
    judge.true(f"only {share:.1%} equal the reference", share > 0.94)
    greedy = torch.from_numpy(rows.numpy().view(ROW)["temperature"][:, 0] == 0).cuda()
    judge.true("a greedy token differs", bool(equal[greedy].all()))
    error = (drawn.log_probs - expected.log_probs).abs() / (1 + expected.log_probs.abs())
    worst = float(error[equal].max())
    judge.true(f"log prob error {worst:.1e}", worst < 1e-5)
    slots = torch.from_numpy(rows.numpy().view(ROW)["slot"][:, 0].astype(np.int64)).cuda()
    same = slots[equal]
    judge.true("counts differ", same_bits(found[same], want[same]))
    judge.true("nothing was counted", not same_bits(found, counts))
    again = draw_rows(logits, rows, edits, counts.clone())
    judge.true("repetition", same_bits(again.log_probs, drawn.log_probs))
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("size", [1009, 128256])
def test_rows_do_not_depend_on_neighbours(size: int, dtype: torch.dtype) -> None:
    """Alone, among 255 others and in another order: the same bits."""
    torch.manual_seed(1)
    rows = mixed_rows(256)
    edits = mixed_edits(rows, size)
    logits = (torch.randn(256, size, device="cuda") * 2).to(dtype)
    counts = mixed_counts(256, size)
    together = draw_rows(logits, rows, edits, counts.clone())
    order = torch.randperm(256)
    shuffled = draw_rows(logits[order.cuda()], rows[order], edits, counts.clone())
    differing = []
    for n in (*range(40), 255):
        alone_row = rows[n : n + 1].clone()
        alone_row.numpy().view(ROW)["result"] = 0
        alone = draw_rows(logits[n : n + 1], alone_row, edits, counts.clone())
        for name in ("token_ids", "log_probs"):
            one, among = getattr(alone, name), getattr(together, name)[n : n + 1]
            if not same_bits(one, among):
                differing.append((n, name))
    assert not differing
    assert same_bits(shuffled.token_ids, together.token_ids)
    assert same_bits(shuffled.log_probs, together.log_probs)


def test_unaligned_rows_are_the_same_rows() -> None:
    logits = torch.randn(18, 5000, device="cuda")
    rows = parameter_rows(0)
    for begin in (1, 3, 4):
        view = logits[:, begin : begin + 4000]
        drawn, want = draw_rows(view, rows), draw_rows(view.contiguous(), rows)
        assert same_bits(drawn.token_ids, want.token_ids)
        assert same_bits(drawn.log_probs, want.log_probs)


def test_results_are_mirrored_and_padding_writes_nothing() -> None:
    logits = torch.randn(6, 1000, device="cuda", dtype=torch.bfloat16)
    rows = make_rows(6, result=np.array([5, -1, 3, 0, -1, 2]))
    rows.numpy().view(ROW)["slot"][1] = 10**9  # padding is not even looked at
    drawn, mirrors = Drawn.empty(7, "cuda"), Drawn.empty(7)
    pinned = [t.pin_memory() for t in (mirrors.token_ids, mirrors.log_probs, mirrors.outcomes)]
    draw_rows(logits, rows, into=drawn, mirrors=tuple(pinned))
    torch.cuda.synchronize()
    for mirror, out in zip(pinned, (drawn.token_ids, drawn.log_probs, drawn.outcomes), strict=True):
        assert same_bits(mirror, out.cpu())
    assert drawn.outcomes.tolist() == [True, False, True, True, False, True, False]
    assert drawn.token_ids[[1, 4, 6]].tolist() == [-7, -7, -7]


@pytest.mark.parametrize("size", [17, 1009, 128256])
def test_count_tokens(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    histories = []
    for slot, (length, num_prompt) in enumerate(
        [(0, 0), (1, 1), (5, 0), (5000, 100), (40_000, 3), (1025, 1024), (70_000, 70_000)]
    ):
        tokens = torch.randint(0, size, (length,), generator=generator)
        if length == 40_000:
            tokens[3:] = size - 1  # more often than can be counted
        histories.append((6 - slot, tokens.tolist(), num_prompt))
    arrays = [torch.from_numpy(a).cuda() for a in history_arrays(histories)]
    counts = torch.full((8, size), 77, dtype=torch.int16, device="cuda")
    want = counts.clone()
    count_tokens.oracle(want, *arrays)
    for _ in range(3):
        count_tokens(counts, *arrays)
        assert same_bits(counts, want)


def test_in_a_graph_everything_may_change() -> None:
    size, count = 32000, 36
    rows = mixed_rows(count)
    edits = torch.zeros((count * 450 + size, 2), dtype=torch.int32, device="cuda")
    static_rows = rows.cuda()
    logits = torch.zeros(count, size, device="cuda", dtype=torch.bfloat16)
    source = torch.zeros_like(logits)
    counts = torch.zeros((count, size), dtype=torch.int16, device="cuda")
    drawn = Drawn.empty(count, "cuda")

    def step() -> None:
        logits.copy_(source)
        out = (drawn.token_ids, drawn.log_probs, drawn.outcomes)
        sample(logits, static_rows, edits, counts, *out)
        sample(logits, static_rows, edits, counts, *out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for trial in range(4):
        torch.manual_seed(trial)
        rows = mixed_rows(count, trial)
        new_edits = mixed_edits(rows, size, trial)
        before = mixed_counts(count, size)
        source.copy_(torch.randn(count, size, device="cuda") * 4)
        static_rows.copy_(rows)
        edits[: len(new_edits)].copy_(new_edits)
        counts.copy_(before)
        graph.replay()
        draw_rows(source, rows, new_edits, before)
        want = draw_rows(source, rows, new_edits, before)
        assert same_bits(drawn.token_ids, want.token_ids)
        assert same_bits(drawn.log_probs, want.log_probs)
        assert same_bits(counts, before)
