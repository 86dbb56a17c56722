"""Read a Hugging Face `config.json`; refuse, by name, what is not implemented.

A key can change the computation if it is read here, or if transformers' configuration class of the
architecture reads it. Of those, a key that is not implemented must ask for nothing. Every other key
is ignored, as transformers does, and named in `ModelConfig.ignored`. No torch.
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from slipstream_contract.limits import INT32_MAX

from slipstream.errors import CheckpointError
from slipstream.layers.dims import Dims
from slipstream.models.axes import Axes
from slipstream.models.cache_scheme import says_fp8
from slipstream.models.config_class import HARMLESS, ConfigClass
from slipstream.models.family import Family
from slipstream.models.files import read_json, tensor_entries
from slipstream.models.gguf.tensors import REFERENCE
from slipstream.models.model_config import ModelConfig
from slipstream.models.reader import Reader, words
from slipstream.models.registry import family_of, supported, whole_of, why_not, with_head
from slipstream.models.ropes import STILL, by_layer, rope_key
from slipstream.models.transforms import with_changes
from slipstream.models.windows import read_windows
from slipstream.models.wrapped import text_of, within

# Read for every architecture, windows too: transformers' cache has one even if the model has none.
_READ = words(
    "architectures model_type _name_or_path vocab_size hidden_size intermediate_size "
    "num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "max_position_embeddings tie_word_embeddings dtype torch_dtype eos_token_id rope_theta "
    "rope_scaling rope_parameters original_max_position_embeddings partial_rotary_factor "
    "sliding_window layer_types quantization_config compression_config quantization"
)


# Of those, sizes that some classes call otherwise, or do not have.
_OF_SOME = words("intermediate_size num_key_value_heads head_dim rms_norm_eps")
MOST_LAYERS = 10_000  # a limit for what is read per layer
_MOST_WIDE = 1 << 18  # of heads, of their size and of the hidden size: torch can count the bytes
_MOST_ROWS = 1 << 24  # of the vocabulary and of the MLP
_MOST_NEAR = 3  # names of architectures in an error
_MOST_NAMES = 32  # ignored keys in a line
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The facts of a checkpoint that a model repository needs."""

    architecture: str
    vocab_size: int
    max_positions: int
    dtype: str  # float32 | float16 | bfloat16
    eos_ids: tuple[int, ...]
    has_tokenizer: bool
    ignored: str  # a line that names the keys of config.json that change nothing; empty: none


class UnknownArchitectureError(CheckpointError):
    """An architecture that no family serves."""


def _architecture(config: Reader) -> str:
    """Return the one architecture; raises `UnknownArchitectureError`."""
    names = config.data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in supported():
        near = ", ".join(get_close_matches(str(names), supported(), _MOST_NEAR, cutoff=0.0))
        if lacks := why_not(names):
            raise UnknownArchitectureError(str(config.refusal("architectures", lacks)))
        why = (
            f"is not supported; {len(supported())} others are, see docs/families.md; names like "
            f"it: {near}"
        )
        raise UnknownArchitectureError(str(config.refusal("architectures", why)))
    name = str(names[0])
    return family_of(name).generation(config) or name


def _rename(config: Reader, family: Family) -> None:
    """Give values to the keys that are read here, whatever the family calls them.

    Raises `CheckpointError` for two names of one key with values that differ.
    """
    defaults = dict(family.config_class.defaults)
    for key, names in family.aliases.items():
        own = (key,) if family.config_class.reads(key) else ()
        said = [name for name in (*names, *own) if config.data.get(name) is not None]
        value = config.data[said[0]] if said else None
        for name in said:
            if config.data[name] != value:
                raise config.refusal(name, f"contradicts {said[0]} = {value}")
        config.names[key] = said[0] if said else names[0]
        if key in config.data and not own:
            config.ignore(key)
        config.data = {k: v for k, v in config.data.items() if k != key}
        if said:
            config.data[key] = value
        known = [defaults[name] for name in names if defaults.get(name) is not None]
        defaults[key] = known[0] if known else defaults.get(key)
    config.defaults = defaults


def _keep_read(config: Reader, family: Family) -> None:
    """Leave in `config` the keys that are read, with their defaults.

    Raises `CheckpointError` for a key that asks for what is not implemented.
    """
    cls = family.config_class
    known = {key for key in _READ if key not in _OF_SOME or cls.reads(key)}
    known |= family.keys | set(family.aliases)
    for key, value in config.data.items():
        if key in known or key in HARMLESS:
            continue
        if not cls.reads(key):
            config.ignore(key)
        elif not cls.is_neutral(key, value):
            raise config.refusal(key, "is not implemented")
    config.data = {key: value for key, value in config.data.items() if key in known}
    config.data |= family.derived(config)


def _check_model_type(config: Reader, cls: ConfigClass) -> None:
    """Refuse the model_type of another architecture: transformers uses it to choose the class."""
    if config.has("model_type") and config.data["model_type"] not in cls.model_types:
        names = " or ".join(cls.model_types)
        raise config.refusal("model_type", f"is not that of this architecture, {names}")


def _dims(config: Reader) -> Dims:
    heads = config.whole("num_attention_heads", most=_MOST_WIDE)
    kv_heads = config.whole("num_key_value_heads", heads)
    hidden = config.whole("hidden_size", most=_MOST_WIDE)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", f"does not divide {heads} attention heads")
    if not config.has("head_dim") and hidden % heads:
        raise config.refusal("hidden_size", f"is not a multiple of {heads} attention heads")
    head_size = config.whole("head_dim", hidden // heads, _MOST_WIDE)
    if head_size % 2:
        raise config.refusal("head_dim", f"gives heads of {head_size}: rotation needs an even size")
    return Dims(
        vocab_size=config.whole("vocab_size", most=_MOST_ROWS),
        hidden_size=hidden,
        intermediate_size=config.whole("intermediate_size", most=_MOST_ROWS),
        num_layers=config.whole("num_hidden_layers", most=MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        eps=config.positive("rms_norm_eps", 1e-6),
    )


def _axes(config: Reader, family: Family) -> Axes:
    """Read the family's axes, and the activation."""
    key, known = family.activation_key, family.activations
    name = config.get(key)
    if not isinstance(name, str) or name not in known:
        raise config.refusal(key, f"is not implemented; {' or '.join(known)} is")
    return replace(family.axes(config), activation=known[name])


def eos_ids(config: Reader, directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text, from generation_config.json, else config.json.

    Without generation_config.json and a key in config.json, the class's default.
    """
    path = directory / "generation_config.json"
    has_generation = path.is_file()
    generation = Reader(read_json(path) if has_generation else {}, str(path))
    source = generation if generation.has("eos_token_id") else config
    is_default = "eos_token_id" not in source.data
    value = None if is_default and has_generation else source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        if is_default:  # the vocabulary does not have that token
            return ()
        raise source.refusal("eos_token_id", f"is outside of a vocabulary of {vocab_size}")
    return tuple(dict.fromkeys(ids))


def dtype_of(config: Reader) -> str | None:
    """Return the dtype that config.json names, if it does: float32, float16 or bfloat16."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    if not config.has(key):
        return None
    name = str(config.get(key)).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise config.refusal(key, "is not one of float32, float16, bfloat16")
    return name


def read_config(directory: Path) -> ModelConfig:
    """Read `config.json` and `generation_config.json` of a checkpoint; raises `CheckpointError`."""
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: {_no_checkpoint(directory)}")
    config = Reader(read_json(directory / "config.json"), str(directory / "config.json"))
    if "architectures" in config.data:
        config.data = {**config.data, "architectures": with_head(config.data["architectures"])}
    whole = whole_of(config.data.get("architectures"))
    if whole is None:
        return read_model(config, _architecture(config), directory)
    text = text_of(config, whole)
    return within(read_model(text, _architecture(text), directory), whole)


def _no_checkpoint(path: Path) -> str:
    """Say why a path is no directory of a checkpoint, and what to name in its place."""
    if path.suffix.lower() == ".gguf" and path.is_file():
        return "is a file; `slipstream compose` makes a repository of a GGUF file"
    if path.is_file():
        return f"is a file; name its directory, {path.parent}, or a file that ends in .gguf"
    if not path.is_dir():
        is_name = not path.is_absolute() and len(path.parts) == 2 and path.parts[0] != ".."
        why = "; nothing is downloaded: fetch it (hf download), and name its directory"
        return f"no such directory{why * is_name}"
    files = sorted(each.name for each in path.glob("*.gguf"))
    if files:
        return f"no config.json; name the GGUF file that is to be served, such as {files[0]}"
    snapshots = sorted(path.glob("snapshots/*/config.json")) or sorted(path.glob("*/config.json"))
    near = f"; name the directory that has one, such as {snapshots[0].parent}" if snapshots else ""
    return f"no config.json: not a Hugging Face checkpoint{near}"


def read_model(config: Reader, architecture: str, directory: Path) -> ModelConfig:
    """Read a `config.json` as that of a supported architecture; raises `CheckpointError`."""
    family = family_of(architecture)
    _check_model_type(config, family.config_class)
    _rename(config, family)
    config.whole("num_hidden_layers", most=MOST_LAYERS)  # before lists of them are made
    _keep_read(config, family)
    dims = _dims(config)
    windows = read_windows(config, dims.num_layers)
    if any(windows) and not family.has_windows:
        key = "sliding_window" if config.has("sliding_window") else "layer_types"
        raise config.refusal(key, f"is in use, but {architecture} has no windows")
    max_positions = config.whole("max_position_embeddings", most=INT32_MAX)
    rope, local_rope = family.read_ropes(config, max_positions, dims.head_size)
    if rope.kind == "yarn":  # a checkpoint may give the context before scaling
        key = rope_key(config)
        scaled = int(rope.factor * rope.original_max_positions)
        if scaled > INT32_MAX:
            raise config.refusal(key, f"gives more than {INT32_MAX} positions")
        max_positions = max(max_positions, scaled)
    axes, still = _axes(config, family), family.still(config, dims.num_layers)
    ropes = by_layer(config, [local_rope if window else rope for window in windows])
    names = family.tensors if family.names is None else family.names(config)
    published = None
    if family.gguf is not None and (directory / REFERENCE).is_file():
        published = with_changes(names, dims, ropes, axes.interleaved, dims.head_size)
        names, axes = family.gguf.tensors, apart(axes)
    return ModelConfig(
        architecture=architecture,
        dims=dims,
        axes=axes,
        tensors=with_changes(names, dims, ropes, axes.interleaved, dims.head_size),
        ropes=tuple(STILL if i in still else each for i, each in enumerate(ropes)),
        windows=windows,
        max_positions=max_positions,
        ties_embeddings=config.flag("tie_word_embeddings", default=False),
        dtype=dtype_of(config),
        eos_ids=eos_ids(config, directory, dims.vocab_size),
        fp8_cache=says_fp8(config, directory),
        ignored=tuple(config.ignored),
        published=published,
    )


def apart(axes: Axes) -> Axes:
    """Return the axes of a GGUF file, where each expert has matrices of its own."""
    if axes.experts is None or not axes.experts.is_fused:
        return axes
    return replace(axes, experts=replace(axes.experts, is_fused=False))


def weights_dtype(directory: Path) -> str:
    """Return the floating dtype of most bytes of the weights, for a config.json without one."""
    sizes: dict[str, int] = {}
    for entry in tensor_entries(directory).values():
        if entry.dtype in _DTYPES:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.end - entry.begin
    dtype = _DTYPES.get(max(sizes, key=lambda name: sizes[name], default=""), "float32")
    return "float32" if dtype == "float64" else dtype


def describe(checkpoint: Path | str, config: ModelConfig | None = None) -> CheckpointInfo:
    """Run every check that reads no weights; return what compose needs.

    `config` is what was read of config.json; None: it is read here.
    """
    directory = Path(checkpoint)
    config = config or read_config(directory)
    own_dtype = weights_dtype(directory)
    return CheckpointInfo(
        architecture=config.architecture,
        vocab_size=config.dims.vocab_size,
        max_positions=config.max_positions,
        dtype=config.dtype or own_dtype,
        eos_ids=config.eos_ids,
        has_tokenizer=(directory / "tokenizer.json").is_file(),
        ignored=ignored_keys(config),
    )


def ignored_keys(config: ModelConfig) -> str:
    """Return a line with the keys of config.json that change nothing; empty if there are none.

    It names at most 32 keys, and counts the rest.
    """
    if not config.ignored:
        return ""
    names = config.ignored
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    how = f"ignored, as by transformers' {config.architecture}"
    if config.is_text_alone:
        how = f"the text model alone is served, {config.architecture}; ignored"
    return f"config.json: {how}: {', '.join(names[:_MOST_NAMES])}{more}"
