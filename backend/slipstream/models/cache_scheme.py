"""Read whether a checkpoint wants its KV cache in e4m3. No torch.

llm-compressor and ModelOpt write it to `quantization_config` in config.json, ModelOpt also to
hf_quant_config.json. Anything else there, such as quantised weights, is refused.
"""

from pathlib import Path

from slipstream.models.files import read_json
from slipstream.models.reader import Reader, words

_METHODS = ("compressed-tensors", "modelopt")
# Keys that change nothing as long as no weight is quantised.
_HARMLESS = words(
    "quant_method format ignore exclude_modules producer quantization_status version quant_library"
)
# One scale for all K of a layer and one for all V. Keys that a scheme omits have these values.
_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def _is_fp8(config: Reader, key: str) -> bool:
    """Return whether the scheme under `key` is e4m3; refuse every other key that has a value."""
    for name, value in config.data.items():
        is_known = name == key or name in _HARMLESS
        if not is_known and value not in (None, False, {}, [], ""):
            raise config.refusal(name, "is not implemented; only the cache's scheme is")
    if not config.data.get(key):
        return False
    if isinstance(config.data[key], str):
        if config.data[key] != "FP8":
            raise config.refusal(key, "is not implemented; FP8 is")
        return True
    scheme = config.child(key)
    for name, wanted in _FP8.items():
        if scheme.has(name) and scheme.data[name] != wanted:
            raise scheme.refusal(name, f"is not implemented; {wanted} is")
    return True


def says_fp8(config: Reader, directory: Path) -> bool:
    """Return whether either configuration asks for e4m3; raises `CheckpointError`."""
    own = config.child("quantization_config")
    if own.data and own.data.get("quant_method") not in _METHODS:
        raise own.refusal("quant_method", f"is not one of {', '.join(_METHODS)}")
    path = directory / "hf_quant_config.json"
    beside = Reader(read_json(path) if path.is_file() else {}, str(path))
    answers = [
        _is_fp8(own, "kv_cache_scheme"),
        _is_fp8(beside.child("quantization"), "kv_cache_quant_algo"),
    ]
    return any(answers)
