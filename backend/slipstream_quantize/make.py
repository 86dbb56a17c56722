"""The whole of `slipstream quantize`: read, calibrate, measure, quantise, write, report."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from slipstream.errors import ConfigError
from slipstream.models.gguf.unpack import as_directory
from slipstream_convert.writer import Writer
from torch import Tensor

from slipstream_quantize.job import Clock, Job, Report, write
from slipstream_quantize.measure import bits_per_byte
from slipstream_quantize.opened import Opened
from slipstream_quantize.recipe import (
    LENGTH,
    MEASURED,
    RECIPES,
    ROW_TEXT,
    ROWS_AUTO,
    SAMPLES,
    Recipe,
    settled,
)
from slipstream_quantize.rows16 import rows16_of
from slipstream_quantize.text import check_ids, default_texts, pieces, read_texts, tokenizer_of

_WORST = 5  # layers that the report names


def make(args: argparse.Namespace) -> list[str]:
    """Make the checkpoint that the options of `cli.py` ask for; return the report's lines."""
    clock = Clock()
    writer = Writer(args.output)
    try:
        with as_directory(args.checkpoint) as (directory, _):
            opened = Opened(directory, args.device, args.dtype, args.ignore)
            recipe = recipe_of(opened, args.scheme, args.group_size, args.symmetric)
            writer.check_space(least_bytes(opened, recipe))
            report = Report(args.scheme, asdict(recipe), ignored=opened.ignored)
            text = _calibration(args, opened, directory, recipe, report)
            rows16 = rows16_of(opened, args.scheme, recipe, args.rows16, text)
            report.rows16 = asdict(rows16) if rows16.names or rows16.costs else {}
            measured = _measured(args, opened, directory, report)
            if measured is not None:
                report.bits_per_byte_before = measured_bits(opened, directory, measured)
            job = Job(opened, recipe, text, writer, rows16.names)
            job.run()
            report.errors, report.smoothed = job.errors, job.smoothed
            if measured is not None:
                report.bits_per_byte_after = measured_bits(opened, directory, measured)
            clock.read(report)
            write(opened, directory, recipe, report, writer)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"--device {args.device}: the GPU has too little memory for the model and what a layer "
            "needs beside it; --device cpu has more"
        ) from None
    finally:
        writer.discard()
    return list(lines_of(report, args.output))


def recipe_of(opened: Opened, scheme: str, group: int | None, symmetric: bool) -> Recipe:
    """Return the recipe for the matrices of a checkpoint; raises `ConfigError`.

    Integers of a mixture have no zeros: transformers reads none of experts.
    """
    found = settled(scheme, group, symmetric, [p.values.shape[1] for p in opened.probes])
    return replace(found, symmetric=found.symmetric or opened.has_experts)


def least_bytes(opened: Opened, recipe: Recipe) -> int:
    """Return the bytes of what will be written, without scales and zeros."""
    quantised = sum(probe.values.numel() for probe in opened.probes)
    every = sum(tensor.numel() for tensor in opened.source.tensors.values())
    return quantised * recipe.bits // 8 + (every - quantised) * opened.dtype.itemsize


def measured_bits(opened: Opened, directory: Path, measured: Tensor) -> float:
    """Return bits a byte on the pieces `[s, length]`."""
    return bits_per_byte(opened, tokenizer_of(directory), measured)


def _calibration(
    args: argparse.Namespace, opened: Opened, directory: Path, recipe: Recipe, report: Report
) -> Tensor | None:
    if not recipe.needs_text and args.rows16 != [ROWS_AUTO]:
        return None
    texts = read_texts(args.calibration) if args.calibration else default_texts(False)
    report.calibration = str(args.calibration or "texts that come with Python")
    length = args.sample_length or min(LENGTH, opened.plan.max_model_len)
    kind = opened.plan.device.type
    most = args.samples or (SAMPLES[kind] if recipe.needs_text else ROW_TEXT[kind][0])
    found = _pieces(opened, directory, texts, length, most, report.calibration)
    report.calibration_tokens = found.numel()
    return found


def _measured(
    args: argparse.Namespace, opened: Opened, directory: Path, report: Report
) -> Tensor | None:
    if args.no_measure:
        return None
    texts = read_texts(args.measure) if args.measure else default_texts(True)
    report.measured_on = str(args.measure or "other texts that come with Python")
    length = min(LENGTH, opened.plan.max_model_len)
    return _pieces(opened, directory, texts, length, MEASURED, report.measured_on)


def _pieces(
    opened: Opened, directory: Path, texts: list[str], length: int, most: int, where: str
) -> Tensor:
    found = pieces(tokenizer_of(directory), texts, length, most, where)
    check_ids(found, opened.plan.model.dims.vocab_size, directory)
    return found


def _of_rows(found: dict[str, Any]) -> Iterator[str]:
    """Write whose rows stay in 16 bits, and what that costs and saves."""
    yield (
        f"rows of {len(found['names'])} matrices, {found['share']:.1%} of the weights, stay in 16 "
        "bits (--rows16): no byte more, but a GPU multiplies these in 16 bits, which takes longer"
    )
    if found["cost"] is not None:
        yield (
            f"rows in e4m3 cost {found['cost']:.2%} of the text's bits where all are rounded, "
            f"{found['left']:.2%} as chosen (by KL, without what weights cost)"
        )


def lines_of(report: Report, output: Path) -> Iterator[str]:
    """Write a report for a terminal."""
    size = f"{report.bytes_before / 1e6:,.1f} MB -> {report.bytes_after / 1e6:,.1f} MB"
    yield f"{output}: {report.scheme}, {size}"
    if report.calibration:
        yield f"calibrated with {report.calibration_tokens:,} tokens of {report.calibration}"
    if report.ignored:
        yield f"{len(report.ignored)} matrices stay as they are (--ignore)"
    if report.rows16:
        yield from _of_rows(report.rows16)
    kind = "outputs" if RECIPES[report.scheme].needs_text else "weights"
    mean = sum(report.errors.values()) / len(report.errors)
    yield f"squared error of {kind}, in parts of their square: {mean:.2e} in the mean; most:"
    worst = sorted(report.errors.items(), key=lambda item: -item[1])[:_WORST]
    yield from (f"  {name}: {error:.2e}" for name, error in worst)
    before, after = report.bits_per_byte_before, report.bits_per_byte_after
    if before is not None and after is not None:
        change = f"{after / before - 1:+.2%}"
        yield f"bits a byte: {before:.4f} -> {after:.4f} ({change}) on {report.measured_on}"
    yield f"{report.seconds:.0f} s, {report.processor_seconds:.0f} s of processors"
