"""Terms of pairs of rows and experts on a GPU: by torch in fp32, repeated, and beside others."""

import random

import pytest
import torch
from fixtures.kernels.checking import poison_all
from fixtures.kernels.expert_terms import Mixed, Widths
from slipstream.kernels.lora.pairs import group_pairs

pytestmark = pytest.mark.gpu
DTYPES = (torch.float16, torch.bfloat16)
RANKS = ((16, 16, 16), (3, 0, 40), (0, 300, 5), (0, 0, 0))
WIDTHS = Widths(128, 8, 2048, 768)


@pytest.mark.parametrize("num_rows", [1, 33, 700, 3000])
def test_groups_are_those_of_torch(num_rows: int) -> None:
    """Up to 47 CTAs have places; each case runs again and again."""
    rng = torch.Generator().manual_seed(num_rows)
    chosen = torch.randn(num_rows, 128, generator=rng).topk(8).indices.int()
    order = chosen.flatten().argsort(stable=True).int()
    addresses = torch.randint(0, 4, (num_rows,), generator=rng) * 4096
    addresses[num_rows // 2 :] = 8192
    given = chosen, order, torch.rand(num_rows, 8, generator=rng), addresses
    wanted = group_pairs.oracle(*given)
    moved = [each.cuda() for each in given]
    for _ in range(5):
        poison_all()
        found = group_pairs(*moved)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "tile_rows"), [(1, 8), (7, 8), (40, 16), (200, 32)])
def test_pairs_get_their_terms(
    num_rows: int, tile_rows: int, dtype: torch.dtype, is_fixed: bool
) -> None:
    """Errors are those of rounding what kernels write; rows without terms keep their bits."""
    tile_rows = max(tile_rows, 16) if is_fixed else tile_rows
    made = Mixed(WIDTHS, RANKS, dtype, "cuda", num_rows, seed=num_rows)
    rng = random.Random(num_rows)
    numbers = [rng.randint(0, 4) for _ in range(num_rows)] if num_rows > 1 else [1]
    poison_all()
    found = made.run(numbers, is_fixed, tile_rows=tile_rows)
    some = rng.sample(range(num_rows), min(num_rows, 20))
    wanted, rounded = made.by_torch(numbers, some), made.by_torch(numbers, some, dtype)
    error = (found[some] - wanted).abs().amax(1)
    assert bool((error <= 1.5 * (rounded - wanted).abs().amax(1)).all())
    plain = made.run([0] * num_rows, is_fixed, tile_rows=tile_rows)
    others = torch.tensor([number in (0, 4) for number in numbers], device="cuda")
    assert torch.equal(found[others], plain[others])
    assert bool(((found - plain)[~others].abs() > 0.05).any(1).all())
    for _ in range(3):
        poison_all()
        assert torch.equal(made.run(numbers, is_fixed, tile_rows=tile_rows), found)
    for row in some[:5] if is_fixed else ():
        assert torch.equal(made.run([numbers[row]], True, [row])[0], found[row])
