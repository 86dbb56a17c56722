"""`slipstream quantize` of a model whose heads skip blocks of tokens (Phi-3-small)."""

import random
from pathlib import Path

import pytest
import torch
from fixtures.models import phi3small, remote_drawn
from fixtures.models.checkpoints import Driver, Generation, make_runner
from fixtures.models.remote import Remote
from slipstream.layers.residual import Residual
from slipstream_client.cli import main
from slipstream_quantize.opened import Opened, Running


@pytest.fixture
def model() -> Remote:
    """Heads skip tokens from 32 on; gates take turns with what they multiply."""
    rng = random.Random(7)
    sizes = remote_drawn.Sizes(rng)
    sizes.groups, sizes.heads, sizes.size, sizes.hidden = 2, 4, 16, 64
    sizes.inner, sizes.layers, sizes.vocab = 96, 2, 256
    model = phi3small.drawn(rng, sizes, remote_drawn._filled)
    model.keys |= {"blocksparse_num_local_blocks": 1, "blocksparse_homo_head_pattern": False}
    return model


def test_texts_run_through_what_heads_see(model: Remote, tmp_path: Path) -> None:
    model.save(tmp_path)
    opened = Opened(tmp_path, "cpu", "float32")
    ids = torch.arange(2 * 90).view(2, 90) * 7 % 256
    with torch.inference_mode():
        for piece, sums in Running(opened, ids).sums():
            logits = opened.decoder.logits(Residual(sums)).float()
            assert (logits - model(piece[None]).logits[0]).abs().max() <= 1e-4


def test_a_quantised_checkpoint_is_near_the_original(model: Remote, tmp_path: Path) -> None:
    directory = tmp_path / "original"
    directory.mkdir()
    model.save(directory)
    where = ["--checkpoint", str(directory), "--output", str(tmp_path / "out")]
    assert main(["quantize", *where, "--scheme", "int8", "--device", "cpu", "--no-measure"]) == 0
    found = []
    for path in (directory, tmp_path / "out"):
        each = Generation([i * 7 % 256 for i in range(90)], 1)
        Driver(make_runner(path), keep_logits=True).finish([each])
        found.append(each.logits[0])
    said = found[0] > torch.finfo(torch.float32).min
    error = (found[1] - found[0])[said].pow(2).mean().sqrt() / found[0][said].std()
    assert 0 < error < 0.05
