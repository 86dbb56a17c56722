"""Parameters of a beam search, and how each schema asks for one.

A search keeps the `width` likeliest continuations of a prompt, and returns the best `n` by their
score: the sum of their tokens' log probs, divided by their length to the power of `length_penalty`.
What the schemas differ in are values of these fields: TensorRT-LLM's tensors divide by nothing
(0) and stop once `width` beams have ended, unless told otherwise; vLLM divides by the length (1)
and goes on while a better end is within reach.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from slipstream_contract import limits
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.fields import Asked, Bounds, Field, Source, read_fields, table
from slipstream_contract.log_probs import LogProbs

REACHABLE, AT_WIDTH, NEVER = 0, 1, 2
"""When to stop: no running beam can beat the ended ones at its present length; as soon as `width`
beams have ended; no running beam can beat them at any length up to the longest."""

_PENALTY = Bounds(-limits.MAX_LENGTH_PENALTY, limits.MAX_LENGTH_PENALTY)
_RATE = Bounds(-limits.MAX_PENALTY, limits.MAX_PENALTY)


class Beams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one beam search."""

    width: Annotated[
        int,
        Field(
            "beams of a search; 1: no search",
            Bounds(1, limits.MAX_BEAM_WIDTH),
            trtllm=Asked("beam_width", default=1),
            vllm=None,
        ),
    ]
    length_penalty: Annotated[
        float,
        Field(
            "power of a beam's length that divides its log prob",
            _PENALTY,
            vllm=Asked(default=1.0),
        ),
    ] = 0.0
    early_stopping: Annotated[
        int,
        Field(
            "stop once `width` beams have ended (true)",
            trtllm=None,
            vllm=None,
        ),
    ] = AT_WIDTH
    diversity_rate: Annotated[
        float,
        Field(
            "added to a candidate's score for each beam that is better than its own",
            _RATE,
            trtllm=Asked("beam_search_diversity_rate"),
            vllm=None,
        ),
    ] = 0.0


BEAM_NAMES = frozenset(
    {asked.name for entry in table(Beams).values() if (asked := entry.asked("trtllm")) is not None}
    | {"early_stopping"}
)
"""Names of TensorRT-LLM's inputs of a search."""


def trtllm_beams(read: Source, names: Mapping[str, str], n: int | None) -> Beams | None:
    """Return the search that TensorRT-LLM's inputs ask for; None: no search.

    `n` is the number of answers asked for. What only a search could honour is refused without one,
    but for the values that clients send by default. Raises ContractError.
    """
    values = read_fields(Beams, "trtllm", read, names)
    beams = Beams(**values, early_stopping=_flag(read, AT_WIDTH))
    if beams.width > 1:
        _check_count(n, beams.width, "num_return_sequences", "beam_width")
        return beams
    if values["length_penalty"] not in (0.0, 1.0):
        label = read.label(names.get("length_penalty", "length_penalty"))
        raise _needs_search(label, values["length_penalty"], "beam_width above 1")
    if values["diversity_rate"]:
        label = read.label("beam_search_diversity_rate")
        raise _needs_search(label, values["diversity_rate"], "beam_width above 1")
    return None


def _flag(read: Source, default: int) -> int:
    return int(read.flag("early_stopping")) if read.has("early_stopping") else default


def vllm_beams(values: Any, n: int, best_of: int) -> Beams | None:
    """Return the search that vLLM's parameters ask for; None: no search. Raises ContractError.

    Its width is `best_of`, which is `n` unless it is given.
    """
    stopping = values.value("early_stopping")
    chosen = read_fields(Beams, "vllm", values)
    if not values.flag("use_beam_search"):
        if chosen["length_penalty"] not in (0.0, 1.0):
            raise _needs_search("length_penalty", chosen["length_penalty"], "use_beam_search")
        if _stopping(stopping) != REACHABLE:
            raise _needs_search("early_stopping", stopping, "use_beam_search")
        return None
    width = limits.check_whole("best_of (n)", best_of, 1, limits.MAX_BEAM_WIDTH)
    _check_count(n, width, "n", "best_of")
    return Beams(**chosen, width=width, early_stopping=_stopping(stopping))


def _stopping(value: object) -> int:
    if value is None or value is False or value == 0:
        return REACHABLE
    if value is True or value == 1:
        return AT_WIDTH
    text = value.lower() if isinstance(value, str) else ""
    words = {"never": NEVER, "true": AT_WIDTH, "false": REACHABLE, "1": AT_WIDTH, "0": REACHABLE}
    if text not in words:
        raise ContractError(f"early_stopping is {clip(value)}, not true, false or never")
    return words[text]


def _check_count(n: int | None, width: int, name: str, width_name: str) -> None:
    if n is not None and n > width:
        raise ContractError(f"{name} is {n}, above {width_name}, which is {width}")


def _needs_search(label: str, value: object, what: str) -> ContractError:
    return ContractError(f"{label} is {clip(value)}, which has no effect without {what}")


def with_log_probs(sampling: Any, wanted: LogProbs | None) -> Any:
    """Return the parameters of a search with the log probs that are wanted: of its tokens alone.

    Where more is wanted it stays in `values`, which `pairs` refuses.
    """
    if wanted is None:
        return sampling
    if unserved_values(wanted):
        return replace(sampling, values=wanted)
    return replace(sampling, log_probs=True)


def unserved_values(wanted: LogProbs) -> str:
    """Return what a request says of values that a search does not have; empty: nothing."""
    if wanted.prompt is not None:
        return f"prompt_logprobs is {wanted.prompt}"
    for name in ("context_logits", "generation_logits"):
        if getattr(wanted, name):
            return f"return_{name} is true"
    if wanted.top:
        return f"logprobs is {wanted.top}"
    is_served = wanted.mode in ("", "processed_logprobs")  # what a search compares
    return "" if is_served else f"logprobs_mode is {wanted.mode}"


def without_neutral(
    values: Mapping[str, Any], unfiltered: Mapping[str, object], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the filters of a search: those without effect at their defaults, others as they are.

    `unfiltered` maps every filter to its value without effect. A `top_k` of 1 and a `top_p` of 0
    are what clients of greedy decoding send, and have none either. `pairs` refuses the others.
    """
    greedy = {"top_k": 1, "top_p": 0}
    return {
        name: defaults[name] if values[name] in (neutral, greedy.get(name)) else values[name]
        for name, neutral in unfiltered.items()
    }
