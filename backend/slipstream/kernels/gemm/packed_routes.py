"""Which kernel takes a GEMM of packed weights: the one place to change after a measurement.

`benchmarks/weights4.py` prints every candidate beside the GEMM of 16 bits.
"""

from collections.abc import Callable

from slipstream.kernels.gemm.op import Spec

_ANY = 1 << 30
# By architecture: up to so many rows and so many outputs, the kernels in order of preference. The
# first that takes a GEMM gets it; one that is not named comes last.
_EVERYWHERE = ((128, _ANY, ("packed",)),)
ROUTES: dict[str, tuple[tuple[int, int, tuple[str, ...]], ...]] = {
    "sm_90a": (
        (8, 16_384, ("packed_stream", "packed_pipe", "packed")),
        (64, _ANY, ("packed_pipe", "packed_wgmma", "packed")),
        (256, _ANY, ("pipe_scaled", "packed_pipe", "packed_wgmma")),
        (511, _ANY, ("pipe_e4m3",)),
        (_ANY, _ANY, ("unpacked_e4m3",)),
    ),
}
_UNNAMED = 9.0  # kernels: more than any other way costs
_STEP = 0.5  # what the next in the order costs more, in kernels


def cost(name: str) -> Callable[[Spec], float]:
    """Return the cost of a kernel by its name, in kernels."""

    def of(spec: Spec) -> float:
        table = ROUTES.get(spec.target.architecture, _EVERYWHERE)
        fitting = (
            names for rows, outputs, names in table if spec.rows <= rows and spec.outputs <= outputs
        )
        names = next(fitting, ())
        return _STEP * names.index(name) if name in names else _UNNAMED

    return of
