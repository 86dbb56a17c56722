"""Plans of all GEMMs of a prompt budget are kept: for any rows, of all matrices of a block."""

import pytest
import torch
from slipstream.kernels.gemm import cublaslt, cublaslt_groups

BUDGET = 8192
SIZES = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)]


class Made:
    """In the place of a problem, and of a plan, which need a GPU."""

    def __init__(self, *given: object) -> None:
        self.shape = given[0]

    def heuristics(self, workspace: int, count: int) -> list[str]:
        return ["guess"]


@pytest.mark.parametrize("module", [cublaslt, cublaslt_groups])
def test_a_budget_evicts_none_of_its_plans(module, monkeypatch: pytest.MonkeyPatch) -> None:
    is_plain = module is cublaslt
    for name in ("Problem", "MatmulPlan"):
        monkeypatch.setattr(module, name, Made)
    monkeypatch.setattr(cublaslt, "tuned", lambda problem: "tuned")
    plans = cublaslt._plan if is_plain else cublaslt_groups.plan_of
    rows = range(1, BUDGET + 1) if is_plain else range(4, BUDGET + 1, 4)
    plans.cache_clear()
    try:
        for _ in range(2):
            for count in rows:
                for inputs, outputs in SIZES:
                    if not is_plain:
                        plans(count, inputs, outputs, 0)
                        continue
                    shapes = ((count, inputs), outputs, (count, outputs))
                    strides = ((inputs, 1), (inputs, 1), (outputs, 1))
                    plans(*shapes, torch.bfloat16, torch.bfloat16, *strides, 16, False, 0)
        assert plans.cache_info().misses == len(rows) * len(SIZES)
    finally:
        plans.cache_clear()
