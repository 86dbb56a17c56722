"""Terms of pairs of rows and experts: the CUDA sources, emulated, against torch."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.expert_cases import EXPERT_FORMS, Sizes, make_case
from fixtures.kernels.expert_terms import Mixed, Widths
from fixtures.tiers import quick_of
from slipstream.kernels.experts.grouped import Added, ExpertMatrix, gate_up
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.experts.sm90 import piped
from slipstream.kernels.lora import pairs
from slipstream.kernels.lora.pairs import PairTable, group_pairs
from slipstream.quant.matrix import Kind

BF16, EPSILON = torch.bfloat16, 2**-7


def same(one: PairTable, other: PairTable) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("num_rows", "experts", "top_k"), [(1, 4, 2), (7, 3, 3), (300, 5, 4), (700, 128, 8)]
)
def test_groups_are_those_of_torch(
    num_rows: int, experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to six CTAs have places; rows of prompts follow each other, others come by turns."""
    emulate(monkeypatch)
    rng = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, experts, generator=rng)
    addresses = torch.randint(0, 4, (num_rows,), generator=rng) * 4096
    addresses[num_rows // 2 :] = 8192
    chosen = logits.topk(top_k).indices.int()
    order = chosen.flatten().argsort(stable=True).int()
    given = chosen, order, torch.rand(num_rows, top_k, generator=rng), addresses
    launcher = group_pairs.launcher
    assert launcher is not None
    found = launcher(*given)
    assert same(found, group_pairs.oracle(*given))
    check_groups(found, *given)


def check_groups(
    table: PairTable,
    chosen: torch.Tensor,
    order: torch.Tensor,
    weights: torch.Tensor,
    addresses: torch.Tensor,
) -> None:
    """Each place of a row with an adapter is in one group, whose terms are its expert's."""
    seen = []
    for terms, where in table.groups.tolist():
        begin, count = where & 0xFFFFFFFF, where >> 32
        assert (terms == 0) == (count == 0)
        assert count <= 16
        for place in range(begin, begin + count):
            pair = int(order[place])
            row = pair // chosen.shape[1]
            assert terms == addresses[row] + int(chosen.flatten()[pair]) * pairs.EXPERT_WORDS * 8
            assert int(table.rows[place]) == row
            assert table.factors[place] == weights.flatten()[pair]
            seen.append(place)
    assert seen == table.marks.nonzero().flatten().tolist()
    sizes = [where >> 32 for _, where in table.groups.tolist()]
    assert sorted(sizes, key=bool, reverse=True) == sizes  # those without rows come last


@pytest.mark.parametrize("is_fixed", [False, True])
def test_pairs_get_their_terms(is_fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the gate, and times the pair's weight; rows without an adapter keep their bits."""
    emulate(monkeypatch)
    made = Mixed(Widths(5, 2, 72, 40), ((16, 3, 0), (0, 40, 5), (0, 0, 0)), BF16, "cpu")
    numbers = [0, *[1] * 9, *[2, 3] * 4, *[0, 1] * 5]
    found, plain = made.run(numbers, is_fixed), made.run([0] * len(numbers), is_fixed)
    wanted = made.by_torch(numbers)
    assert ((found.float() - wanted).abs() / (1 + wanted.abs())).max() < 2 * EPSILON
    others = torch.tensor([number in (0, 3) for number in numbers])
    assert torch.equal(found[others], plain[others])
    assert ((made.by_torch([0] * len(numbers)) - wanted).abs() > 0.1).any(1).sum() == 18
    for row in (9, 10, 26) if is_fixed else ():
        assert torch.equal(made.run([numbers[row]], True, [row])[0], found[row])


def added_to(x: torch.Tensor, matrix: ExpertMatrix, routed: Routed) -> Added:
    """What adapters add to some places; NaN where there is none."""
    rng = torch.Generator().manual_seed(3)
    values = torch.randn(len(routed.order), matrix.outputs, generator=rng).to(x.dtype)
    marks = torch.rand(len(values), generator=rng) < 0.5
    values[~marks] = torch.nan
    return Added(values, marks.int())


FORM = next(each for each in EXPERT_FORMS if each.kind is Kind.W4)
KERNELS = {  # rows of a tile, and whether it is Hopper's kernel, or weights are packed
    "skinny": (8, False, None),
    "tiled": (16, False, None),
    "tiled by 64": (64, False, None),
    "piped": (32, True, None),
    "packed": (8, False, FORM),
    "packed by 32": (32, False, FORM),
}


@pytest.mark.parametrize("kernel", quick_of(KERNELS, ("tiled", "piped")))
def test_sums_have_what_is_added_before_the_gate(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places without any keep their bits, and zeros change none."""
    rows, is_piped, form = KERNELS[kernel]
    emulate(monkeypatch)
    monkeypatch.setattr(piped, "runs_on", lambda *_: is_piped)
    monkeypatch.setattr(piped, "num_slots", lambda *_: 2)
    case = make_case(rows + 3, Sizes(3, 2, 128, 144), BF16, bias=form is None, form=form)
    routed = case.routed(rows)
    given = case.x, case.gate_up.values, case.gate_up, routed, case.gate, False
    launcher = gate_up.launcher
    assert launcher is not None
    plain, added = launcher(*given), added_to(case.x, case.gate_up, routed)
    found = launcher(*given, added)
    wanted = gate_up.oracle(case.x.float(), *given[1:], added)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-8, atol=1e-4)
    is_own = added.marks != 0
    assert torch.equal(found[~is_own], plain[~is_own])
    assert ((found - plain)[is_own].abs() > 0.05).any(1).all()
    zeros = added._replace(values=torch.zeros_like(added.values))
    assert torch.equal(launcher(*given, zeros), plain)
