"""What Triton passes to a model at its start: the parameters of config.pbtxt, and its folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream_contract.deployment import engine_model_of
from slipstream_contract.options import is_unset, refuse_unserved
from slipstream_contract.paths import local_path

_ENGINE_NAME = "tensorrt_llm_model_name"
_TRUE, _FALSE = ("true", "1", "t", "y", "yes", "on"), ("false", "0", "f", "n", "no", "off")


class StageParameters:
    """Arguments of `initialize()` of a stage. A value left as `${name}` counts as not given.

    Raises ValueError if a parameter asks for what is not done.
    """

    def __init__(self, arguments: Mapping[str, str]) -> None:
        self.config: dict[str, Any] = json.loads(arguments["model_config"])
        self.version_directory = (
            local_path(arguments["model_repository"]) / arguments["model_version"]
        )
        self.model = arguments["model_name"]
        self.engine_model = engine_model_of(self.version_directory.parent)
        given = self.config.get("parameters", {})
        self._texts = {name: given[name].get("string_value", "").strip() for name in given}
        if self._texts.get(_ENGINE_NAME) == self.engine_model:  # what is done anyway
            del self._texts[_ENGINE_NAME]
        file = f"{self.engine_model}/1/model.json"
        refuse_unserved(self.model, self._texts, self.engine(), file)

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter as it is written."""
        value = self._texts.get(name, "")
        return default if is_unset(name, value) else value

    def flag(self, name: str, default: bool) -> bool:
        """Return a parameter that is true or false. Raises ValueError for anything else."""
        value = self.text(name).lower()
        if not value:
            return default
        if value not in _TRUE + _FALSE:
            raise ValueError(f"{self.model}: parameter {name} is {value!r}, not true or false")
        return value in _TRUE

    @property
    def has_dynamic_batching(self) -> bool:
        """Return whether the server collects requests, and so drops cancelled ones by itself."""
        return "dynamic_batching" in self.config

    def engine(self) -> dict[str, Any]:
        """Return the settings of the engine, from a sibling's model.json; none where it has none.

        Raises ValueError that names the file if it is not JSON.
        """
        path = self._engine_file()
        if not path.is_file():
            return {}
        try:
            settings = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return (settings.get("engine") or {}) if isinstance(settings, dict) else {}

    def tokenizer_directory(self) -> Path:
        """Return `tokenizer_dir`, relative to the version directory; else the engine's checkpoint.

        Raises ValueError where neither is known.
        """
        given = self.text("tokenizer_dir")
        if given:
            return (self.version_directory / local_path(given)).resolve()
        checkpoint = self.engine().get("checkpoint")
        if not checkpoint:
            raise ValueError(f"{self.model}: parameter tokenizer_dir is not set")
        return (self._engine_file().parent / local_path(str(checkpoint))).resolve()

    def _engine_file(self) -> Path:
        return self.version_directory.parents[1] / self.engine_model / "1" / "model.json"
