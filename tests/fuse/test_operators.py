"""Operators of torch that are called again: the bits of the same code with other tensors."""

from collections.abc import Callable

import pytest
import torch
from slipstream.fuse import operators
from slipstream.fuse.operators import Operators
from slipstream.fuse.recording import Own, Recording, record, state_of
from slipstream.kernels.elementwise.eight_bits import Unscaled
from slipstream.kernels.elementwise.scales import Scales, ones
from slipstream.kernels.runtime import tape
from slipstream.layers.residual import Residual
from torch import Tensor
from torch.nn import functional

Tensors = list[Tensor]


def views(own: Tensors, values: Tensor, cache: Tensor) -> None:
    """Use parts of the block's tensors."""
    weight, bias = own
    part = weight[1:5, 2:6]
    values.add_(part.repeat(2, 1)[:3])
    values.mul_(weight[:3, 1:5]).add_(bias[2:6])
    cache[1:].copy_(torch.cat([values[:1], part]))
    values[1:].add_(cache[:2], alpha=2)


def products(own: Tensors, values: Tensor, cache: Tensor) -> None:
    """Multiply and normalise."""
    weight, bias = own
    made = torch.einsum("nh,hab->na", values, weight[:4].view(4, 4, 2))
    normed = functional.layer_norm(made, (4,), bias[:4], bias[4:])
    torch.mul(functional.gelu(normed), 3.0, out=values)
    values += functional.relu(weight[:3, 4:]).square()
    cache += torch.zeros_like(cache).clamp(1, 2)


def made(seed: int) -> tuple[Tensors, Tensor, Tensor]:
    """Return a block's own tensors, a sum and a cache."""
    torch.manual_seed(seed)
    storage = torch.randn(200)  # the blocks' tensors lie at different places
    weight = storage[4 * seed :][:64].view(8, 8)
    return [weight, torch.randn(8)], torch.randn(3, 4), torch.randn(6, 4)


def recorded(compute: Callable[..., None], seed: int) -> Recording | None:
    own, values, cache = made(seed)
    residual = Residual(values)

    def block(*_: object) -> None:
        compute(own, residual.values, cache)
        scratch = torch.empty(1)
        tape.note(tape.Noted("", lambda *_: 0, [scratch.data_ptr()], [0], {}))

    state = state_of(residual)
    assert state is not None
    return record(block, Own.of(own), state, residual, None, cache)  # type: ignore[arg-type]


@pytest.mark.parametrize("compute", [views, products])
def test_operators_called_again_have_the_bits_of_the_block(compute: Callable[..., None]) -> None:
    with torch.inference_mode():
        recording = recorded(compute, 0)
        assert recording is not None
        for seed in (1, 2):
            own, values, cache = made(seed)
            compute(own, values, cache)
            other, residual, kept = made(seed)
            whole = Residual(residual)
            state = state_of(whole)
            assert state is not None
            recording.repeat(Own.of(other), kept, state, whole)
            assert torch.equal(whole.values, values)
            assert torch.equal(kept, cache)


@pytest.mark.parametrize("inference", [False, True])
def test_operators_that_copy_are_seen(inference: bool) -> None:
    """A copy that nobody saw would be memory that another may have had since."""
    x = torch.arange(96.0).reshape(8, 12)
    with torch.inference_mode(inference):
        for see, operator in (
            (0, lambda: x[2:].view(-1, 3, 4).flatten(1).unflatten(1, (3, 4)).chunk(2, -1)),
            (0, lambda: x.reshape(-1).contiguous()[:9].t()),
            (0, lambda: torch.empty_like(x).new_empty(3).split([1, 2])),
            (1, lambda: x[:, :8].reshape(-1, 2)),
            (1, lambda: x[:, :8].flatten()),
            (1, lambda: x.t().contiguous()),
            (1, lambda: x.new_zeros(3)),
            (1, lambda: x.mul_(2)),
            (2, lambda: x[torch.tensor([1])]),
            (2, lambda: x.sum().item() > 0),
            (2, lambda: x.bernoulli_()),
            (2, lambda: x.to("meta")),  # another device
            (1, lambda: x.to(x.device, torch.float16)),
        ):
            with Operators() as seen:
                operator()
            assert (1 if seen.calls else 0) <= see
            assert seen.has_unknown == (see == 2)
            assert bool(seen.calls or seen.has_unknown) == (see > 0)


def test_what_may_not_be_called_again_keeps_a_block_from_being_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert recorded(products, 0) is not None
    monkeypatch.setattr(operators, "_MAKE", operators._MAKE - {"bmm"})
    assert recorded(products, 0) is None


def test_scales_that_last_are_told_from_others() -> None:
    """A launch that passes ones may mean those that it has for itself."""
    cpu, layouts = torch.device("cpu"), []
    for columns in (ones(16, cpu), ones(16, cpu), torch.ones(16)):
        residual = Residual(torch.zeros(2, 16))
        residual.add_later(Unscaled(torch.zeros(2, 16), Scales(torch.ones(2), columns, None)))
        state = state_of(residual)
        assert state is not None
        layouts.append(state.layouts)
    assert layouts[0] == layouts[1] != layouts[2]
