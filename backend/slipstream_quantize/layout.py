"""Put tensors of the decoder back into the order in which the checkpoint stores them.

Several of the decoder's may be one there (q, k and v), with their rows in another order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.axes import TensorNames
from slipstream.models.moves import places
from slipstream.models.weights import FileSource
from torch import Tensor

from slipstream_quantize.recipe import Recipe


def check_layout(names: TensorNames, matrices: Sequence[str], recipe: Recipe) -> None:
    """Raise an error for matrices that cannot be written in the order of the checkpoint."""
    for name in matrices:
        moves, stored = names.moves(name), names.stored(name)
        if moves is None:
            continue
        if moves.columns is not None:
            raise CheckpointError(
                f"{stored}: heads are filled up with zeros on this device; --device cpu has them "
                "as they are"
            )
        if recipe.format == "fp8" and moves.rows is not None:
            raise ConfigError(
                f"--scheme fp8-block: rows of {stored} are not in the decoder's order, so its "
                "blocks of 128 x 128 are of others; fp8 has scales for rows"
            )


def matrices_of(
    names: TensorNames, parts: Mapping[str, Sequence[Tensor]], inputs: int
) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield each stored matrix with what was made of it, by rows, in its own order.

    Args:
        names: how the checkpoint stores its tensors.
        parts: name of a matrix of the decoder -> tensors with a row for each of its rows.
        inputs: of these matrices.
    """
    groups: dict[str, list[str]] = {}
    for name in parts:
        groups.setdefault(names.stored(name), []).append(name)
    for stored, members in groups.items():
        moves = names.moves(members[0])
        if moves is None or moves.rows is None:
            yield stored, list(parts[members[0]])
            continue
        total, _ = moves.shape(len(parts[members[0]][0]), inputs)
        whole = [each.new_empty(total, *each.shape[1:]) for each in parts[members[0]]]
        for name in members:
            own = names.moves(name)
            assert own is not None
            assert own.rows is not None
            at = places(own.rows, total, 0, whole[0].device)
            for all_rows, rows in zip(whole, parts[name], strict=True):
                all_rows[at] = rows
        yield stored, whole


def others_of(
    source: FileSource, names: TensorNames, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the decoder as the checkpoint stores them, under its names.

    What is changed as it is loaded in another way than by its places stays as it is in the file.
    """
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(names.stored(name), []).append(name)
    for stored, members in groups.items():
        if names.change(members[0]) is None:
            yield stored, tensors[members[0]]
            continue
        raw = source.raw(source.stored(members[0]))
        whole, places_of = raw.clone().flatten(), []
        order = torch.arange(math.prod(raw.shape), device=raw.device).view(raw.shape)
        for name in members:
            change = names.change(name)
            assert change is not None
            places_of.append(change(order).flatten())
        if torch.equal(torch.cat(places_of).sort().values, order.flatten()):
            for name, at in zip(members, places_of, strict=True):
                whole[at] = tensors[name].to(raw.dtype).flatten()
        yield stored, whole.view(raw.shape)
