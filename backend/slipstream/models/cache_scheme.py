"""Find what a checkpoint says of quantised weights, and of a KV cache in e4m3. No torch.

Both are in `quantization_config` of config.json, or of its `text_config`; llm-compressor's first
files call it `compression_config`. ModelOpt's is also in hf_quant_config.json, which may not
contradict. What is said of weights, a format reads (`formats/`).
"""

from pathlib import Path

from slipstream_contract.errors import clip

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
MODELOPT = ("modelopt", "modelopt_fp4")
_MAY_LEAVE_WEIGHTS = ("compressed-tensors", *MODELOPT)  # as they are, and quantise a cache alone
KEYS = ("quantization_config", "compression_config")
MLX = "quantization"
BESIDE = "hf_quant_config.json"
_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
_OF_NO_WEIGHTS = words(
    f"quant_method format ignore exclude_modules producer quantization_status version "
    f"quant_library {' '.join(_CACHE_KEYS)}"
)
_SAME = {"INT4_AWQ": "W4A16_AWQ", "INT8_SQ": "W8A8_SQ_PER_CHANNEL"}  # names of one algorithm
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
    path = directory / BESIDE
    return Reader(read_json(path) if path.is_file() else {}, str(path)).child("quantization")


def _own(config: Reader) -> Reader:
    """Return what config.json says, or its text model's part; empty: nothing.

    Raises `CheckpointError` for MLX's key, and for two keys of one object that differ.
    """
    for at in (config, config.child("text_config")):
        if isinstance(at.get(MLX), dict) and at.get(MLX):
            known = f"{KEYS[0]}.quant_method is, one of {', '.join(METHODS)}"
            raise at.refusal(MLX, f"is MLX's, which is not implemented; {known}")
        found = [key for key in KEYS if at.has(key)]
        if len(found) > 1 and at.get(found[0]) != at.get(found[1]):
            raise at.refusal(found[1], f"contradicts {found[0]} = {clip(at.get(found[0]))}")
        if found:
            return at.child(found[0])
    return config.child(KEYS[0])


def _method(config: Reader) -> object:
    """Return quant_method, which bitsandbytes did not write before 2023-08."""
    loads = config.data.get("load_in_4bit"), config.data.get("load_in_8bit")
    is_old = "quant_method" not in config.data and True in loads
    return "bitsandbytes" if is_old else config.data.get("quant_method")


def says_fp8(config: Reader, directory: Path) -> bool:
    """Return whether either configuration asks for e4m3; raises `CheckpointError`."""
    own, beside = _own(config), _beside(directory)
    if config.get(MLX):  # and no object, so none of MLX
        config.ignore(MLX)
    if own.data and _method(own) not in METHODS:
        raise own.refusal("quant_method", f"is not one of {', '.join(METHODS)}")
    if own.data:
        _check_beside(own, beside)
    return _has_fp8(own) or _has_fp8(beside)


def _has_fp8(config: Reader) -> bool:
    answers = [_is_fp8(config, key) for key in _CACHE_KEYS]
    return any(answers)


def _quantises(config: Reader) -> bool:
    """Whether it says anything of weights, beside the cache."""
    if config.data and _method(config) not in (None, *_MAY_LEAVE_WEIGHTS):
        return True
    return any(value for key, value in config.data.items() if key not in _OF_NO_WEIGHTS)


def group_size_of(config: Reader) -> int:
    """Return ModelOpt's inputs of a group, of all or by `config_groups`; 0: it says nothing."""
    if config.get("group_size"):
        return config.whole("group_size")
    groups = config.child("config_groups")
    for name in groups.data:
        found = groups.child(name).child("weights")
        if found.has("group_size"):
            return found.whole("group_size")
    return 0


def _algorithm(config: Reader) -> object:
    """Return quant_algo, by one name where it has two."""
    value = config.get("quant_algo")
    return _SAME.get(value.upper(), value.upper()) if isinstance(value, str) else value


def _check_beside(own: Reader, beside: Reader) -> None:
    """Raise `CheckpointError` if ModelOpt's own file contradicts config.json.

    What one of them does not say is no contradiction. Names of modules are compared by what
    tensors they have (`formats/registry.py`).
    """
    if _method(own) not in MODELOPT:
        if _quantises(beside):
            raise beside.refusal("quant_algo", _contradicts(own, "quant_method"))
        return
    pairs = [(own, beside)]
    layers, others = (each.child("quantized_layers") for each in (own, beside))
    pairs += [(layers.child(x), others.child(x)) for x in layers.data.keys() & others.data.keys()]
    for first, second in pairs:
        is_said = all("quant_algo" in each.data for each in (first, second))
        if is_said and _algorithm(first) != _algorithm(second):
            raise second.refusal("quant_algo", _contradicts(first, "quant_algo"))
        sizes = group_size_of(first), group_size_of(second)
        if all(sizes) and sizes[0] != sizes[1]:
            raise second.refusal("group_size", _contradicts(first, "group_size", sizes[0]))
    said = next((key for key in _CACHE_KEYS if key in own.data), None)
    key = "kv_cache_quant_algo"
    if said is not None and key in beside.data and _has_fp8(own) != _has_fp8(beside):
        raise beside.refusal(key, _contradicts(own, said))


def _contradicts(config: Reader, key: str, value: object = None) -> str:
    value = config.get(key) if value is None else value
    return f"contradicts {key} = {clip(value)} in config.json's {config.title}"


def quantization_of(directory: Path) -> tuple[str, Reader] | None:
    """Return quant_method and the configuration of quantised weights; None: there are none.

    Raises `CheckpointError` if two configurations contradict each other.
    """
    config = Reader(read_json(directory / "config.json"), str(directory / "config.json"))
    own, beside = _own(config), _beside(directory)
    if own.data:
        _check_beside(own, beside)
        if _quantises(own):
            return str(_method(own)), own
    if _quantises(beside):
        return MODELOPT[0], beside
    for name, method in _OLD.items():
        if not own.data and (directory / name).is_file():
            return method, Reader(read_json(directory / name), str(directory / name))
    return None


def beside_of(directory: Path) -> Reader | None:
    """Return what ModelOpt's own file says of weights of which config.json says something, too."""
    found, beside = quantization_of(directory), _beside(directory)
    is_second = found is not None and found[1].title != beside.title
    return beside if is_second and _quantises(beside) else None
