"""Random weights in fewer bits, in the forms and sizes of published files."""

import re
from typing import NamedTuple

import torch
from slipstream.kernels.experts.grouped import ExpertMatrix, expert_matrix
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.runtime.registry import KNOWN
from slipstream.models.cuts import Cuts
from slipstream.models.fileless import RandomSource
from slipstream.quant.forms import form_of_experts
from slipstream.quant.matrix import E4M3, Kind, QuantMatrix
from slipstream.runner import load_weights


class Form(NamedTuple):
    """How a file has its matrices."""

    kind: Kind
    group: int  # inputs that share a scale
    scale: torch.dtype
    names: str  # of the matrices that are quantised, an expression
    bits: float  # a weight, with its part of a scale


ALL = r"(?:_proj)$"  # of blocks; routers and heads are none of them
BY_ROW = 1 << 20  # more inputs than a matrix has
FORMS = {
    "int4": Form(Kind.W4, 128, torch.bfloat16, ALL, 4 + 16 / 128),
    "fp8-weights": Form(Kind.F8, BY_ROW, torch.bfloat16, ALL, 8),  # beside rows in 16 bits
    "fp8-blocks": Form(Kind.F8, 128, torch.float32, ALL, 8 + 32 / 128**2),
    "mxfp4": Form(Kind.F4, 32, torch.bfloat16, r"experts\.", 4 + 8 / 32),
    "nvfp4": Form(Kind.F4, 16, E4M3, ALL, 4 + 8 / 16),
}


class PackedSource(RandomSource):
    """Random values, and codes for the matrices that a form names."""

    form: Form

    def __init__(self, device: torch.device, seed: int = 0, cuts: Cuts | None = None) -> None:
        assert cuts is None, "one rank"
        super().__init__(device, seed)
        self._device = device

    def quantized(self, name: str, rows: int, inputs: int) -> QuantMatrix | None:
        """Return codes, and scales about 1 / sqrt(inputs).

        Codes have a mean of 0, so integers of 4 bits are 1 to 15: by a mean of -0.5 rows become
        alike from layer to layer, and choose a few of the experts that `mixtures.py` counts.
        """
        kind, group, dtype, names, _ = self.form
        if not re.search(names, name):
            return None
        width = inputs if kind is Kind.F8 else inputs // 2
        codes = torch.randint(0, 256, (rows, width), dtype=torch.uint8, device=self._device)
        if kind is Kind.W4:
            codes = codes.masked_fill_((codes & 15 == 0) | (codes >> 4 == 0), 0x88)
        largest = {Kind.W4: 8, Kind.F4: 6, Kind.F8: 448}[kind]
        scales = torch.rand(rows, -(-inputs // group), device=self._device) + 0.5
        scales = scales / largest / inputs**0.5
        outer = None
        if dtype == E4M3:  # which a number of the whole matrix makes small
            outer = torch.full((rows,), 1 / 64 / largest / inputs**0.5, device=self._device)
            scales = scales / outer[0]
        elif kind is Kind.F4:  # powers of two
            scales = torch.exp2(torch.log2(scales).round())
        if kind is Kind.F8:
            codes = codes.masked_fill_(codes & 0x7F == 0x7F, 0).view(E4M3)
        return QuantMatrix(kind, codes, scales.to(dtype), group, inputs, outer=outer)


def packed_experts(
    name: str, count: int, outputs: int, inputs: int, device: torch.device
) -> ExpertMatrix:
    """Return the weights of experts in a form, as a GPU keeps them for rows of bfloat16."""
    PackedSource.form = FORMS[name]
    matrix = PackedSource(device).quantized("experts.0.up_proj", count * outputs, inputs)
    assert matrix is not None, "it is an expert's"
    form = form_of_experts(matrix, count, KNOWN["sm_90a"], torch.bfloat16)
    assert form is not None, f"no kernel takes {matrix}"
    made = form.make(matrix)
    assert isinstance(made, Matrix), "of a GPU"
    return expert_matrix(made, count, None)


def settled(name: str) -> str:
    """Return the engine's option for a form, which engines made from now on have; else the name."""
    if name not in FORMS:
        return name
    PackedSource.form = FORMS[name]
    load_weights.RandomSource = PackedSource  # type: ignore[misc]
    return "auto"
