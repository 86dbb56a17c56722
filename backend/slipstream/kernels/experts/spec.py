"""How the router of a mixture of experts chooses and weighs. No torch."""

from dataclasses import dataclass
from enum import Enum

MAX_EXPERTS = 512  # of kernels
MAX_TOP_K = 32
MAX_GROUPS = 64


class Score(Enum):
    """What a router's logits become before experts are chosen by them; values are kernels'."""

    SOFTMAX = 0  # over all experts; normalised over the chosen it is the softmax of those alone
    SIGMOID = 1  # logistic; of both, a correction moves the choice and no weight
    SPARSEMIXER = 2  # the best of those left each time, among what is near (Liu et al., 2024)


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's choice: `top_k` of `num_experts` for each row.

    normalises: whether weights are divided by their sum.
    factor: of all weights.
    groups, top_groups: experts are in so many groups, of which so many are chosen first, by their
    best expert or, where scores are logistic, by the sum of the best two.
    jitter: of the sparse mixer: scores further below the best than twice this share do not count.
    """

    num_experts: int
    top_k: int
    score: Score = Score.SOFTMAX
    normalises: bool = False
    factor: float = 1.0
    jitter: float = 0.0
    groups: int = 1
    top_groups: int = 1


class Gate(Enum):
    """The gate of an expert's MLP; values are kernels'."""

    SILU = 0
    CLAMPED = 1  # gate up to 7, up within 7: gate * logistic(1.702 gate) * (up + 1)
