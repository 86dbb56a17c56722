"""Keys of config.json that transformers' configuration class of an architecture reads. No torch.

The data, config_classes.json, is written by tools/config_classes.py.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from slipstream.models.reader import words

# Training, labels, bookkeeping: these keys change neither logits nor tokens.
HARMLESS = words(
    "transformers_version output_hidden_states return_dict chunk_size_feed_forward id2label "
    "label2id problem_type num_labels output_attentions attn_implementation _attn_implementation "
    "experts_implementation name_or_path _commit_hash use_cache initializer_range bos_token_id "
    "pad_token_id attention_dropout hidden_dropout classifier_dropout resid_pdrop embd_pdrop "
    "attn_pdrop pretraining_tp router_aux_loss_coef output_router_logits emb_pdrop init_device "
    "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
)

# Keys of theta for layers with full attention, and for layers with a window.
_THETAS = {"global": "rope_theta", "local": "rope_local_base_freq"}


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """The class of an architecture. Keys that it does not list change nothing in transformers."""

    model_types: tuple[str, ...]
    # Keys that it reads, with their defaults: fields, old names and aliases of fields, and what
    # the modules read beside them.
    defaults: Mapping[str, Any]

    def reads(self, key: str) -> bool:
        """Return whether the key can change the computation."""
        return key in self.defaults and key not in HARMLESS

    def is_neutral(self, key: str, value: object) -> bool:
        """Return whether the key with this value changes nothing."""
        default = self.defaults.get(key)
        return value == default or (_says_nothing(value) and _says_nothing(default))


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value in ({}, [], "")


@cache
def _data() -> dict[str, Any]:
    data = files("slipstream.models").joinpath("config_classes.json").read_bytes()
    classes: dict[str, Any] = json.loads(data)
    return classes


def read_config_class(architecture: str) -> ConfigClass:
    """Return the configuration class of an architecture that transformers has."""
    own, shared = _data()[architecture], _data()["shared"]
    theta = own["default_theta"]
    if not isinstance(theta, dict):
        theta = {"global": theta}
    thetas = {_THETAS[kind]: value for kind, value in theta.items()}
    keys = {**shared["others"], **own["others"], **thetas}
    keys |= {**shared["defaults"], **own["defaults"]}
    return ConfigClass(tuple(own["model_types"]), keys)


def own_class(*model_types: str, **keys: object) -> ConfigClass:
    """Return the class of an architecture that transformers lacks: its keys with their defaults."""
    shared = _data()["shared"]
    return ConfigClass(model_types, {**shared["others"], **shared["defaults"], **keys})


def is_of_transformers(architecture: str) -> bool:
    """Return whether transformers has the architecture."""
    return architecture in _data()
