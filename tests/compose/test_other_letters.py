"""Paths of letters beyond ASCII, in a process whose file names are ASCII: as Triton's stubs are."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from fixtures.composing import run

STUB = """
import json, sys
from slipstream_contract.deployment import deployments_of
from slipstream_contract.parameters import StageParameters
from slipstream_contract.paths import text_of
from slipstream_contract.vocab import TokenBytes
from slipstream_preprocessing.encode import Encoder

assert sys.getfilesystemencoding() == "ascii"
stage = StageParameters(json.load(sys.stdin))
directory = stage.tokenizer_directory()
(deployment,) = deployments_of(stage.version_directory.parents[1])
assert text_of(deployment.checkpoint) == text_of(directory)
size = TokenBytes.load(directory).size
print(json.dumps([text_of(directory), size, Encoder.load(directory).tokenizer.get_vocab_size()]))
"""


def test_a_stub_reads_them(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / 'Mödell 模型 "q"')
    repository = tmp_path / "Örtér"
    assert run(copy, repository) == 0
    config = {"parameters": {"tokenizer_dir": {"string_value": str(copy)}}}
    for parameters in (config, {}):
        arguments = {
            "model_config": json.dumps(parameters),
            "model_repository": str(repository / "preprocessing"),
            "model_version": "1",
            "model_name": "preprocessing",
        }
        done = subprocess.run(
            [sys.executable, "-X", "utf8=0", "-c", STUB],
            input=json.dumps(arguments),
            env=os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        directory, *sizes = json.loads(done.stdout)
        assert directory == str(copy)
        assert sizes[0] == sizes[1] > 0
