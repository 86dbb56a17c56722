"""Masks before the sampler: the oracle against the definition, a GPU against the oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.batch import Outcome
from slipstream.kernels.sampling.constrain import MASK_TAG, Masks, constrain, mask_bytes
from slipstream.kernels.sampling.sample import ROW, ROW_WORDS
from torch import Tensor

assert ROW.fields is not None
RESULT = ROW.fields["result"][1] // 4
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PLACES = 12


class Case:
    """Random rows: most with a mask, some whose tag is missing, some that are padding."""

    def __init__(self, size: int, rows: int, dtype: torch.dtype, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.logits = torch.from_numpy(rng.standard_normal((rows, size), np.float32)).to(dtype)
        self.rows = torch.zeros((rows, ROW_WORDS), dtype=torch.int32)
        places = rng.permutation(PLACES)[:rows]
        places[rng.random(rows) < 0.1] = -1
        self.rows[:, RESULT] = torch.from_numpy(places.astype(np.int32))
        self.rows[:, MASK_TAG] = torch.from_numpy(rng.choice([0, 7, -7], rows).astype(np.int32))
        chance = rng.choice([0.0, 0.001, 0.5, 0.999, 1.0], (PLACES, 1))
        self.legal = rng.random((PLACES, mask_bytes(size) * 8)) < chance
        bits = np.packbits(self.legal, axis=1, bitorder="little")
        tags = rng.choice([7, 7, 7, 6, 0], PLACES).astype(np.int32)
        self.masks = Masks(
            torch.from_numpy(tags),
            torch.from_numpy(bits),
            torch.zeros(PLACES, dtype=torch.uint8),
        )
        self.outcomes = torch.zeros(PLACES, dtype=torch.uint8)

    def expected(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits, results, outcomes and what was applied, by definition."""
        logits, size = self.logits.clone(), self.logits.shape[1]
        results, outcomes = self.rows[:, RESULT].clone(), self.outcomes.clone()
        applied = self.masks.applied.clone()
        for n, (tag, place) in enumerate(self.rows[:, [MASK_TAG, RESULT]].tolist()):
            if tag == 0 or place < 0:
                continue
            if self.masks.tags[place] == abs(tag):
                logits[n, torch.from_numpy(~self.legal[place, :size])] = float("-inf")
                applied[place] = 1
            elif tag > 0:
                results[n], outcomes[place] = -1, Outcome.LATE
        return logits, results, outcomes, applied

    def computed(self, device: str, pad: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same, computed on a device from rows with `pad` elements between."""
        wide = torch.zeros((len(self.logits), self.logits.shape[1] + pad), dtype=self.logits.dtype)
        wide[:, : self.logits.shape[1]] = self.logits
        logits = wide.to(device)[:, : self.logits.shape[1]]
        rows, outcomes = self.rows.to(device), self.outcomes.to(device)
        masks = self.masks
        if device == "cuda":
            masks = Masks(*(tensor.pin_memory() for tensor in masks))
        mirror = torch.zeros(PLACES, dtype=torch.uint8, pin_memory=device == "cuda")
        constrain(logits, rows, outcomes, masks, mirror)
        if device == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(mirror, outcomes.cpu())
        return logits.cpu(), rows[:, RESULT].cpu(), outcomes.cpu(), masks.applied


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, PLACES), st.sampled_from(DTYPES), st.integers(0, 2**32))
def test_the_oracle_bans_what_the_mask_forbids(
    size: int, rows: int, dtype: torch.dtype, seed: int
) -> None:
    case = Case(size, rows, dtype, seed)
    for expected, got in zip(case.expected(), case.computed("cpu"), strict=True):
        assert torch.equal(expected, got)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 7, 64, 129, 4096, 32000, 65537, 128256, 151936])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_bans_the_same(size: int, dtype: torch.dtype) -> None:
    """Rows that are aligned and rows that are not; masks of several pieces of shared memory."""
    for seed, pad in enumerate((0, 1, 8, 3)):
        case = Case(size, PLACES, dtype, seed)
        for expected, got in zip(case.expected(), case.computed("cuda", pad), strict=True):
            assert torch.equal(expected, got)
