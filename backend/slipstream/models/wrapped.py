"""Read the text model of a checkpoint that sees images, too; its other parts stay out. No torch.

A family's file registers such an architecture by `wraps`: config.json has the text model's keys in
`text_config`, and its tensors are named as its family names them, below a name of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from slipstream.models.axes import TensorNames
from slipstream.models.model_config import ModelConfig
from slipstream.models.reader import Reader, words

_TEXT = "text_config"
_CLASS = "model."  # the class without a head, in names since transformers 4.52
# Keys of the whole checkpoint, which config.json may have in either place.
_QUANTISED = words("quantization_config compression_config quantization")
_SHARED = words("dtype torch_dtype eos_token_id") | _QUANTISED
_TIES = "tie_word_embeddings"
_OWN = words(f"architectures model_type transformers_version {_TEXT}")
_ROPES = ("rope_parameters", "rope_scaling")
_AXES = words("mrope_section mrope_interleaved")  # of a rotation by time, height and width


@dataclass(frozen=True, slots=True)
class Whole:
    """An architecture of which the text model is served.

    model_type: config.json's.
    texts: the text model's `model_type` -> its architecture; the first where it is not said.
    decoder, head: what the text model's tensors are called that are `model` and `lm_head` alone.
    others: prefixes of the names of tensors that are not read, which may lie below `model`, too.
    is_flat: whether keys of the text model may stand beside those of the whole.
    defaults: keys of the text model's class that differ from those of its architecture's.
    ties: whether embeddings are tied where the whole's own keys do not say.
    text_ties: whether they are, too, where `text_config` alone says so; else it is not asked.
    """

    model_type: str
    texts: Mapping[str, str]
    decoder: str = "language_model.model"
    head: str = "language_model.lm_head"
    others: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.", "image_newline")
    is_flat: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)
    ties: bool = False
    text_ties: bool = False


_WHOLES: dict[str, Whole] = {}


def wraps(architecture: str, whole: Whole) -> None:
    """Register an architecture whose text model is of a family."""
    assert architecture not in _WHOLES, f"two files are for {architecture}"
    _WHOLES[architecture] = whole


def registered_wholes() -> Mapping[str, Whole]:
    """Return the architectures of all imported files."""
    return _WHOLES


def text_of(config: Reader, own: Whole) -> Reader:
    """Return the config.json of the text model; raises `CheckpointError` if it is not served."""
    if config.data.get("model_type") not in (None, own.model_type):
        raise config.refusal("model_type", f"is not that of this architecture, {own.model_type}")
    kind: object = next(iter(own.texts))
    if own.is_flat and _TEXT not in config.data:
        text, data = config, config.data
    else:
        text = config.child(_TEXT)
        kind = text.data.get("model_type", kind)
        if not isinstance(kind, str) or kind not in own.texts:
            raise text.refusal("model_type", f"is not implemented; {' or '.join(own.texts)} is")
        shared = {key: config.data[key] for key in _SHARED if config.data.get(key) is not None}
        data = {**text.data, **shared}
        for key in sorted(config.data.keys() - _SHARED - _OWN - {_TIES}):
            config.ignore(key)
        for key in sorted(_QUANTISED & shared.keys()):
            if text.data.get(key) not in (None, shared[key]):
                text.ignore(key)
    data = {**_defaults(own, data), **data, "architectures": [own.texts[str(kind)]]}
    data[_TIES] = _ties(own, config, text)
    text.data = {key: _rotation(x) if key in _ROPES else x for key, x in data.items()}
    text.data.pop("model_type", None)  # which is that of the text in the whole
    return text


def _ties(own: Whole, config: Reader, text: Reader) -> bool:
    """Return whether embeddings are tied, as transformers' class of the whole decides."""
    ties = config.flag(_TIES, default=False) if _TIES in config.data else own.ties
    if own.text_ties:
        ties = ties or text.flag(_TIES, default=False)
    if text.data.get(_TIES, ties) != ties:
        text.ignore(_TIES)
    return ties


def _defaults(own: Whole, data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the defaults, without a theta where the rotation has its own."""
    ropes = [data.get(key) for key in _ROPES]
    has_theta = any(isinstance(rope, dict) and "rope_theta" in rope for rope in ropes)
    return {key: x for key, x in own.defaults.items() if key != "rope_theta" or not has_theta}


def _rotation(rope: object) -> object:
    """Return a rotation by several axes as a plain one: in text all axes are alike."""
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return rope
    kept = {key: x for key, x in rope.items() if key not in _AXES}
    kinds = {key: "default" for key in ("type", "rope_type") if kept.get(key) == "mrope"}
    return kept | kinds


def within(model: ModelConfig, whole: Whole) -> ModelConfig:
    """Return a text model whose tensors are among those of a checkpoint that sees images."""
    own = {"model": whole.decoder, "lm_head": whole.head, **model.tensors.own}
    assert not any(name.startswith("model.") for name in own), "these names have no prefix"
    others = [other.removeprefix(_CLASS) for other in whole.others]
    unused = (*model.tensors.unused, *others, *(f"{_CLASS}{other}" for other in others))
    tensors: TensorNames = replace(model.tensors, own=own, unused=unused)
    return replace(model, tensors=tensors, is_text_alone=True)
