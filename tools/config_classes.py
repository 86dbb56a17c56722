"""Write backend/slipstream/models/config_classes.json: what transformers' classes read.

    .venv/bin/python tools/config_classes.py

The engine needs no transformers, but refuses what would change the computation there and is not
implemented here. So the keys that count are kept as data, one line for each decoder of text, with
the version that they come from; `tests/models/test_config_classes.py` compares them to the
transformers that is installed.
"""

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
FILE = ROOT / "backend" / "slipstream" / "models" / "config_classes.json"
BASE = transformers.PreTrainedConfig
# Modules that read the configuration of every model, beside the base class.
SHARED = ("cache_utils", "masking_utils", "modeling_rope_utils")
_READERS = ("__post_init__", "convert_rope_params_to_dict")  # methods that take keys of a file
_TAKES = ("kwargs.pop", "kwargs.get", "kwargs.setdefault")
_CONFIGS = ("config", "decoder_config", "text_config")  # names that a configuration has in code


def shared() -> dict[str, Any]:
    """Fields of the base class with their defaults, and other keys read of every architecture."""
    modules = [import_module(f"transformers.{name}") for name in SHARED]
    names = [_attributes(_tree(module)) for module in modules]
    return _entry(BASE, [*names, _keywords(BASE)], without=set())


def of_architecture(name: str) -> dict[str, Any]:
    """Model types, default theta, fields with their defaults, and other keys that are read."""
    config = getattr(transformers, name).config_class
    aliases = [t for t, n in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if n == name]
    types = {config.model_type} | {t for t in aliases if CONFIG_MAPPING[t] is config}
    modeling = import_module(config.__module__.replace(".configuration_", ".modeling_"))
    names = _attributes(_tree(modeling))
    names = {name: value for name, value in names.items() if name not in _of_others(config)}
    entry = _entry(config, [names, _keywords(config)], without=_fields(BASE))
    if "eos_token_id" in entry["defaults"] and "eos_token_id" in _source(config.__post_init__):
        entry["defaults"]["eos_token_id"] = config().eos_token_id  # made up where a file has none
    return {"model_types": sorted(types), "default_theta": config.default_theta} | entry


def everything() -> dict[str, Any]:
    """The whole file: a version, what is shared, and each architecture that transformers has."""
    found = {}
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(getattr(transformers, name, None), "config_class"):
                found[name] = of_architecture(name)
    return {
        "transformers": transformers.__version__,
        "shared": shared(),
        **dict(sorted(found.items())),
    }


def text(data: dict[str, Any]) -> str:
    """JSON, one line for each architecture."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _tree(thing: Any) -> ast.AST:
    return ast.parse(inspect.getsource(thing))


def _source(thing: Any) -> str:
    return textwrap.dedent(inspect.getsource(thing))


def _fields(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def _entry(config: type, names: list[dict[str, Any]], without: set[str]) -> dict[str, Any]:
    """Fields with their defaults, and likewise other names of keys; methods are none."""
    defaults = {f.name: _default(f) for f in dataclasses.fields(config) if f.name not in without}
    others: dict[str, Any] = {}
    for name, value in (item for each in names for item in each.items()):
        is_method = callable(getattr(config, name, None))
        if not is_method and name not in defaults and name not in without:
            others[name] = value if others.get(name) is None else others[name]
    return {"defaults": defaults, "others": dict(sorted(others.items()))}


def _default(field: dataclasses.Field) -> Any:
    """Return the default as JSON has it; null for what is not a plain value."""
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return None


def _of_others(config: type) -> set[str]:
    """Keys of other configurations in the same module: of images, of whole pipelines."""
    module = inspect.getmodule(config)
    others = [c for c in vars(module).values() if inspect.isclass(c) and c is not config]
    others = [c for c in others if issubclass(c, BASE) and c.__module__ == module.__name__]
    keys = {key for other in others for key in _fields(other) | set(other.attribute_map)}
    return keys - _fields(config)


def _is_config(node: ast.AST) -> bool:
    is_name = isinstance(node, ast.Name) and node.id in _CONFIGS
    return is_name or (isinstance(node, ast.Attribute) and node.attr == "config")


def _constant(node: ast.AST) -> Any:
    """A plain value that stands in the source; None for an expression."""
    return node.value if isinstance(node, ast.Constant) else None


def _attributes(tree: ast.AST) -> dict[str, Any]:
    """Names that code reads from a configuration, with the defaults it takes.

    From `config.name`, `getattr(config, "name", default)`.
    """
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            found.setdefault(node.attr, None)
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_call and node.func.id in ("getattr", "hasattr") and _is_config(node.args[0]):
            name, default = _constant(node.args[1]), node.args[2:]
            if isinstance(name, str) and found.get(name) is None:
                found[name] = _constant(default[0]) if default else None
    return found


def _keywords(config: type) -> dict[str, Any]:
    """Keys that a class takes beside its fields, old names and aliases, with their defaults."""
    found = dict.fromkeys(config.attribute_map)
    classes = [c for c in config.__mro__ if config is BASE or c not in BASE.__mro__]
    for cls in classes:
        for name in _READERS:
            if name in vars(cls):
                found |= dict(_taken(ast.parse(_source(getattr(cls, name)))))
    return found


def _taken(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Key and default of each `kwargs.pop(key, default)` and the like, and `key in kwargs`."""
    for node in ast.walk(tree):
        key, default = None, None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _TAKES:
            key, default = _constant(node.args[0]), [_constant(arg) for arg in node.args[1:]]
        if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "kwargs":
            key = _constant(node.left)
        if isinstance(key, str):
            yield key, default[0] if default else None


if __name__ == "__main__":
    FILE.write_text(text(everything()), encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}, {FILE.stat().st_size:,} bytes")
