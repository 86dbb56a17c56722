"""The deployments of a model repository: an engine, and the models that use it, told apart by name.

`compose` without `--name` writes the deployment `ensemble`, whose models have the names of
`MODELS`. With `--name chat` it writes the deployment `chat`: its ensemble is called `chat`, and
every other model `chat_` and its name in `MODELS`, which is its role. A repository may have any
number of deployments, beside models of other backends, which are no concern of this module.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream_contract.paths import local_path, text_of
from slipstream_contract.tensors import LLMAPI, MODELS

DEFAULT = "ensemble"
"""The deployment that compose writes without `--name`; in all others the role of the text model."""

ENGINE = "tensorrt_llm"
"""The role of the model with the engine's settings."""

TEXT_ROLES = (DEFAULT, "tensorrt_llm_bls", "vllm_model", LLMAPI.name)
"""The roles of models that take text, most preferred first."""

_ROLES = (*(name for name in MODELS if name != DEFAULT), LLMAPI.name)
_SETTINGS = Path("1", "model.json")
_OUR_BACKEND = re.compile(r'\bbackend\s*:\s*"slipstream')
_MAX_FOLDER_NAME = 17  # with what is before and after it, a socket's path must fit


class Deployment(msgspec.Struct, frozen=True):
    """An engine and its models, as a repository describes them; they need not be loaded."""

    name: str  # the ensemble's: what `compose --name` gave, else `DEFAULT`
    public_name: str  # what users see, OpenAI's field `model` for one: `model` of the settings
    engine_model: str  # the model of role `ENGINE`
    checkpoint: Path  # absolute
    settings: Mapping[str, Any]  # `engine` in model.json: fields of EngineConfig that were given
    models: Mapping[str, str]  # role -> a model in the repository; of several, the first by name
    members: Sequence[str]  # all its models in the repository
    health_model: str  # it need not be in the repository

    @property
    def folder(self) -> str:
        """The engine's folder within the server's runtime directory; empty: that itself."""
        return folder_of(self.engine_model)

    @property
    def text_model(self) -> str | None:
        """The model that texts should be sent to; None without a tokenizer."""
        return text_model_of(self.models)

    def is_called(self, name: str) -> bool:
        """Return whether a user may mean this deployment by a name."""
        return name in (self.public_name, self.name)


def text_model_of(models: Mapping[str, str]) -> str | None:
    """Return the model of a deployment, role -> model, that takes text; the most preferred."""
    return next((models[role] for role in TEXT_ROLES if role in models), None)


def name_of(deployment: str, role: str) -> str:
    """Return what the model of a role is called in a deployment."""
    if deployment == DEFAULT:
        return role
    return deployment if role == DEFAULT else f"{deployment}_{role}"


def split_name(model: str) -> tuple[str, str]:
    """Return deployment and role of a model of ours, by its name alone.

    A name that ends in no role is that of a deployment's ensemble.
    """
    if model in MODELS or model == LLMAPI.name:
        return DEFAULT, model
    for role in _ROLES:
        if model.endswith(f"_{role}"):
            return model.removesuffix(f"_{role}"), role
    return model, DEFAULT


def role_of(model: str) -> str:
    """Return the role of a model of ours, by its name alone: the contract that it speaks."""
    return split_name(model)[1]


def by_deployment(models: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return deployment -> role -> model, by the names of models that a server has.

    A name that ends in no role is left out if no other model of its deployment is there: it may be
    a model of another backend. LLM-API models of any other name are left out, too.
    """
    found: dict[str, dict[str, str]] = {}
    for model in models:
        deployment, role = split_name(model)
        found.setdefault(deployment, {})[role] = model
    return {
        name: roles for name, roles in found.items() if name == DEFAULT or roles.keys() != {DEFAULT}
    }


def settings_of(model: Path) -> Mapping[str, Any]:
    """Return what `1/model.json` of a model's folder holds; nothing if there is no such file.

    Raises ValueError that names the file if it holds no JSON object.
    """
    path = model / _SETTINGS
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: is not a JSON object")
    return settings


def engine_model_of(model: Path) -> str:
    """Return the model that has the settings of the engine of a model of ours, by its folder.

    That is what its model.json says, else what its name says if such a model is there, else
    `ENGINE`. Raises ValueError for a bad file.
    """
    settings = settings_of(model)
    found = _engine_model(model.name, settings)
    is_there = "engine_of" in settings or (model.parent / found).is_dir()
    return found if is_there else ENGINE


def deployments_of(repository: Path) -> list[Deployment]:
    """Return the deployments of a repository, by name. Raises ValueError for a bad model.json."""
    folders = sorted(path.parent for path in repository.resolve().glob("*/config.pbtxt"))
    ours = {folder: given for folder in folders if (given := _ours(folder)) is not None}
    models: dict[str, list[tuple[str, str]]] = {}  # engine model -> role and model
    for folder, settings in ours.items():
        of_engine = models.setdefault(_engine_model(folder.name, settings), [])
        of_engine.append((_role_in(folder.name, settings), folder.name))
    found = [
        _deployment(folder, settings["engine"], models[folder.name])
        for folder, settings in ours.items()
        if isinstance(settings.get("engine"), dict)
    ]
    return sorted(found, key=lambda deployment: deployment.name)


def folder_of(engine_model: str) -> str:
    """Return the folder, in a server's runtime directory, of the files of one engine.

    The default deployment's are in the directory itself. Long names are shortened, and stay apart.
    """
    if engine_model == ENGINE:
        return ""
    name = engine_model.removesuffix(f"_{ENGINE}")
    if len(name) > _MAX_FOLDER_NAME:
        digest = hashlib.blake2s(name.encode(), digest_size=4).hexdigest()
        name = f"{name[: _MAX_FOLDER_NAME - 1 - len(digest)]}-{digest}"
    return f"engine-{name}"


def _engine_model(model: str, settings: Mapping[str, Any]) -> str:
    if isinstance(settings.get("engine"), dict):
        return model
    named = settings.get("engine_of")
    return named if isinstance(named, str) else name_of(split_name(model)[0], ENGINE)


def _ours(model: Path) -> Mapping[str, Any] | None:
    """Return the settings of a model of ours; None for one of another backend."""
    try:
        return settings_of(model) if (model / _SETTINGS).exists() else None
    except ValueError:
        text = (model / "config.pbtxt").read_text(errors="replace")
        if _OUR_BACKEND.search(text):
            raise
        return None


def _role_in(model: str, settings: Mapping[str, Any]) -> str:
    """Return a model's role: an LLM-API model may have any name."""
    return LLMAPI.name if settings.get("wiring") == "llmapi" else role_of(model)


def _deployment(
    folder: Path, engine: Mapping[str, Any], models: Sequence[tuple[str, str]]
) -> Deployment:
    name, _ = split_name(folder.name)
    checkpoint = (folder / "1" / local_path(str(engine.get("checkpoint", "")))).resolve()
    return Deployment(
        name=name,
        public_name=str(engine.get("model") or text_of(checkpoint).rpartition("/")[2]),
        engine_model=folder.name,
        checkpoint=checkpoint,
        settings=engine,
        models=dict(reversed(models)),
        members=[model for _, model in models],
        health_model=name_of(name, "slipstream_health"),
    )
