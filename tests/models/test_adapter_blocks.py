"""Modules of an adapter that are read together are what each is alone, in all bits."""

import json
import math
from collections.abc import Mapping
from hashlib import blake2b, sha256
from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import SIZES
from fixtures.models.checkpoints import make_model, make_runner, save
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from slipstream.errors import CheckpointError
from slipstream.models.adapters import stored
from slipstream.models.adapters.read import FILE, read_adapter
from slipstream.models.adapters.targets import Targets

INPUTS = {"down_proj": 48}
OUTPUTS = {"gate_proj": 48, "up_proj": 48}
MODULES = [
    f"model.layers.{layer}.{name}_proj"
    for layer in (0, 1)
    for name in ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
]
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
FLAWS = st.none() | st.sampled_from([math.nan, math.inf, 3e38])
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    model = make_model("llama", **SIZES)
    found = make_runner(save(model, tmp_path_factory.mktemp("base"))).adapters.targets
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter")


def drawn(data: st.DataObject, modules: list[str], rank: int) -> Tensors:
    """A and B of some modules, most of one dtype."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    main, others = data.draw(DTYPES), data.draw(st.sets(st.sampled_from(modules), max_size=2))
    tensors: Tensors = {}
    for module in modules:
        end = module.rpartition(".")[2]
        sizes = {"A": (rank, INPUTS.get(end, 32)), "B": (OUTPUTS.get(end, 32), rank)}
        for side, (rows, columns) in sizes.items():
            x = torch.randn(rows, columns, generator=generator) * (1 if side == "A" else 1e-3)
            dtype = data.draw(DTYPES) if module in others else main
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = x.to(dtype)
    return tensors


def laid_out(tensors: Tensors, scales: Mapping[str, float]) -> bytes:
    """What is hashed of modules that are read together, of which tensors of B are multiplied."""
    kinds: dict[torch.dtype, list[tuple[str, torch.Tensor, float]]] = {}
    for module, scale in scales.items():
        for side in "AB":
            x = tensors[f"base_model.model.{module}.lora_{side}.weight"]
            own = f"{module} {side.lower()}", x, scale if side == "B" else 1.0
            kinds.setdefault(x.dtype, []).append(own)
    said, memory = [], b""
    for of_kind, found in kinds.items():
        found.sort(key=lambda each: each[2])
        said.append((str(of_kind), False, [(name, tuple(x.shape)) for name, x, _ in found]))
        for _, x, _ in found:
            data = x.view(torch.uint8).numpy().tobytes()
            memory += data + bytes(-len(data) % 64)
    text = repr((list(scales.items()), said)).encode()
    return len(text).to_bytes(8, "big") + text + memory


def by_definition(tensors: Tensors, scales: Mapping[str, float], piece: int) -> bytes:
    """The digest of an adapter, of those of its pieces."""
    pieces: list[dict[str, float]] = [{}]
    size = 0
    for module, scale in sorted(scales.items()):
        if size >= piece:
            pieces.append({})
            size = 0
        pieces[-1][module] = scale
        size += sum(x.nbytes for name, x in tensors.items() if f".{module}." in name)
    whole = b"".join(sha256(laid_out(tensors, own)).digest() for own in pieces)
    start = b"slipstream adapter 2 " + piece.to_bytes(8, "big")
    return blake2b(start + whole, digest_size=16).digest()


@given(data=st.data(), rank=st.integers(1, 18), piece=st.sampled_from([1, 3000, 1 << 20]))
def test_modules_that_are_read_together_are_what_each_is_alone(
    data: st.DataObject,
    rank: int,
    piece: int,
    targets: Targets,
    folder: Path,
) -> None:
    """Several dtypes and scalings in a file, in pieces of one module and of all; or no number."""
    modules = data.draw(st.lists(st.sampled_from(MODULES), min_size=1, unique=True))
    tensors, dtype = drawn(data, modules, rank), data.draw(DTYPES)
    flaw, flawed = data.draw(FLAWS), data.draw(st.sampled_from(sorted(tensors)))
    if flaw is not None:
        tensors[flawed].view(-1)[-1] = flaw
    alpha = data.draw(st.floats(0.01, 64))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "alpha_pattern": {"q_proj": alpha}}
    save_file(tensors, folder / FILE)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    scales = {m: (alpha if m.endswith("q_proj") else 8.0) / rank for m in modules}
    wanted = {
        module: (
            tensors[f"base_model.model.{module}.lora_A.weight"].to(dtype),
            (tensors[f"base_model.model.{module}.lora_B.weight"].float() * scale).to(dtype),
        )
        for module, scale in scales.items()
    }
    wrong = [
        f"{targets.parts(module)[0].place}: {side}, "
        for module, pair in wanted.items()
        for side, x in zip("AB", pair, strict=True)
        if not x.isfinite().all()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "PIECE", piece)
        if wrong:
            with pytest.raises(CheckpointError, match="|".join(wrong)):
                read_adapter(folder, targets, dtype)
            return
        found = read_adapter(folder, targets, dtype)
    for module, pair in wanted.items():
        part = targets.parts(module)[0]
        terms = [term for term in found.terms[part.place] if term.first <= part.first]
        term = max(terms, key=lambda each: each.first)
        own = term.b[part.first - term.first :][: len(pair[1])]
        assert term.a is not None
        assert torch.equal(term.a.view(torch.uint8), pair[0].view(torch.uint8))
        assert torch.equal(own.view(torch.uint8), pair[1].view(torch.uint8))
    assert found.digest == by_definition(tensors, scales, piece)


def test_torch_keeps_its_threads_when_an_adapter_was_read(targets: Targets, folder: Path) -> None:
    """The threads that read one compute alone, and no other thread does from then on."""
    before = torch.get_num_threads()
    data = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 32)}
    data |= {"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": torch.ones(48, 2)}
    save_file(data, folder / FILE)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    torch.set_num_threads(2)
    try:
        read_adapter(folder, targets, torch.float32)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
