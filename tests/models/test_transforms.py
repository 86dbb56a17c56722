"""Changes of tensors at load: each undoes what a checkpoint's layout does, shapes alone too."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.elementwise.rope import rotate
from slipstream.layers.dims import Dims, RopeConfig
from slipstream.layers.rope import cos_sin_table
from slipstream.models.axes import QkvOrder, TensorNames
from slipstream.models.transforms import Changes, Heads, arranged, head_order, part_of_qkv
from torch import Tensor

EVEN = st.integers(0, 6).map(lambda half: 2 * half)


def dims(heads: int, groups: int, size: int, hidden: int = 5) -> Dims:
    return Dims(7, hidden, 6, 1, heads, groups, size, 1e-5)


def stored(q: Tensor, k: Tensor, v: Tensor, order: QkvOrder) -> Tensor:
    """One tensor of `[heads, d, ...]` each, by the definition of the order."""
    if order is QkvOrder.BLOCKS:
        return torch.cat([x.flatten(0, 1) for x in (q, k, v)])
    each = len(q) // len(k)
    rows = []
    for group in range(len(k)):
        rows += [*q[group * each : (group + 1) * each], k[group], v[group]]
    return torch.cat(rows)


@given(
    order=st.sampled_from([QkvOrder.BLOCKS, QkvOrder.HEADS, QkvOrder.GROUPS]),
    groups=st.integers(1, 3),
    each=st.integers(1, 3),
    size=st.integers(1, 4),
    is_bias=st.booleans(),
)
def test_q_k_and_v_of_every_order(
    order: QkvOrder, groups: int, each: int, size: int, is_bias: bool
) -> None:
    each = 1 if order is QkvOrder.HEADS else each
    rest = () if is_bias else (5,)
    parts = [torch.randn(n, size, *rest) for n in (groups * each, groups, groups)]
    whole, d = stored(*parts, order), dims(groups * each, groups, size)
    for which, part in enumerate(parts):
        assert torch.equal(part_of_qkv(whole, order, which, d), part.flatten(0, 1))
        with pytest.raises(RuntimeError):
            part_of_qkv(torch.cat((whole, whole[:1])), order, which, d)


@given(
    rotated=EVEN.filter(bool),
    still=EVEN,
    zeros=EVEN,
    interleaved=st.booleans(),
    heads=st.integers(1, 3),
)
def test_scores_are_those_of_rotation_by_definition(
    rotated: int, still: int, zeros: int, interleaved: bool, heads: int
) -> None:
    """The kernels' halves, over heads in another order and with zeros, give the same products."""
    size = rotated + still
    padded = size + zeros
    order = head_order(size, rotated, interleaved, padded)
    assert sorted(i for i in order if i >= 0) == list(range(size))
    q, k = torch.randn(2, 1, heads, size, dtype=torch.float64)
    config = RopeConfig(theta=50.0, attention_factor=1.5, rotated=rotated)
    table = cos_sin_table(config, padded, 4, torch.device("cpu")).double()

    def turned(x: Tensor, position: int) -> Tensor:
        flat = arranged(x.flatten(), order, size).view(1, heads, padded)
        return rotate(flat, *table[position].view(1, 1, -1).chunk(2, -1))

    def defined(x: Tensor, position: int) -> Tensor:
        out = x.clone()
        for i in range(rotated // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2)
            angle = torch.tensor(position * 50.0 ** (-2 * i / rotated), dtype=torch.float64)
            cos, sin = 1.5 * angle.cos(), 1.5 * angle.sin()
            out[..., a] = x[..., a] * cos - x[..., b] * sin
            out[..., b] = x[..., b] * cos + x[..., a] * sin
        return out

    want = (defined(q, 3) * defined(k, 1)).sum(-1)
    got = (turned(q, 3) * turned(k, 1)).sum(-1)
    assert torch.allclose(want, got, atol=1e-5)


@given(size=EVEN.filter(bool), zeros=EVEN, heads=st.integers(1, 3))
def test_heads_with_zeros_give_the_same_output(size: int, zeros: int, heads: int) -> None:
    """The output layer has zeros for what values have more; a stored bias is not touched."""
    stored = Heads(size, size + zeros, size, False)
    change = Changes(TensorNames(), dims(heads, heads, size), stored).of
    out, values = torch.randn(5, heads * size), torch.randn(heads * size)
    if not zeros:
        assert change("model.layers.0.self_attn.v_proj.weight") is None
        return
    v, o = (change(f"model.layers.0.self_attn.{name}") for name in ("v_proj.bias", "o_proj.weight"))
    assert v is not None
    assert o is not None
    assert v(values).shape == (heads * (size + zeros),)
    assert torch.allclose(o(out) @ v(values), out @ values, atol=1e-5)
    assert change("model.layers.0.self_attn.o_proj.bias") is None
    assert change("model.layers.0.mlp.up_proj.weight") is None


def test_changes_come_in_their_order() -> None:
    """Transposed first, then cut out of one matrix, then arranged; of gate and up each its half."""
    names = TensorNames(
        qkv=QkvOrder.BLOCKS, joins_gate_up=True, transposed=("self_attn.k_proj",),
        changed={"lm_head.weight": lambda x: -x},
    )  # fmt: skip
    change = Changes(names, dims(2, 1, 4), Heads(4, 4, 4, True)).of
    whole = torch.randn(16, 5)
    k = change("model.layers.7.self_attn.k_proj.weight")
    assert k is not None
    assert torch.equal(k(whole.T), whole[8:12][[0, 2, 1, 3]])
    up = change("mlp.up_proj.weight")
    assert up is not None
    assert torch.equal(up(whole), whole[8:])
    head = change("lm_head.weight")
    assert head is not None
    assert torch.equal(head(whole), -whole)
    assert change("model.embed_tokens.weight") is None
