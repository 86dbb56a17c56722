"""Fill a class of transformers with a checkpoint's weights, and run it on steps of the engine."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from slipstream.errors import CheckpointError
from slipstream.kernels.elementwise import rope
from slipstream.layers.attention import AttentionInputs
from slipstream.layers.residual import Residual
from slipstream.models.foreign.interface import attending
from slipstream.models.foreign.names import StoredNames
from slipstream.models.foreign.parts import Parts, empty_model
from slipstream.models.model_config import ModelConfig
from slipstream.models.source import Weights

_log = logging.getLogger(__name__)


def build_foreign(
    kind: type[Any], own: Any, config: ModelConfig, weights: Weights, _: int
) -> "ForeignDecoder":
    """Make the class' model with the weights' tensors, by the names that it has itself.

    Raises `CheckpointError` for a tensor that is missing, wrong or left over, and for a class whose
    tokens see others than through attention.
    """
    model = empty_model(kind, own, weights.dtype)
    _fill(model, weights)
    weights.finish()
    if weights.device.type != "meta":
        _make_buffers(model, weights.device)
    decoder = ForeignDecoder(model, config, weights.device)
    if weights.device.type != "meta":
        decoder.check_tokens()
    return decoder


def _fill(model: Any, weights: Weights) -> None:
    """Read parameters and stored buffers; names that are tied are one tensor."""
    tied: dict[int, list[str]] = {}
    stored = StoredNames(model, weights)
    places = model.state_dict(keep_vars=True)
    for name, place in places.items():
        tied.setdefault(id(place), []).append(name)
    for names in tied.values():
        present = [name for name in names if stored.has(name)] or names[:1]
        shape = places[names[0]].shape
        values = {name: stored.read(name, shape) for name in present}
        first = values[present[0]]
        for name in names:
            value = values.get(name, first)
            if value is not first and (value.is_meta or torch.equal(value, first)):
                value = first
            elif value is not first:
                _log.warning(
                    "%s and %s are one by config.json, but differ: each is used as it is",
                    present[0],
                    name,
                )
            _put(model, name, value)


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of the parameter or buffer."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[leaf] = value


def _make_buffers(model: Any, device: torch.device) -> None:
    """Have the class compute the buffers that checkpoints do not have, as rotations' frequencies.

    It does so where it would initialise weights, so those are marked as read.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    made = []
    for name, buffer in list(model.named_non_persistent_buffers()):
        value = torch.empty_like(buffer, device=device)
        if value.is_floating_point():
            value.fill_(torch.nan)
        made.append((name, value))
        _put(model, name, value)
    model.initialize_weights()
    for name, value in made:
        if value.is_floating_point() and bool(value.isnan().any()):
            raise CheckpointError(f"{type(model).__name__}: its buffer {name} has no value")


class ForeignDecoder:
    """A class of transformers that attends to the paged cache.

    Args:
        model: with weights.
        config: of it.
        device: of the weights.
    """

    def __init__(self, model: Any, config: ModelConfig, device: torch.device) -> None:
        self.tensors = [*model.parameters(), *model.buffers()]  # all that it keeps
        self._parts, self._config, self._device = Parts(model), config, device
        size = config.dims.head_size
        # Rotates by nothing: the class has rotated queries and keys, and the cache is to be written
        # by the kernel that rotates.
        still = torch.zeros(1, size, dtype=torch.float32, device=device)
        still[:, : size // 2] = 1.0
        self._still = still

    def hidden(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[Tensor],
    ) -> Residual:
        """Return the last states; see `layers.decoder.Decoder.hidden`. Its norm is behind them."""
        with attending(_Step(inputs, caches, self._still)):
            states = self._parts.states(token_ids, inputs[0].rows.positions)
        wanted = inputs[-1].wanted
        return Residual(states if wanted is None else states[wanted])

    def logits(self, residual: Residual) -> Tensor:
        """Return the logits of states, `[n, hidden] -> [n, vocab]`."""
        states = residual.values
        return self._parts.logits(states).to(states.dtype).contiguous()

    def check_tokens(self) -> None:
        """Raise `CheckpointError` if a token's states depend on others but through attention, or on
        its place in the row of tokens: such a class needs more of a cache than keys and values.
        """
        most, vocab = self._config.max_positions, self._config.dims.vocab_size
        tokens = torch.arange(1, 10, device=self._device) % vocab
        positions = torch.tensor([0, 3, 1, 5, 2, 4], device=self._device) % most
        others = torch.cat((tokens[:3], tokens[6:])).flip(0)
        with torch.inference_mode(), attending(_alone):
            one = self._parts.states(tokens[:6], positions)[:3]
            other = self._parts.states(others, positions.flip(0)).flip(0)[:3]
            self._parts.logits(one)
        allowed = 1e-4 if one.dtype == torch.float32 else 5e-2
        if (one - other).abs().max() > allowed * one.abs().max():
            raise CheckpointError(
                f"{self._config.architecture}: its tokens see others than through attention, or "
                "not at their positions, which backend_model = 'transformers' cannot serve"
            )


def _alone(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, asked: Mapping[str, object]
) -> Tensor:
    """Stand in for attention: what a token's own query, key and value are, and no other's."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return ((q + k) * 0.1 + v).transpose(1, 2)


class _Step:
    """The attention of a step's layers, which are called in their order."""

    def __init__(
        self, inputs: Sequence[AttentionInputs], caches: Iterable[Tensor], still: Tensor
    ) -> None:
        self._layers = zip(inputs, caches, strict=True)
        self._still = still
        self._positions = torch.zeros_like(inputs[0].rows.slots)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, asked: Mapping[str, object]
    ) -> Tensor:
        """Write keys and values into the layer's cache, and attend to it; see `Attend`."""
        inputs, cache = next(self._layers)
        size, scale = q.shape[-1], asked.get("scaling")
        factor = size**-0.5 if scale is None else float(str(scale))
        room = (0, self._still.shape[-1] - size)  # the cache's heads may be larger (padding.py)
        q, k, v = (pad(x[0].transpose(0, 1), room).contiguous() for x in (q, k, v))
        rope.rope_and_cache(q, k, v, self._still, self._positions, inputs.rows.slots, cache)
        wanted = inputs.wanted
        if wanted is None:
            return inputs.attend(q, None, cache, factor)[None, ..., :size]
        out = torch.zeros_like(q)
        out[wanted] = inputs.attend(q[wanted], None, cache, factor)
        return out[None, ..., :size]
