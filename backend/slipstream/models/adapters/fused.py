"""Adapters of parameters in which the matrices of all experts lie (PEFT's `target_parameters`).

PEFT has one A and one B for all of them: of E experts A is `[E * r, inputs]`, expert by expert, and
B `[outputs, r * E]`, of each rank all experts. Both become terms of the experts' own matrices.

A module is wrapped once for each of its parameters, in their order, and those inside have
`.base_layer` behind the module's name: of `mlp.experts.base_layer.lora_A` it is `gate_up_proj` if
`mlp.experts.lora_A` is there too. Which one is alone is in the configuration.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from slipstream_contract.errors import clip
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.layers.adapted import Term
from slipstream.models.adapters.config import FILE, MAX_RANK, PARAMETERS, LoraConfig
from slipstream.models.adapters.targets import Mixture, Part, Targets

_INNER = ".base_layer"
_SURE = (0, 20)  # the version of PEFT from which on sides are never exchanged
_FIRST = (0, 19)  # from which on they are exchanged by what transformers says of a module


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that has the matrices of all experts of a layer, gates and ups in one."""

    name: str  # by the adapter's names
    mixture: Mixture
    is_gate_up: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the first expert."""
        mixture = self.mixture
        return (mixture.gate, mixture.up) if self.is_gate_up else (mixture.down,)

    @property
    def place(self) -> str:
        """The place of the terms."""
        return self.parts[0].place

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of an expert's matrix."""
        return sum(part.outputs for part in self.parts), self.parts[0].inputs

    @property
    def most_elements(self) -> int:
        """Numbers of the largest tensor that an adapter can have of it."""
        return MAX_RANK * self.mixture.count * max(self.shape)


def parameters_of(
    modules: Collection[str], config: LoraConfig, targets: Targets, path: Path
) -> Mapping[str, Parameter]:
    """Return the parameters that are among the modules of a file, by the names of these.

    Raises `CheckpointError` if there are others than the configuration names, or some expert by
    itself beside them.
    """
    found: dict[str, Parameter] = {}
    places: dict[str, str] = {}
    for module in sorted(modules):
        owner, depth = _unwrapped(module)
        mixture = targets.mixture(owner)
        if mixture is None:
            continue
        names = [name for name in PARAMETERS if config.has_terms_of(f"{owner}.{name}")]
        if depth >= len(names):
            raise CheckpointError(
                f"{path}: {module} has a term, but target_parameters of {FILE} names "
                f"{' and '.join(names) or 'none'} of {owner}"
            )
        if missing := {f"{owner}{_INNER * i}" for i in range(len(names))} - set(modules):
            raise CheckpointError(f"{path}: tensor {min(missing)}.lora_A.weight is missing")
        name = names[-1 - depth]
        found[module] = own = Parameter(f"{owner}.{name}", mixture, name == PARAMETERS[0])
        if (before := places.setdefault(own.place, module)) != module:
            raise CheckpointError(f"{path}: {module} is {before} by another name")
    layers = {module: parameter.mixture for module, parameter in found.items()}
    for module in sorted(set(modules) - layers.keys()) if found else ():
        own_parts = targets.parts(module)
        whole = next(
            (name for name, each in layers.items() if own_parts and _has(each, own_parts[0])), None
        )
        if whole is not None:
            raise CheckpointError(
                f"{path}: {clip(module, 128)} is of one expert, but {whole} of all experts of "
                "that layer: either is served"
            )
    return found


def _unwrapped(module: str) -> tuple[str, int]:
    """Return the module that is wrapped, and how far inside its parameter is."""
    depth = 0
    while module.endswith(_INNER):
        module, depth = module.removesuffix(_INNER), depth + 1
    return module, depth


def _has(mixture: Mixture, part: Part) -> bool:
    return part.place in (mixture.gate.place, mixture.down.place)


def check_sides(
    parameter: Parameter, a: Sequence[int], b: Sequence[int], config: LoraConfig, where: str
) -> int:
    """Return the rank of A and B of shapes; raises `CheckpointError`, which `where` begins."""
    count, (outputs, inputs) = parameter.mixture.count, parameter.shape
    shapes = f"A and B are {list(a)} and {list(b)}"
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % count:
        raise CheckpointError(f"{where}: {shapes}: no rank fits both, times {count} experts")
    if (b[0], a[1]) != (outputs, inputs):
        turned = (a[1], b[0]) == (outputs, inputs)
        why = "; PEFT before 0.20 may have exchanged them" if turned else ""
        raise CheckpointError(
            f"{where}: {shapes}, which give no {outputs} outputs of {inputs} inputs{why}"
        )
    is_exchanged = not parameter.mixture.takes_turns or config.peft >= _FIRST
    if outputs == inputs and config.peft < _SURE and is_exchanged:
        raise CheckpointError(
            f"{where}: peft_version of {FILE} is below 0.20 or missing: PEFT may have exchanged A "
            f"and B, and a matrix of {outputs} outputs and inputs does not show it"
        )
    return a[0] // count


def term_of(parameter: Parameter, a: Tensor, b: Tensor) -> Term:
    """Return A and B, which were checked, as one term of all experts, `[e, r, inputs]` and
    `[e, outputs, r]`: gates first. Neither shares memory with what was read.
    """
    count = parameter.mixture.count
    if parameter.is_gate_up and parameter.mixture.takes_turns:
        b = torch.cat([b[::2], b[1::2]])
    rank = len(a) // count
    by_expert = b.reshape(len(b) * rank, count).t().contiguous()
    return Term(0, a.view(count, rank, -1).clone(), by_expert.view(count, -1, rank))


def of_ranks(parameter: Parameter, term: Term) -> list[Term]:
    """Return what each rank has of a term of all experts."""
    parts, found = parameter.parts, list[Term]()
    assert term.a is not None, "it is a term"
    sides = torch.split(term.b, [part.outputs for part in parts], 1)
    for cuts in zip(*(part.cuts for part in parts), strict=True):
        each = [cut.of_each() for cut in cuts]
        b = [cut.of_outputs(side) for cut, side in zip(each, sides, strict=True)]
        found.append(Term(0, each[0].of_inputs(term.a), torch.cat(b, 1)))
    return found
