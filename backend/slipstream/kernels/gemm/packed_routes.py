"""Which kernel takes a GEMM of packed weights: the one place to change after a measurement.

`benchmarks/weights4.py` prints every candidate beside the GEMM of 16 bits.
"""

from collections.abc import Callable

from slipstream.kernels.gemm.op import Spec

# By architecture: up to so many rows, the kernels in order of preference. The first
# that takes a GEMM gets it; one that is not named comes last.
_EVERYWHERE = ((128, ("packed",)),)
ROUTES: dict[str, tuple[tuple[int, tuple[str, ...]], ...]] = {
    "sm_90a": ((16, ("packed", "packed_wgmma")), (128, ("packed_wgmma", "packed"))),
}
_UNNAMED = 9.0  # kernels: more than any other way costs
_STEP = 0.5  # what the next in the order costs more, in kernels


def cost(name: str) -> Callable[[Spec], float]:
    """Return the cost of a kernel by its name, in kernels."""

    def of(spec: Spec) -> float:
        table = ROUTES.get(spec.target.architecture, _EVERYWHERE)
        names = next((names for rows, names in table if spec.rows <= rows), ())
        return _STEP * names.index(name) if name in names else _UNNAMED

    return of
