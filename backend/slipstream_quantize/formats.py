"""Tensors and `quantization_config` of what is written: compressed-tensors, Hugging Face's `fp8`.

Layouts are those of compressed-tensors 0.20 and of transformers 5's `fp8`.
"""

from typing import Any

import torch
from slipstream.kernels.gemm.packing import E2M1
from slipstream.quant.matrix import E4M3
from torch import Tensor

from slipstream_quantize.grid import Fitted
from slipstream_quantize.recipe import BLOCK, Recipe

_WORD = 32
_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """Pack `[n, k]` signed integers along k into int32, the first in the lowest bits.

    An integer is stored with half of its range added, so that none is below 0.
    """
    per_word = _WORD // bits
    codes = torch.nn.functional.pad(codes.long() + 2 ** (bits - 1), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(per_word, device=codes.device) * bits
    words = (codes.view(len(codes), -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def packed_e2m1(q: Tensor) -> Tensor:
    """Pack `[n, k]` numbers of e2m1 into `[n, k / 2]` bytes, the first in the lower half."""
    table = torch.tensor(E2M1, device=q.device)
    codes = torch.bucketize(q.abs(), table).byte() | (q.signbit().byte() << 3)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def tensors_of(q: Tensor, fitted: Fitted, recipe: Recipe, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that stand for one matrix by what follows its name.

    Args:
        q: `[n, k]`, what the weights were rounded to.
        fitted: its scales and zeros.
        recipe: kind, bits and format.
        dtype: of scales that are stored as other tensors are.
    """
    scale = fitted.scale.contiguous()
    if recipe.format == "pack-quantized":
        found = {
            "weight_packed": packed_words(q, recipe.bits),
            "weight_scale": scale.to(dtype),
            "weight_shape": torch.tensor(q.shape),
        }
        if not recipe.symmetric:
            zeros = packed_words(fitted.zero.T, recipe.bits).T
            found["weight_zero_point"] = zeros.contiguous()
        return found
    if recipe.format == "int-quantized":
        return {"weight": q.to(torch.int8), "weight_scale": scale.to(dtype)}
    if recipe.format == "float-quantized":
        return {"weight": q.to(E4M3), "weight_scale": scale.to(dtype)}
    if recipe.format == "fp8":
        return {"weight": q.to(E4M3), "weight_scale_inv": scale[::BLOCK].contiguous()}
    assert recipe.format == "nvfp4-pack-quantized", recipe.format
    return {
        "weight_packed": packed_e2m1(q),
        "weight_scale": (scale * fitted.overall).to(E4M3),
        "weight_global_scale": torch.tensor([fitted.overall]),
    }


def config_of(
    recipe: Recipe,
    ignored: list[str],
    has_cache_scales: bool,
    rows: tuple[list[str], list[str]] = ([], []),
) -> dict[str, Any]:
    """Return `quantization_config`.

    Args:
        recipe: what all matrices of blocks are.
        ignored: modules whose weights stay as they are.
        has_cache_scales: whether scales of an fp8 cache are among the tensors.
        rows: modules whose rows are rounded, and those whose rows stay in 16 bits. Where there are
            both, groups have whole names: vLLM takes a class of modules before a name in it.
    """
    if recipe.format == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ignored,
        }
    rounded, kept = rows
    how = [(rounded if kept else ["Linear"], _activations(recipe))] if rounded or not kept else []
    how += [(kept if rounded else ["Linear"], None)] if kept else []
    groups = {
        f"group_{i}": {
            "targets": targets,
            "weights": _weights(recipe),
            "input_activations": activations,
            "output_activations": None,
            "format": recipe.format,
        }
        for i, (targets, activations) in enumerate(how)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": recipe.format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": _CACHE if has_cache_scales else None,
    }


def _weights(recipe: Recipe) -> dict[str, Any]:
    is_float = recipe.kind != "int"
    strategy = "tensor_group" if recipe.kind == "e2m1" else "group" if recipe.group else "channel"
    return {
        "num_bits": recipe.bits,
        "type": "float" if is_float else "int",
        "symmetric": recipe.symmetric,
        "strategy": strategy,
        "group_size": recipe.group or None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }


def _activations(recipe: Recipe) -> dict[str, Any] | None:
    if not recipe.activations:
        return None
    return {
        "num_bits": 8,
        "type": "int" if recipe.activations == "int8" else "float",
        "symmetric": True,
        "strategy": "token",
        "group_size": None,
        "dynamic": True,
    }
