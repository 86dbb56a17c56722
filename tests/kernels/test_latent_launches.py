"""The kernels that a layer of latent attention launches on a GPU; no host waits for them."""

import pytest
import torch
from fixtures.kernels.recording import recorded
from slipstream.kernels.attention.backend import LatentCuda
from slipstream.kernels.attention.table import LATENTS, spec_of
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.dims import Dims, LatentConfig
from slipstream.layers.latent import LatentAttention
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.models.fileless import SizeSource
from slipstream.models.source import Weights

META = torch.device("meta")
DIMS = Dims(1000, 2048, 10944, 1, 16, 1, 288, 1e-6)  # DeepSeek-V2-Lite's
LATENT = LatentConfig(512, 0, 128, 64, 128, interleaved=True)
BLOCKING = {"torch.nonzero", "torch._local_scalar_dense", "torch.item", "torch.masked_select"}


def launches(num_decodes: int, chunk: int) -> list[tuple[str, str]]:
    """Names and arguments of a layer's step."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    n, count = num_decodes + chunk, num_decodes + (chunk > 0)
    every = empty(n, dtype=torch.int64)
    starts = empty(1 + (chunk > 0))
    rows = StepRows(every, every, empty(count, 64), starts, empty(count), num_decodes, chunk)
    cache = empty(8, 1, 2, 32, 288, dtype=torch.bfloat16)
    with recorded() as notes:
        w = Weights(SizeSource(), META, torch.bfloat16)
        angles = empty(2048, 64, dtype=torch.float32)
        layer = LatentAttention(w.at("attention"), DIMS, LATENT, angles, False, 0.1)
        norm = Norm(w.at("norm"), 2048, 1e-6)
        inputs = AttentionInputs.of(LatentCuda(spec_of("cuda", LATENTS)), cache, rows, 0)
        residual = Residual(empty(n, 2048, dtype=torch.bfloat16))
        notes.clear()
        layer(norm, residual, inputs, cache)
    return notes


@pytest.mark.parametrize(("num_decodes", "chunk"), [(1, 0), (32, 0), (0, 200), (3, 200)])
def test_one_kernel_of_rows_and_one_or_two_of_attention(num_decodes: int, chunk: int) -> None:
    notes = launches(num_decodes, chunk)
    names = [name for name, _ in notes]
    assert BLOCKING.isdisjoint(names)
    own = [name for name in names if "latent" in name]
    assert own[0] == "latent_rows"
    combined = "combine_latents"
    parts = ["latent_attention", combined] * (num_decodes > 0) + ["latent_attention"] * (chunk > 0)
    assert [name for name in own[1:] if name != combined] == [x for x in parts if x != combined]
    if num_decodes == 1:  # 132 multiprocessors share 2,048 tokens in parts of 128
        assert own[1:] == ["latent_attention", combined]
        assert " (1, 16, 1) 256 " in dict(notes)["latent_attention"]
