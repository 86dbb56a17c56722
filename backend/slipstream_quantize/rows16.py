"""Choose whose rows stay in 16 bits beside e4m3: by name, or by what rounding them costs.

The cost of a GEMM is the KL of the next token on a text when the rows of that GEMM alone are
rounded, beside the model as it is. Costs nearly add up, so the fewest weights are chosen without
whose rounding the others together cost at most `AIM`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from slipstream.errors import ConfigError
from torch import Tensor
from torch.nn import functional

from slipstream_quantize.ignored import named
from slipstream_quantize.measure import logits_of
from slipstream_quantize.observe import ROUNDINGS, Probe
from slipstream_quantize.opened import Opened, Running
from slipstream_quantize.recipe import ROW_TEXT, ROWS_AUTO, ROWS_NONE, Recipe

AIM = 0.0015  # of the bits of a text
_TRUTH_BYTES = 1 << 27  # of log probs in fp32: 128 positions of a vocabulary of 262,144


@dataclass(frozen=True, slots=True)
class Rows16:
    """Matrices whose rows stay in 16 bits, and what that leaves.

    Attributes:
        names: under which they are written.
        share: of the weights that are quantised.
        cost: of all rounded rows, in parts of the bits of the text; None: not measured.
        left: of those that are still rounded, likewise, if costs add up.
        costs: nats a token of each GEMM, by its first matrix.
    """

    names: list[str] = field(default_factory=list)
    share: float = 0.0
    cost: float | None = None
    left: float | None = None
    costs: dict[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> dict[str, float | None]:
        """What is said of it without names: share, cost and what is left."""
        return {"share": self.share, "cost": self.cost, "left": self.left}


def rows16_of(
    opened: Opened, scheme: str, recipe: Recipe, asked: Sequence[str], text: Tensor | None
) -> Rows16:
    """Return what `--rows16` names; raises `ConfigError`.

    Args:
        opened: the checkpoint, its weights as they are.
        scheme: its name, for errors.
        recipe: of the scheme.
        asked: `none`, `auto`, or names as those of `--ignore`.
        text: token ids `[s, length]`, for `auto`.
    """
    if list(asked) == [ROWS_NONE]:
        return Rows16()
    if recipe.format != "float-quantized":
        raise ConfigError(
            f"--rows16: --scheme {scheme} has no rows in e4m3 by token; fp8 and fp8-gptq have"
        )
    if opened.has_experts:
        raise ConfigError("--rows16: not implemented for mixtures of experts")
    if list(asked) != [ROWS_AUTO]:
        if wrong := {ROWS_AUTO, ROWS_NONE} & {*asked}:
            raise ConfigError(f"--rows16 {min(wrong)}: stands alone, without names")
        return _summed(opened, named("--rows16", asked, opened.groups, list(opened.unquantised)))
    assert text is not None, "a text decides"
    return _measured(opened, recipe, text)


def _summed(opened: Opened, names: list[str]) -> Rows16:
    """Return matrices with their share of the weights."""
    sizes = {unit[0]: opened.num_weights(unit) for unit in opened.groups}
    own = sum(size for name, size in sizes.items() if name in names)
    return Rows16(names, own / sum(sizes.values()))


def _measured(opened: Opened, recipe: Recipe, text: Tensor) -> Rows16:
    """Measure all GEMMs and choose."""
    costs = RowCosts(opened, ROUNDINGS[recipe.activations], text)
    whole, each = costs.of(opened.probes), list(costs.of_units())
    sizes = [opened.num_weights(unit) for unit in opened.groups]
    chosen, left = fewest(each, sizes, whole, AIM * costs.nats)
    found = _summed(opened, [name for i in chosen for name in opened.groups[i]])
    by_name = {unit[0]: cost for unit, cost in zip(opened.groups, each, strict=True)}
    return Rows16(found.names, found.share, whole / costs.nats, left / costs.nats, by_name)


def fewest(
    costs: Sequence[float], sizes: Sequence[int], whole: float, most: float
) -> tuple[list[int], float]:
    """Return the places of what is left out for the others to cost at most `most`, and their cost.

    The dearest by size come first. The costs of all together, `whole`, are shared out by `costs`.
    """
    total = sum(costs)
    left = whole
    chosen: list[int] = []
    for i in sorted(range(len(costs)), key=lambda i: -costs[i] / sizes[i]):
        if left <= most or costs[i] <= 0:
            break
        chosen.append(i)
        left -= whole * costs[i] / total
    return sorted(chosen), max(left, 0.0)


class RowCosts:
    """Measures what rounding rows costs.

    Attributes:
        nats: that the model needs for a token of the text.

    Args:
        opened: the model.
        rounding: of rows `[n, k]`.
        text: token ids `[s, length]`, of which a part is taken.
    """

    @torch.inference_mode()
    def __init__(self, opened: Opened, rounding: Callable[[Tensor], Tensor], text: Tensor) -> None:
        count, length = ROW_TEXT[opened.plan.device.type]
        every = max(1, len(text) // count)
        self._text = text[::every][:count, :length].contiguous().to(opened.plan.device)
        self._opened, self._rounding = opened, rounding
        self._running = Running(opened, self._text)
        most = max(1, _TRUTH_BYTES // (4 * opened.plan.model.dims.vocab_size))
        places = torch.arange(self._text.numel(), device=self._text.device)
        places = places.view_as(self._text)[:, :-1].flatten()  # the last tokens predict none
        self._places = places[:: -(-len(places) // most)]
        self._truth = self._log_probs(0, self._running.embedded())
        following = self._text.flatten()[self._places + 1]
        self.nats = -float(self._truth.gather(1, following[:, None]).mean())

    @torch.inference_mode()
    def of(self, probes: Iterator[Probe]) -> float:
        """Return the KL in nats a token where the rows of these layers are rounded."""
        return self._kl(0, self._running.embedded(), list(probes))

    @torch.inference_mode()
    def of_units(self) -> Iterator[float]:
        """Yield the KL of each GEMM by itself, in order."""
        sums = self._running.embedded()
        for i, units in enumerate(self._opened.units):
            for unit in units:
                yield self._kl(i, [part.clone() for part in sums], unit)
            for part in sums:
                self._running.block(i, part)

    def _kl(self, first: int, sums: list[Tensor], probes: Sequence[Probe]) -> float:
        for probe in probes:
            probe.rounding = self._rounding
        found = self._log_probs(first, sums)
        for probe in probes:
            probe.rounding = None
        whole = functional.kl_div(found, self._truth, reduction="sum", log_target=True)
        return float(whole) / len(found)

    def _log_probs(self, first: int, sums: list[Tensor]) -> Tensor:
        """Return log probs `[places, vocab]` behind sums before block `first`, which change."""
        for i in range(first, len(self._opened.decoder.blocks)):
            for part in sums:
                self._running.block(i, part)
        rows = torch.cat(sums)[self._places]
        return torch.cat([each.log_softmax(-1) for _, each in logits_of(self._opened, rows)])
