"""Backend `slipstream_postprocessing` of a test: as it is served, but it can be made to die.

Where a file `die` lies in the model's folder, a process takes it away and is killed: when the
server has the response of a stream, and before that is acknowledged.
"""

import os
import signal
from pathlib import Path
from typing import Any

from slipstream_postprocessing import stage


class _Responses(stage._Responses):
    die: Path

    def __del__(self) -> None:
        if self.taken and self.die.exists():
            self.die.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__del__()


class TritonPythonModel(stage.TritonPythonModel):
    """As it is served, but it looks for the file."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Of this model's folder."""
        _Responses.die = Path(args["model_repository"]) / "die"
        stage._Responses = _Responses
        super().initialize(args)
