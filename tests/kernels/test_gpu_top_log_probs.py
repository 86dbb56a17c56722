"""The likeliest tokens on a GPU: the reference's ids and ranks, and its values but for rounding."""

import pytest
import torch
from fixtures.kernels.checking import DTYPES
from fixtures.kernels.sampling import draw_rows, make_rows
from fixtures.kernels.tops import Found, find_tops, make_asks
from slipstream.core.batch import TopMode
from slipstream.core.edits import EDIT
from torch import Tensor

pytestmark = pytest.mark.gpu

VOCABULARIES = (1, 3, 61, 1009, 4096, 32000, 128256, 151936)


def logits_of(kind: str, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(size)
    normal = torch.randn((rows, size), generator=generator, device="cuda")
    made = {
        "normal": normal * 3,
        "ties": (normal * 2).round() / 2,
        "equal": torch.full_like(normal, -1.5),
        "rising": torch.arange(size, device="cuda").float().expand(rows, size) / 64,
        "infinite": torch.where(normal > 1.5, normal, float("-inf")),
    }[kind]
    made[:, size // 2] = 2.0
    return made.to(dtype)


def assert_close(found: list[Found], want: list[Found]) -> None:
    for each, reference in zip(found, want, strict=True):
        assert each.token_ids == reference.token_ids
        assert each.rank == reference.rank
        assert each.values == pytest.approx(reference.values, abs=2e-5, rel=1e-6)
        assert each.value == pytest.approx(reference.value, abs=2e-5, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "rising", "infinite"])
@pytest.mark.parametrize("size", VOCABULARIES)
def test_raw(size: int, kind: str, dtype: torch.dtype) -> None:
    logits = logits_of(kind, 6, size, dtype)
    modes = [0, int(TopMode.LOGITS)]
    tops = [0, 1, 2, 5, 20, 64]
    asks = make_asks(
        *((i, min(k, size), modes[i % 2], (i * 7919 + j) % size) for i, k in enumerate(tops)
          for j in range(2))
    )  # fmt: skip
    assert_close(find_tops(logits, asks), find_tops(logits, asks, is_reference=True))


def test_rows_that_are_not_aligned() -> None:
    logits = logits_of("normal", 3, 1010, torch.bfloat16)[:, 1:]
    asks = make_asks((0, 5, 0, 3), (2, 64, 0, 1008))
    assert_close(find_tops(logits, asks), find_tops(logits, asks, is_reference=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("size", [61, 4096, 128256])
def test_processed(size: int, temperature: float, dtype: torch.dtype) -> None:
    """Edits and penalties, as before the sampled token was counted."""
    logits = logits_of("normal", 4, size, dtype)
    ids = sorted({0, 5, size // 3, size - 1})
    edits = b"".join(EDIT.pack(i, 3.0 if i % 2 else float("-inf")) for i in ids)
    words = torch.frombuffer(bytearray(edits), dtype=torch.int32).view(-1, 2)
    counts = torch.randint(0, 3, (4, size), dtype=torch.int16)
    rows = make_rows(
        4,
        temperature=temperature,
        seed=[3, 4, 5, 6],
        presence=[0.0, 0.5, 0.5, 0.0],
        frequency=[0.0, 0.25, 0.0, 0.0],
        repetition=[1.0, 1.0, 1.25, 1.5],
        end_edit=[len(ids), 0, len(ids), 0],
    )
    on_device = counts.cuda()
    drawn = draw_rows(logits, rows.cuda(), words.cuda(), on_device)
    both = [int(TopMode.PROCESSED), int(TopMode.PROCESSED | TopMode.LOGITS)]
    asks = make_asks(*((i, min(20, size), mode, -1) for i in range(4) for mode in both))
    where = (logits, asks, rows, words, on_device, drawn.token_ids)
    assert_close(find_tops(*where), find_tops(*where, is_reference=True))
