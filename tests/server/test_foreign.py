"""A class of transformers that no family is for, by a real server: composed, started, asked."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.bridge.texts import TEXT
from fixtures.models.checkpoints import save
from fixtures.models.foreign import make_foreign
from fixtures.server.support import CHECKPOINT, compose, serving
from slipstream_serve.server import server_directory

pytestmark = [pytest.mark.triton, pytest.mark.slow]

LENGTH = 12
OPTIONS = ("--backend-model", "transformers", "--dtype", "float32", "--kv-cache-tokens", "2048")


def test_greedy_tokens_over_grpc(tmp_path: Path) -> None:
    """Those of the class itself; the log says once what serves them."""
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    model = make_foreign("BitNetForCausalLM", vocab_size=4096)
    checkpoint = save(model, tmp_path / "checkpoint")
    for path in CHECKPOINT.glob("*token*"):
        shutil.copy(path, checkpoint)
    ids = TEXT.encode("def read(self, path):\n    return self.path\n")
    tokens, inputs = list(ids), {"input_lengths": len(ids), "request_output_len": LENGTH}
    with torch.no_grad():
        for _ in range(LENGTH):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    tensors = {name: np.full((1, 1), value, np.int32) for name, value in inputs.items()}
    tensors |= {"input_ids": np.int32([ids]), "streaming": np.array([[True]])}
    tensors["exclude_input_in_output"] = np.array([[True]])
    repository = compose(checkpoint, tmp_path / "models", *OPTIONS)
    with serving(repository, tmp_path / "log") as client:
        parts = [each["output_ids"].ravel() for each in client.stream("tensorrt_llm", **tensors)]
        assert np.concatenate(parts).tolist() == tokens[len(ids) :]
        assert client.generate("ensemble", text_input="def", max_tokens=5)["text_output"]
        client.wait_idle(120)
        log = client.server.runtime.log.read_text()
    assert log.count("BitNetForCausalLM runs as transformers' own class") == 1
