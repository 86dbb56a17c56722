"""Find what a checkpoint says of quantised weights, and of a KV cache in e4m3. No torch.

Both are in `quantization_config` of config.json, ModelOpt's also in hf_quant_config.json. What is
said of weights, a format reads (`formats/`).
"""

from pathlib import Path

from slipstream.models.files import read_json
from slipstream.models.reader import Reader, words

# Values of quant_method whose weights are read: one file of `formats/` each.
METHODS = (
    "compressed-tensors",
    "awq",
    "gptq",
    "auto-round",
    "intel/auto-round",
    "modelopt",
    "modelopt_fp4",
    "fp8",
    "fbgemm_fp8",
    "bitsandbytes",
    "mxfp4",
)
_NOTHING = words(
    "quant_method format ignore exclude_modules producer quantization_status version quant_library"
)
_OLD = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # files of before 2024
# One scale for all K of a layer and one for all V. Keys that a scheme omits have these values.
_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def _is_fp8(config: Reader, key: str) -> bool:
    """Return whether the scheme of the cache under `key` is e4m3; refuse another one."""
    if not config.data.get(key):
        return False
    if isinstance(config.data[key], str):
        # AutoFP8 says so of scales that are in the file, which are e4m3's.
        is_static = key == "kv_cache_scheme" and config.data[key] == "static"
        if config.data[key] != "FP8" and not is_static:
            raise config.refusal(key, "is not implemented; FP8 is")
        return True
    scheme = config.child(key)
    for name, wanted in _FP8.items():
        if scheme.has(name) and scheme.data[name] != wanted:
            raise scheme.refusal(name, f"is not implemented; {wanted} is")
    return True


def _beside(directory: Path) -> Reader:
    """Return ModelOpt's own file; empty if there is none."""
    path = directory / "hf_quant_config.json"
    return Reader(read_json(path) if path.is_file() else {}, str(path)).child("quantization")


def _method(config: Reader) -> object:
    """Return quant_method, which bitsandbytes did not write before 2023-08."""
    loads = config.data.get("load_in_4bit"), config.data.get("load_in_8bit")
    is_old = "quant_method" not in config.data and True in loads
    return "bitsandbytes" if is_old else config.data.get("quant_method")


def says_fp8(config: Reader, directory: Path) -> bool:
    """Return whether either configuration asks for e4m3; raises `CheckpointError`."""
    own = config.child("quantization_config")
    if own.data and _method(own) not in METHODS:
        raise own.refusal("quant_method", f"is not one of {', '.join(METHODS)}")
    keys = ("kv_cache_scheme", "kv_cache_quant_algo")
    answers = [_is_fp8(each, key) for each in (own, _beside(directory)) for key in keys]
    return any(answers)


def _quantises(config: Reader) -> bool:
    """Whether it says anything of weights, beside the cache."""
    of_cache = ("kv_cache_scheme", "kv_cache_quant_algo", *_NOTHING)
    return any(value for key, value in config.data.items() if key not in of_cache)


def quantization_of(directory: Path) -> tuple[str, Reader] | None:
    """Return quant_method and the configuration of quantised weights; None: there are none."""
    config = Reader(read_json(directory / "config.json"), str(directory / "config.json"))
    own, beside = config.child("quantization_config"), _beside(directory)
    if own.data:
        return (str(_method(own)), own) if _quantises(own) else None
    if _quantises(beside):
        return "modelopt", beside
    for name, method in _OLD.items():
        if (directory / name).is_file():
            return method, Reader(read_json(directory / name), str(directory / name))
    return None
