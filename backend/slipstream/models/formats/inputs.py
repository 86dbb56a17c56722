"""Inputs whose groups are not in their order, as `g_idx` says: GPTQ's and compressed-tensors'."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.models.formats.module import Module
from slipstream.quant.matrix import Kind, QuantMatrix, codes_of, halves
from slipstream.quant.parts import as_bytes, regrouped


@dataclass(frozen=True, slots=True)
class Order:
    """The groups of inputs.

    places: the group of each input that is read.
    scaled: inputs of the whole matrix. All of its groups have scales in what is read, as any input
        may be of any group.
    is_part: whether inputs are missing, so that groups have no common size.
    """

    places: Tensor
    scaled: int
    is_part: bool

    def sort(self, matrix: QuantMatrix) -> QuantMatrix:
        """Return a matrix with its codes, which are in the order of inputs, sorted by groups."""
        codes = codes_of(matrix)
        order = torch.argsort(self.places, stable=True)
        order = order if codes.is_meta else order.to(codes.device)
        found = as_bytes(codes)[:, order].view(codes.dtype)
        is_four = matrix.kind is Kind.W4
        codes = halves(found) if is_four else found.contiguous()
        made = replace(matrix, codes=codes, order=order)
        return regrouped(made, self.places.sort().values.tolist()) if self.is_part else made


def order_of(module: Module, part: str, outputs: int, inputs: int, group: int) -> Order | None:
    """Read the group of each input; None: they are in order, or there is no such tensor.

    Raises `CheckpointError` if groups of the whole matrix are not of `group` inputs.
    """
    if not module.has(part):
        return None
    module.take(part, ("I32", "I64"), (inputs,))
    whole = module.whole(outputs, inputs)[1]
    places = _places(module, part, whole, group)
    if places is None:
        return None
    if not torch.equal(places.sort().values, torch.arange(whole) // group):
        raise module.refusal(part, f"has groups that are not of {group} inputs")
    first = module.first_input
    return Order(places[first : first + inputs], whole, module.has_some_inputs)


def is_sorted(module: Module, part: str, inputs: int, group: int) -> bool:
    """Return whether groups of a whole matrix are not in the order of its inputs."""
    return module.has(part) and _places(module, part, inputs, group) is not None


def _places(module: Module, part: str, inputs: int, group: int) -> Tensor | None:
    """Return the group of each input of a whole matrix, on the host; None: they are in order."""
    places = module.numbers(part).long()
    is_unused = not bool(places.any()) or bool((places == -1).all())
    if is_unused or torch.equal(places, torch.arange(inputs) // group):
        return None
    return places
