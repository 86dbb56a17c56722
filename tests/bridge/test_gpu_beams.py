"""Beam searches on a GPU: those of the same engine on a CPU, within what fp32 may differ."""

import pytest
from fixtures.bridge.beams import beams_of_transformers
from fixtures.bridge.texts import TEXT
from fixtures.features.house import House

pytestmark = pytest.mark.gpu

PROMPT, LENGTH = "def read(self, path):\n    ", 12
IDS = TEXT.encode(PROMPT)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_beams_on_a_gpu_are_those_of_transformers(tmp_path, width: int) -> None:
    _, sums = beams_of_transformers(IDS, width, LENGTH)
    house = House(tmp_path)
    asked = {"text_input": PROMPT, "max_tokens": LENGTH, "beam_width": width}
    try:
        [got] = house.ask("tensorrt_llm_bls", asked | {"return_log_probs": True})
        house.engine.check_integrity()
    finally:
        house.close()
    assert got["cum_log_probs"].shape == (1, width)
    # Near ties may change places; the sums say whether the search is the same.
    assert got["cum_log_probs"][0] == pytest.approx(sums, abs=2e-2)
