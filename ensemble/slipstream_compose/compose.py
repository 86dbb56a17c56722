"""Turn a checkpoint into a model repository: data only, the same bytes for the same core count.

A model is `config.pbtxt` and `1/model.json`. Models that the checkpoint cannot serve are left out:
without a tokenizer there are no text models.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from slipstream.config import EngineConfig
from slipstream.models.gguf.unpack import as_directory, is_gguf
from slipstream.models.hf import CheckpointInfo
from slipstream.preflight import preflight
from slipstream_contract.declarations import Model
from slipstream_contract.deployment import (
    DEFAULT,
    ENGINE,
    Deployment,
    deployments_of,
    name_of,
    split_name,
)
from slipstream_contract.errors import clip
from slipstream_contract.generation_config import read_defaults
from slipstream_contract.shares import check_shares
from slipstream_contract.tensors import LLMAPI, MODELS
from slipstream_contract.vocab import TokenBytes
from slipstream_preprocessing.chat import ChatTemplate
from slipstream_preprocessing.tokenizer import load_tokenizer
from slipstream_runtime.processes import MAX_INSTANCES
from tokenizers import Tokenizer

from slipstream_compose import made
from slipstream_compose.pbtxt import model_config
from slipstream_compose.tokenizer_classes import unconverted

WIRINGS = ("composed", "fused")
CONFIG, SETTINGS = "config.pbtxt", "model.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

# Models that need no tokenizer, and the `wiring` in `1/model.json` of the bridge's models.
_WITHOUT_TOKENIZER = (ENGINE, "slipstream_health")
_WIRING_OF = {
    ENGINE: "composed",
    "tensorrt_llm_bls": "fused",
    "vllm_model": "vllm",
    "slipstream_health": "health",
}

# A third process of `postprocessing` adds half as many streams again, if it has a core to itself
# beside the server's threads, the bridge, the engine and two processes of each model. On two cores
# a second process of a model that serves alone uses a seventh more of them and delays tokens.
_MANY_CORES, _FEW_CORES = 12, 2
_ON_MANY_CORES = {"postprocessing": 3}
_ON_FEW_CORES = {"ensemble": 1, "tensorrt_llm_bls": 1, "vllm_model": 1}
INSTANCES_HELP = (
    "processes of preprocessing, postprocessing, tensorrt_llm_bls, vllm_model, or of ensemble with "
    "--wiring fused (default: 2; "
    f"{_ON_MANY_CORES['postprocessing']} of postprocessing on a machine with {_MANY_CORES} "
    f"cores or more, 1 of the last three with at most {_FEW_CORES}); more processes serve more "
    "streams if each has a core"
)


CONTRACTS = ("llmapi",)
CONTRACT_HELP = (
    "serve another contract, too: llmapi, that of NVIDIA's LLM-API model, by a model of that name "
    f"({LLMAPI.name}). It has one response a request, or with `,decoupled` many, so that it can "
    "stream. With the name tensorrt_llm, as in NVIDIA's own repository, the models of the older "
    "contract are left out. May be given several times"
)
_OLDER = ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")
_DECOUPLED = "decoupled"


class ComposeError(Exception):
    """A repository cannot be written; the message is for users."""


@dataclass(frozen=True)
class Repository:
    """The files that belong under `root`: relative path -> content."""

    root: Path
    info: CheckpointInfo
    files: dict[Path, str]
    notes: list[str] = field(default_factory=list)
    deployment: str = DEFAULT


def compose(
    checkpoint: Path,
    output: Path,
    options: Mapping[str, Any],
    wiring: str = "composed",
    instances: Mapping[str, int] | None = None,
    cores: int = _MANY_CORES - 1,
    contracts: Sequence[str] = (),
    deployment: str = DEFAULT,
) -> Repository:
    """Make the files of one deployment of a repository, without writing them.

    Args:
        checkpoint: a Hugging Face directory, or a GGUF file.
        output: the repository.
        options: fields of EngineConfig; None: the default.
        wiring: of the model `ensemble`: "composed" of three models, or "fused" in the bridge.
        instances: model -> its number of processes, instead of the default.
        cores: of the machine that will serve it; sets the default of `instances`.
        contracts: further ones to serve, each CONTRACT[=MODEL][,decoupled].
        deployment: its name, which the names of its models begin with.

    Raises ComposeError; ConfigError or CheckpointError for what the engine would refuse.
    """
    check_name(deployment)
    given = {name: value for name, value in options.items() if value is not None}
    draft = Path(given.get("draft_checkpoint") or "")
    with as_directory(checkpoint) as (directory, unpacked), as_directory(draft) as (near, drafted):
        seen = given | ({"draft_checkpoint": str(near)} if drafted else {})
        checked = preflight(EngineConfig(checkpoint=str(directory), **seen))
        if checked.info.has_tokenizer:
            checked.notes.extend(_check_text(directory, checked.info))
        called = checkpoint.stem if unpacked else _name(directory)
    given.setdefault("model", called if deployment == DEFAULT else deployment)
    info, notes = checked.info, [*unconverted(directory), *checked.notes]
    is_fused, added = wiring == "fused", list(map(_added, contracts))
    models = _models(added, info)
    _check_instances(instances or {}, info, models, is_fused)
    instances = {**_instances(cores), **(instances or {})}
    named, folder = partial(name_of, deployment), Path(name_of(deployment, ENGINE), "1")
    given |= {"draft_checkpoint": made.DRAFT_FOLDER} if drafted else {}
    engine = EngineConfig(checkpoint=_reference(checkpoint, output, output / folder), **given)
    place = output / folder
    placed = made.placed(checkpoint, place, unpacked) | made.placed_draft(draft, place, drafted)
    files = {folder / path: text for path, text in placed.items()}
    for model in models:
        needs_text = model in added or model.name not in _WITHOUT_TOKENIZER
        if not info.has_tokenizer and needs_text:
            notes.append(f"no {named(model.name)}: the checkpoint has no tokenizer")
            continue
        if model.name in instances:
            model = msgspec.structs.replace(model, num_instances=instances[model.name])
        served_by = "llmapi" if model in added else _wiring(model, is_fused)
        parameters = _parameters(model, served_by, engine.checkpoint, named(ENGINE))
        own = Path(named(model.name))
        files[own / CONFIG] = model_config(model, parameters, is_fused, deployment)
        files[own / "1" / SETTINGS] = _json(_settings(model, served_by, engine, deployment))
    _check_others(output, deployment, files, engine.memory_share)
    return Repository(output, info, files, notes, deployment)


def check_name(deployment: str) -> None:
    """Raise ComposeError unless its models' names can be taken apart: see `split_name`."""
    if deployment == DEFAULT:
        return
    if not _NAME.fullmatch(deployment):
        raise ComposeError(
            f"--name is {clip(deployment)}: a name has at most 100 letters, digits, `_`, `-` or "
            "`.`, the first of them a letter or digit"
        )
    role = split_name(deployment)[1]
    if role != DEFAULT:
        raise ComposeError(
            f"--name is {clip(deployment)}: no name is, or ends like, that of {role}"
        )


def _check_others(
    output: Path, deployment: str, files: Iterable[Path], share: float | None
) -> None:
    """Raise ComposeError if another deployment has a model of these names, or too much memory."""
    try:
        others = [each for each in deployments_of(output) if each.name != deployment]
        taken = {model: each.name for each in others for model in each.members}
        for name in dict.fromkeys(path.parts[0] for path in files):
            if name in taken:
                raise ComposeError(f"{output / name} is a model of the deployment {taken[name]}")
        if share is not None:
            own = Deployment(deployment, "", "", output, {"memory_share": share}, {}, [], "")
            check_shares([*others, own])
    except ValueError as error:
        raise ComposeError(str(error)) from None


def _added(text: str) -> Model:
    """Return the model of CONTRACT[=MODEL][,decoupled]. Raises ComposeError."""
    named, _, mode = text.partition(",")
    contract, equals, name = named.partition("=")
    if contract not in CONTRACTS:
        raise ComposeError(f"--contract names {clip(contract)}, which is not {CONTRACTS[0]}")
    if mode not in ("", _DECOUPLED):
        raise ComposeError(f"--contract {contract} has {clip(mode)}, where only decoupled may be")
    name = name if equals else LLMAPI.name
    if not (_NAME.fullmatch(name) and (name == ENGINE or name not in MODELS)):
        others = ", ".join(set(MODELS) - {ENGINE})
        raise ComposeError(
            f"--contract {contract} is to be called {clip(name)}: a name has letters, digits, "
            f"`_`, `-` or `.`, and is none of {others}"
        )
    return msgspec.structs.replace(LLMAPI, name=name, is_decoupled=bool(mode))


def _models(added: Sequence[Model], info: CheckpointInfo) -> list[Model]:
    """Return all models of a repository.

    Raises ComposeError for two of one name, or for a text model that is to have the engine.
    """
    names = [model.name for model in added]
    if ENGINE in names and not info.has_tokenizer:
        raise ComposeError(f"--contract names {ENGINE}, but the checkpoint has no tokenizer")
    for name in names:
        if names.count(name) > 1:
            raise ComposeError(f"--contract gives two models the name {name}")
    left_out = _OLDER if ENGINE in names else ()
    return [*(model for model in MODELS.values() if model.name not in left_out), *added]


def _instances(cores: int) -> Mapping[str, int]:
    """Return model -> processes for the models whose default depends on the cores."""
    if cores >= _MANY_CORES:
        return _ON_MANY_CORES
    return _ON_FEW_CORES if cores <= _FEW_CORES else {}


def _check_instances(
    instances: Mapping[str, int], info: CheckpointInfo, models: Iterable[Model], is_fused: bool
) -> None:
    """Raise ComposeError for a wrong number, or a model whose requests must share one process."""
    several = [m.name for m in models if m.num_instances > 1 and (m.backend or is_fused)]
    for name, number in instances.items():
        if name not in several:
            known = ", ".join(several)
            raise ComposeError(f"--instances names {clip(name)}, which is not one of {known}")
        if not info.has_tokenizer:
            raise ComposeError(f"--instances names {name}, but the checkpoint has no tokenizer")
        if not 1 <= number <= MAX_INSTANCES:
            raise ComposeError(f"--instances {name} is {number}, not from 1 to {MAX_INSTANCES}")


def _name(checkpoint: Path) -> str:
    """Return the model's public name: the checkpoint's own, else its folder's."""
    config = json.loads((checkpoint / "config.json").read_bytes())
    own = config.get("_name_or_path")
    text = own if isinstance(own, str) else ""
    return text.rstrip("/").rpartition("/")[2] or checkpoint.resolve().name


def _check_text(directory: Path, info: CheckpointInfo) -> list[str]:
    """Check tokenizer, chat template and defaults as stages and gateway read them; return notes.

    Raises UnsupportedTokenizerError or ContractError.
    """
    notes = list(_beyond(load_tokenizer(directory), info))
    TokenBytes.load(directory)
    ChatTemplate.load(directory)
    read_defaults(directory)
    return notes


def _beyond(tokenizer: Tokenizer, info: CheckpointInfo) -> Iterator[str]:
    """Yield a note about tokens that the model has no logits for: texts with them are refused."""
    beyond = sorted(i for i in tokenizer.get_vocab().values() if i >= info.vocab_size)
    if beyond:
        yield (
            f"the tokenizer has {len(beyond):,} tokens that vocab_size = {info.vocab_size:,} "
            f"leaves out, from {clip(tokenizer.id_to_token(beyond[0]))} = {beyond[0]:,} on: "
            "texts with them are refused"
        )


def _reference(checkpoint: Path, output: Path, engine: Path) -> str:
    """Return the path of the checkpoint, relative to `engine` if it is in the repository.

    `engine` is the folder of the engine's model.json.

    Links are not resolved: a link inside the repository remains the reference. A GGUF file has its
    files in the repository.
    """
    if is_gguf(checkpoint):
        return made.FOLDER
    target, root = Path(os.path.abspath(checkpoint)), Path(os.path.abspath(output))
    if not target.is_relative_to(root):
        return str(target)
    place = target.relative_to(root)
    if not place.parts or split_name(place.parts[0])[1] == DEFAULT != place.parts[0]:
        raise ComposeError(
            f"{checkpoint} is where Triton takes it for a model: move it out of {output}, or to "
            f"{engine}"
        )
    return Path(os.path.relpath(target, os.path.abspath(engine))).as_posix()


def _wiring(model: Model, is_fused: bool) -> str | None:
    """Return what the bridge of a model of `MODELS` is to do; None: it has none."""
    return "fused" if model.name == "ensemble" and is_fused else _WIRING_OF.get(model.name)


def _settings(
    model: Model, wiring: str | None, engine: EngineConfig, deployment: str
) -> dict[str, Any]:
    """Return the contents of `1/model.json`."""
    engine_of = {"engine_of": name_of(deployment, ENGINE)}
    if wiring is None:
        return {} if deployment == DEFAULT else engine_of
    if model.name != ENGINE:
        return {"wiring": wiring} | engine_of
    values = msgspec.structs.asdict(engine)
    defaults = msgspec.structs.asdict(EngineConfig(checkpoint=""))
    kept = {name: value for name, value in values.items() if value != defaults[name]}
    return {"wiring": wiring, "engine": kept}


def _parameters(
    model: Model, wiring: str | None, checkpoint: str, engine_model: str
) -> dict[str, str]:
    """Return the parameters of config.pbtxt, with TensorRT-LLM's names, at their defaults."""
    is_text, is_engine = wiring == "fused", wiring == "composed"
    parameters = {}
    if model.name in ("preprocessing", "postprocessing"):
        folder = Path(checkpoint)
        is_near = not folder.is_absolute()
        up = Path("..", "..", engine_model, "1")
        text = os.path.normpath(up / folder) if is_near else str(folder)
        parameters["tokenizer_dir"] = Path(text).as_posix()
    if model.name == "preprocessing" or is_text:
        parameters["add_special_tokens"] = "true"
    # The engine's bridge predicts which text postprocessing returns: keep both values equal.
    if model.name == "postprocessing" or is_engine or is_text:
        parameters["skip_special_tokens"] = "true"
    if is_engine:
        parameters["gpt_model_type"] = "inflight_fused_batching"
    if is_engine or is_text:
        parameters["exclude_input_in_output"] = "false"
    return parameters


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
