"""What a step would launch is compiled side by side, and nothing is launched."""

from pathlib import Path

import pytest
import torch
from slipstream.kernels.elementwise import norm
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import KernelError

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with the dev extra")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(jit, "_architecture", lambda _: "sm_90a")
    jit._cubin.cache_clear()
    yield tmp_path / "slipstream" / "kernels"
    jit._cubin.cache_clear()


def test_all_that_would_be_launched_is_compiled(hopper: Path) -> None:
    wanted = list(norm.variants())[:2]
    x = torch.zeros(4)
    with jit.compile_ahead():
        for one in [*wanted, *wanted]:
            jit.launch(one, "never", (1,), 32, x, 3)
        assert not list(hopper.glob("*")), "not before the end"
    compiled = set(hopper.glob("*.cubin"))
    assert len(compiled) == 2
    assert compiled == {jit.cubin_path(one, "sm_90a") for one in wanted}


def test_an_error_ends_it(hopper: Path) -> None:
    with pytest.raises(KernelError, match="does not compile"), jit.compile_ahead():
        jit.launch(jit.variant("elementwise/norm.cu", WITHOUT=1), "never", (1,), 32)
    with pytest.raises(ValueError, match="planted"), jit.compile_ahead():
        raise ValueError("planted")
    assert jit._put_off is None
