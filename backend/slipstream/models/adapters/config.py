"""Read PEFT's `adapter_config.json`; refuse, by key, what changes the arithmetic and is not served.

Every key that PEFT 0.21 writes for LoRA is here: read, refused unless it asks for nothing, or
without effect on what an adapter computes. Any other key must ask for nothing. No torch.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError
from slipstream.models.adapters.folder import AdapterFolder
from slipstream.models.adapters.patterns import Pattern
from slipstream.models.adapters.selection import ANY, Selection, read_selection
from slipstream.models.files import parse_json
from slipstream.models.reader import Reader, words

_T = TypeVar("_T")

FILE = "adapter_config.json"
MAX_RANK = 512
WHOLE = ("lm_head", "embed_tokens")
PARAMETERS = ("gate_up_proj", "down_proj")  # of experts, in the order in which modules have them
_MAX_BYTES = 4 << 20  # of the file
_MAX_PATTERNS = 4096

# Hints of training, or how it began: the tensors say what there is.
_HARMLESS = words(
    "megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config "
    "lora_dropout inference_mode task_type revision auto_mapping base_model_name_or_path "
    "peft_version qalora_group_size runtime_config lora_bias bias"
)
_READ = words(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern fan_in_fan_out use_dora "
    "modules_to_save target_parameters target_modules exclude_modules layers_to_transform "
    "layers_pattern init_lora_weights ensure_weight_tying"
)
_VARIANTS = words("kasa_config velora_config monteclora_config use_bdlora")  # by {}, too
# What PEFT refuses beside `target_parameters`.
_NOT_OF_PARAMETERS = ("lora_dropout", "fan_in_fan_out", "lora_bias", "use_dora")
_PREFIX = "PREFIX_TUNING"
_PROMPTS = ("PROMPT_TUNING", "P_TUNING", _PREFIX)
_OF_PROMPTS = words(  # the encoders of P-tuning and prefix tuning are not in the file: outputs are
    "peft_type num_virtual_tokens token_dim num_transformer_submodules num_attention_heads "
    "num_layers prompt_tuning_init prompt_tuning_init_text prompt_tuning_init_state_dict_path "
    "tokenizer_name_or_path tokenizer_kwargs encoder_reparameterization_type encoder_hidden_size "
    "encoder_num_layers encoder_dropout prefix_projection task_type inference_mode auto_mapping "
    "revision base_model_name_or_path peft_version"
)
_NOTHING: tuple[object, ...] = (None, False, "", [], {})
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")  # values of init_lora_weights


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What the scaling of a module's term follows from."""

    rank: int
    alpha: float
    by_root: bool  # alpha over the root of the rank
    ranks: Sequence[tuple[Pattern, int]]  # of modules; the first that matches counts
    alphas: Sequence[tuple[Pattern, float]]
    has_magnitudes: bool = False  # DoRA (Liu et al., 2024)
    whole: tuple[str, ...] = ()  # modules that come as whole matrices
    parameters: tuple[str, ...] = ()  # ends of names of parameters that have terms
    peft: tuple[int, int] = (0, 0)  # the version that wrote it; zeros: one that does not say
    selection: Selection = ANY
    ties_ends: bool = False  # the head has terms if the embedding is a target, and the reverse

    def rank_of(self, module: str) -> int:
        """Return the rank that a module must have."""
        return _first(self.ranks, module, self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of a module's term."""
        alpha = _first(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def left_out_by(self, module: str) -> str | None:
        """Return the key by which a module has no term; None: it may have one."""
        if self.ties_ends and module.rpartition(".")[2] in WHOLE:
            return None
        return self.selection.left_out_by(module)

    def has_terms_of(self, parameter: str) -> bool:
        """Return whether a parameter, by its whole name, has terms."""
        return any(f".{parameter}".endswith(f".{end}") for end in self.parameters)


def _first(patterns: Sequence[tuple[Pattern, _T]], module: str, default: _T) -> _T:
    return next((value for pattern, value in patterns if pattern.matches(module)), default)


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """What the table of virtual tokens must be."""

    num_tokens: int
    width: int
    has_keys: bool = False  # it has keys and values of all layers (prefix tuning)


def read_config(folder: AdapterFolder) -> LoraConfig | PromptConfig:
    """Read an adapter's configuration; raises `CheckpointError` (file, key, value)."""
    path = folder.directory / FILE
    config = Reader(parse_json(folder.read(FILE, _MAX_BYTES), path), str(path))
    kind = config.get("peft_type")
    if kind in _PROMPTS:
        return _prompt_config(config)
    if kind != "LORA":
        raise config.refusal("peft_type", f"is not implemented; LORA, {', '.join(_PROMPTS)} are")
    _refuse_others(config, _HARMLESS | _READ)
    rank = config.whole("r", 8)
    if rank > MAX_RANK:
        raise config.refusal("r", f"is above {MAX_RANK}, the largest rank")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise config.refusal(
            "init_lora_weights",
            "changes the base's weights in training: not implemented; PEFT converts the adapter as "
            "it saves it (path_initial_model_for_weight_conversion)",
        )
    return LoraConfig(
        rank,
        config.positive("lora_alpha", 8.0),
        config.flag("use_rslora", default=False),
        [(key, int(value)) for key, value in _patterns(config, "rank_pattern")],
        _patterns(config, "alpha_pattern"),
        config.flag("use_dora", default=False),
        _whole(config),
        _parameters(config),
        _version(config.get("peft_version")),
        read_selection(config),
        config.flag("ensure_weight_tying", default=False),
    )


def _prompt_config(config: Reader) -> PromptConfig:
    """Read the configuration of prompt tuning (Lester et al., 2021) or P-tuning."""
    _refuse_others(config, _OF_PROMPTS)
    if config.get("num_transformer_submodules") not in (None, 1):
        raise config.refusal("num_transformer_submodules", "is not 1: not a decoder's")
    count, width = config.whole("num_virtual_tokens"), config.whole("token_dim")
    if config.get("peft_type") != _PREFIX:
        return PromptConfig(count, width)
    return PromptConfig(count, 2 * config.whole("num_layers") * width, has_keys=True)


def _refuse_others(config: Reader, known: Collection[str]) -> None:
    """Refuse keys that ask for what is not implemented."""
    for key, value in config.data.items():
        if key in known or (value in _NOTHING and not (key in _VARIANTS and value == {})):
            continue
        raise config.refusal(key, "is not implemented")


def _whole(config: Reader) -> tuple[str, ...]:
    """Read the modules that come as whole matrices: head and embedding may."""
    names = config.get("modules_to_save") or []
    if not isinstance(names, list) or not all(map(_is_whole, names)):
        raise config.refusal("modules_to_save", f"is not implemented; {' and '.join(WHOLE)} are")
    return tuple(name.rpartition(".")[2] for name in names)


def _is_whole(name: object) -> bool:
    return isinstance(name, str) and name.rpartition(".")[2] in WHOLE


def _parameters(config: Reader) -> tuple[str, ...]:
    """Read the ends of names of parameters that have terms: those of experts may."""
    names = config.get("target_parameters") or []
    known = f"lists of names that end in {' or '.join(PARAMETERS)}, of experts, are"
    if not isinstance(names, list) or not all(map(_is_of_experts, names)):
        raise config.refusal("target_parameters", f"is not implemented; {known}")
    if len(names) > _MAX_PATTERNS:
        raise CheckpointError(
            f"target_parameters has {len(names)} names, at most {_MAX_PATTERNS} are served"
        )
    for key in _NOT_OF_PARAMETERS if names else ():
        if config.get(key) not in _NOTHING:
            raise config.refusal(key, "is not implemented beside target_parameters, as in PEFT")
    return tuple(names)


def _is_of_experts(name: object) -> bool:
    return isinstance(name, str) and name.rpartition(".")[2] in PARAMETERS


def _version(text: object) -> tuple[int, int]:
    found = re.match(r"(\d{1,9})\.(\d{1,9})", text) if isinstance(text, str) else None
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def _patterns(config: Reader, key: str) -> list[tuple[Pattern, float]]:
    """Read an object from regexes to ranks or alphas."""
    found: list[tuple[Pattern, float]] = []
    data = config.child(key).data
    if len(data) > _MAX_PATTERNS:
        raise CheckpointError(f"{key} has {len(data)} patterns, at most {_MAX_PATTERNS} are served")
    for text, value in data.items():
        try:
            pattern = Pattern(text)
        except ValueError as error:
            raise config.refusal(key, f"has {clip(text)}, {error}") from None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < float(str(value)) < math.inf:
            raise config.refusal(key, f"has {clip(value)} for {clip(text)}, no number > 0")
        number = float(str(value))
        if key == "rank_pattern" and (number != int(number) or number > MAX_RANK):
            raise config.refusal(key, f"has {clip(value)}, no rank from 1 to {MAX_RANK}")
        found.append((pattern, number))
    return found
