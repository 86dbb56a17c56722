"""Read the text model of a checkpoint that sees images, too; its other parts stay out. No torch.

A family's file registers such an architecture by `wraps`: config.json has the text model's keys in
`text_config`, and its tensors are named as its family names them, below `language_model.`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from slipstream.models.axes import TensorNames
from slipstream.models.model_config import ModelConfig
from slipstream.models.reader import Reader, words

_TEXT = "text_config"
_LANGUAGE = "language_model"
_OTHERS = ("vision_tower.", "multi_modal_projector.")  # tensors that are not read
# Of the whole checkpoint, wherever config.json says them.
_SHARED = words("dtype torch_dtype eos_token_id quantization_config tie_word_embeddings")
_OWN = words(f"architectures model_type transformers_version {_TEXT}")


@dataclass(frozen=True, slots=True)
class Whole:
    """An architecture of which the text model is served.

    model_type: config.json's.
    texts: the text model's `model_type` -> its architecture; the first where it is not said.
    """

    model_type: str
    texts: Mapping[str, str]


_WHOLES: dict[str, Whole] = {}


def wraps(architecture: str, model_type: str, texts: Mapping[str, str]) -> None:
    """Register an architecture whose text model is of a family; see `Whole`."""
    assert architecture not in _WHOLES, f"two files are for {architecture}"
    _WHOLES[architecture] = Whole(model_type, texts)


def registered_wholes() -> Mapping[str, Whole]:
    """Return the architectures of all imported files."""
    return _WHOLES


def text_of(config: Reader, own: Whole) -> Reader:
    """Return the config.json of the text model; raises `CheckpointError` if it is not served."""
    if config.data.get("model_type") not in (None, own.model_type):
        raise config.refusal("model_type", f"is not that of this architecture, {own.model_type}")
    text = config.child(_TEXT)
    kind = text.data.get("model_type", next(iter(own.texts)))
    if not isinstance(kind, str) or kind not in own.texts:
        raise text.refusal("model_type", f"is not implemented; {' or '.join(own.texts)} is")
    shared = {key: config.data[key] for key in _SHARED if config.data.get(key) is not None}
    text.data = {**text.data, **shared, "architectures": [own.texts[kind]], "model_type": kind}
    for key in sorted(config.data.keys() - _SHARED - _OWN):
        config.ignore(key)
    return text


def within(model: ModelConfig) -> ModelConfig:
    """Return a text model whose tensors are among those of a checkpoint that sees images."""
    own = {
        "model": f"{_LANGUAGE}.model",
        "lm_head": f"{_LANGUAGE}.lm_head",
        **model.tensors.own,
    }
    assert not any(name.startswith("model.") for name in own), "these names have no prefix"
    unused = (*model.tensors.unused, *_OTHERS)
    tensors: TensorNames = replace(model.tensors, own=own, unused=unused)
    return replace(model, tensors=tensors, is_text_alone=True)
