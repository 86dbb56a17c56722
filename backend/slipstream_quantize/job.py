"""Quantise a checkpoint block by block, each behind the quantised ones before it."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from slipstream.models.files import read_json
from slipstream.models.weights import FileSource
from slipstream_convert.writer import Writer
from torch import Tensor
from tqdm import tqdm

from slipstream_quantize.formats import config_of, tensors_of
from slipstream_quantize.gptq import gptq
from slipstream_quantize.grid import Fitted, Grid, output_error
from slipstream_quantize.layout import check_layout, matrices_of, others_of
from slipstream_quantize.observe import ROUNDINGS, Probe, Seen, round_blocks
from slipstream_quantize.opened import Opened, ProbedLayer, Running
from slipstream_quantize.recipe import Recipe
from slipstream_quantize.smooth import Held, awq_scales, divide_norm, held_by, smooth_scales


@dataclass
class Report:
    """What was made and what it lost.

    Attributes:
        errors: of each layer, squared error of outputs over their square; without a text, of its
            weights.
        rows16: as `rows16.Rows16`, where rows stay in 16 bits.
    """

    scheme: str
    recipe: dict[str, Any]
    errors: dict[str, float] = field(default_factory=dict)
    smoothed: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    rows16: dict[str, Any] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    calibration: str = ""
    calibration_tokens: int = 0
    measured_on: str = ""
    bits_per_byte_before: float | None = None
    bits_per_byte_after: float | None = None


class Job:
    """A checkpoint and a recipe.

    Args:
        opened: the checkpoint; its layers compute what the quantised ones would, afterwards.
        recipe: what is made.
        text: token ids `[s, length]` to calibrate with, if the recipe needs them.
        writer: gets the tensors of each block; None: nothing is written.
        rows16: matrices whose rows are not rounded, by the names under which they are written.
    """

    def __init__(
        self,
        opened: Opened,
        recipe: Recipe,
        text: Tensor | None,
        writer: Writer | None = None,
        rows16: Sequence[str] = (),
    ) -> None:
        assert text is not None or not recipe.needs_text, "activations decide"
        self._opened = opened
        self._recipe = recipe
        matrices = [name for probe in opened.probes for name in probe.names]
        check_layout(opened.names, matrices, recipe)
        self._grid = Grid(recipe, opened.dtype)
        self._writer = writer
        self._rows16 = frozenset(rows16)
        self._running = Running(opened, text) if text is not None and recipe.needs_text else None
        self._rounding = ROUNDINGS.get(recipe.activations)
        if recipe.format == "fp8":
            self._rounding = round_blocks
        self.errors: dict[str, float] = {}
        self.smoothed: list[str] = []

    @torch.inference_mode()
    def run(self) -> None:
        """Quantise all blocks."""
        sums = self._running.embedded() if self._running else []
        is_shown = sys.stderr.isatty()
        blocks = self._opened.blocks
        with tqdm(blocks, "quantising", unit="block", disable=not is_shown) as bar:
            for i, places in enumerate(bar):
                seen = self._watch(i, places, sums)
                if self._recipe.smooth:
                    self._smooth(places, seen)
                for place, each in zip(places, seen, strict=True):
                    self._quantise(place.probe, each)
                if self._running and i + 1 < len(blocks):
                    for part in sums:
                        self._running.block(i, part)

    def _watch(self, i: int, places: list[ProbedLayer], sums: list[Tensor]) -> list[Seen | None]:
        """Run a block as it is; return what its layers read."""
        if self._running is None:
            return [None] * len(places)
        seen = [Seen() for _ in places]
        for place, each in zip(places, seen, strict=True):
            place.probe.seen = each
        for part in sums:
            self._running.block(i, part.clone())
        for place in places:
            place.probe.seen = None
        return [each.finish(p.probe.values) for each, p in zip(seen, places, strict=True)]

    def _smooth(self, places: list[ProbedLayer], seen: list[Seen | None]) -> None:
        """Move scales between the layers of a block; `seen` is of the new inputs afterwards."""
        for at, place in enumerate(places):
            one = seen[at]
            assert one is not None, "a recipe that smooths has a text"
            if place.norm is None and place.rows is None:
                continue
            weight = place.probe.values.float()
            held = self._held(place)
            if self._recipe.smooth == "weights":
                scales = awq_scales(weight, one, self._grid, held)
            else:
                assert self._rounding is not None, "activations are rounded"
                scales = smooth_scales(weight, one, self._grid, self._rounding, held)
            if bool((scales == 1).all()):
                continue
            if place.norm is not None:
                scales = divide_norm(place.norm, scales, self._opened.dtype)
            else:
                divide_rows(place, scales)
            place.probe.values.copy_(weight * scales)
            seen[at] = one.divided(scales)
            self.smoothed += place.probe.names

    def _held(self, place: ProbedLayer) -> Held:
        """Return what scales become where they move to: a norm rounds its quotients."""
        norm = place.norm
        return (lambda x: x) if norm is None else lambda x: held_by(norm, x, self._opened.dtype)

    def _quantise(self, probe: Probe, seen: Seen | None) -> None:
        """Round the weights of a layer, in place, and hand their tensors to the writer."""
        weight = probe.values.float().clone()
        second = None if seen is None else seen.second
        fitted = self._fit(weight, second, probe.sizes)
        if self._recipe.gptq:
            assert second is not None, "GPTQ has a text"
            q = gptq(weight, second, self._grid, fitted)
        else:
            q = self._grid.round(weight, fitted)
        rounded = self._grid.values(q, fitted)
        if not bool(rounded.isfinite().all()):
            raise self._opened.too_large(f"{probe.names[0]}.weight")
        probe.values.copy_(rounded)
        stays = self._opened.names.stored(probe.names[0]) in self._rows16
        probe.rounding = None if stays else self._rounding
        parts = zip(
            probe.names,
            *(torch.split(x, probe.sizes) for x in (weight, rounded, q, fitted.scale, fitted.zero)),
            strict=True,
        )
        made: dict[str, list[Tensor]] = {}
        for name, before, after, *own in parts:
            whole = output_error(before, second)
            self.errors[name] = output_error(before - after, second) / (whole or 1.0)
            made[name] = own
        if self._writer:
            self._write(self._writer, made, weight.shape[1], fitted.overall)

    def _write(
        self, writer: Writer, made: dict[str, list[Tensor]], inputs: int, overall: float
    ) -> None:
        """Hand the tensors of the stored matrices of a layer to the writer."""
        names = self._opened.names
        for stored, (codes, scale, zero) in matrices_of(names, made, inputs):
            own = Fitted(scale, zero, overall)
            tensors = tensors_of(codes, own, self._recipe, self._opened.dtype)
            writer.add({f"{stored}.{key}": each for key, each in tensors.items()})

    def _fit(self, weight: Tensor, second: Tensor | None, sizes: list[int]) -> Fitted:
        """Fit; blocks of rows start anew in each matrix."""
        if self._recipe.format != "fp8":
            return self._grid.fit(weight, second)
        found = [self._grid.fit(part) for part in torch.split(weight, sizes)]
        return Fitted(torch.cat([f.scale for f in found]), torch.cat([f.zero for f in found]))


def divide_rows(place: ProbedLayer, scales: Tensor) -> None:
    """Divide the results that a layer's inputs are made of, in the layer before."""
    assert place.rows is not None, "inputs come from rows"
    before, rows = place.rows
    before.values[rows] /= scales[:, None].to(before.values.dtype)
    if before.bias is not None:
        before.bias[rows] /= scales.to(before.bias.dtype)


def write_rest(opened: Opened, writer: Writer) -> None:
    """Write what is not quantised: embedding, head, norms, biases, scales of a cache."""
    source, names = opened.source, opened.names
    done = {f"{name}.weight" for probe in opened.probes for name in probe.names}
    kept = {name: tensor for name, tensor in source.tensors.items() if name not in done}
    read = opened.plan.model.tensors
    files = FileSource(opened.directory, opened.plan.device, read)  # once more
    others = others_of(files, names, kept)
    for name, tensor in others:  # the embedding may be most of the model: one copy, no other
        writer.add({name: tensor}, opened.dtype)
    writer.add({names.stored(name): torch.tensor([each]) for name, each in source.numbers.items()})


def write(opened: Opened, directory: Path, recipe: Recipe, report: Report, writer: Writer) -> None:
    """Write the tensors that stay, the configuration and the report."""
    write_rest(opened, writer)
    config = read_json(directory / "config.json")
    for key in ("torch_dtype", "quantization_config"):
        config.pop(key, None)
    config["dtype"] = str(opened.dtype).removeprefix("torch.")
    kept = [*opened.unquantised, *opened.ignored]
    fp8_cache = opened.plan.model.fp8_cache
    rows16 = report.rows16.get("names", [])
    every = dict.fromkeys(name for group in opened.groups for name in group)
    rounded = [name for name in every if name not in {*rows16}]
    config["quantization_config"] = config_of(recipe, kept, fp8_cache, (rounded, rows16))
    source = opened.source
    report.bytes_before = sum(x.numel() for x in source.tensors.values()) * opened.dtype.itemsize
    report.bytes_after = writer.num_bytes
    writer.finish(directory, {"config.json": config, "quantize_report.json": asdict(report)})


class Clock:
    """Measures seconds, and those of all processors."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def read(self, report: Report) -> None:
        """Write them into a report."""
        report.seconds = round(time.perf_counter() - self._start[0], 1)
        report.processor_seconds = round(time.process_time() - self._start[1], 1)
