"""Logits processors: an operator's own rules, loaded by name at start, asked for by requests.

A processor is a class without arguments. Requests give its name and a JSON object of arguments;
what `validate` makes of them edits the logits of each token of that request, and of no other. It
runs in the engine's thread: every stream waits for it. What it raises ends its request alone.

    class Politeness:                       --logits-processors my_package.mine:Politeness
        name = "politeness"
        def validate(self, arguments): ...  # ContractError, or an object with `edits`

No request can name a module: the names are those of the classes that the operator loaded.
"""

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import inf, isfinite
from typing import Any, Protocol, runtime_checkable

from slipstream_contract.contained import contained
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.ids import TokenIds
from slipstream_contract.limits import MAX_BIASED_TOKENS

from slipstream.core.rules import RuleError
from slipstream.errors import ConfigError


class State(Protocol):
    """What a processor has made of one request's arguments; it never changes."""

    def edits(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Mapping[int, float]:
        """Return what is added to logits of the token after these: -inf bans it.

        A function of its arguments, of which it has copies: outputs may be drafts, and come and go.
        At most 4,096 tokens are edited.
        """


@runtime_checkable
class Processor(Protocol):
    """A logits processor."""

    name: str

    def validate(self, arguments: Mapping[str, Any]) -> State:
        """Return the state for a request's arguments. Raises ContractError."""


Loaded = Mapping[str, Processor]
States = Sequence[tuple[str, State]]


def load_processors(wanted: str) -> Loaded:
    """Return the processors `module:Class[,module:Class...]`, by name. Raises ConfigError."""
    loaded: dict[str, Processor] = {}
    for place in filter(None, (part.strip() for part in wanted.split(","))):
        module, _, class_name = place.partition(":")
        try:
            with contained():
                processor = getattr(import_module(module), class_name)()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"logits_processors: {place} cannot be loaded: {reason}") from error
        name = getattr(processor, "name", None)
        if not isinstance(processor, Processor) or not isinstance(name, str) or not name:
            raise ConfigError(f"logits_processors: {place} has no name and method validate")
        if name in loaded:
            raise ConfigError(f"logits_processors: {place} has the name {name!r}, which is taken")
        loaded[name] = processor
    return loaded


def start_processors(loaded: Loaded, asked: Sequence[tuple[str, str]]) -> States:
    """Return the states of the processors that a request asks for, in its order.

    `asked` has names and arguments in JSON. Raises ContractError.
    """
    return [(name, _state(loaded, name, arguments)) for name, arguments in asked]


def _state(loaded: Loaded, name: str, arguments: str) -> State:
    processor = loaded.get(name)
    if processor is None:
        known = f"one of {', '.join(sorted(loaded))}" if loaded else "as none is loaded"
        raise ContractError(f"logits_processors has {clip(name)}, not {known}")
    try:
        with contained():
            return processor.validate(json.loads(arguments))
    except ContractError as error:
        raise ContractError(f"logits_processors.{name}: {error.message}") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {clip(str(error))}"
        raise ContractError(f"logits_processors.{name} refuses its arguments: {reason}") from None


class Processed:
    """The rule of one sequence that a processor makes."""

    def __init__(self, name: str, state: State, prompt: TokenIds, vocab_size: int) -> None:
        self.field = f"logits_processors.{name}"
        self._state = state
        self._prompt = prompt[:]  # as `outputs` below: whatever is done to it harms no sequence
        self._vocab_size = vocab_size

    def addends(self, outputs: Sequence[int], drafts: Sequence[int]) -> Mapping[int, float]:
        """Return the edits of the token after outputs and drafts. Raises RuleError."""
        try:
            with contained():
                made = self._state.edits(self._prompt, [*outputs, *drafts])
                edits = {int(token_id): float(addend) for token_id, addend in made.items()}
        except Exception as error:
            reason = f"{type(error).__name__}: {clip(str(error))}"
            raise RuleError(f"{self.field} failed: {reason}") from error
        if len(edits) > MAX_BIASED_TOKENS:
            raise RuleError(
                f"{self.field} edits {len(edits)} tokens, at most {MAX_BIASED_TOKENS} are served"
            )
        for token_id, addend in edits.items():
            if not 0 <= token_id < self._vocab_size:
                raise RuleError(f"{self.field} edits token {token_id}, which is no token")
            if not (isfinite(addend) or addend == -inf):
                raise RuleError(f"{self.field} adds {addend} to token {token_id}")
        return edits

    def fork(self) -> None:
        """Do nothing: nothing is kept."""


class SoftLength:
    """Make an end likelier, the longer an output is: an example, of use by itself.

    Arguments: `token_ids`, tokens of an end (those of the checkpoint's generation_config.json, say
    or of a full stop); `start`, outputs until which nothing changes; `slope`, what each output more
    adds to their logits. As `exponential_decay_length_penalty` of transformers, but linear.
    """

    name = "soft_length"

    def validate(self, arguments: Mapping[str, Any]) -> State:
        """Return the state for a request's arguments. Raises ContractError."""
        unknown = arguments.keys() - {"token_ids", "start", "slope"}
        if unknown:
            raise ContractError(f"{clip(min(unknown))} is none of token_ids, start and slope")
        token_ids, start = arguments.get("token_ids"), arguments.get("start", 0)
        slope = arguments.get("slope", 0.1)
        if not isinstance(token_ids, list) or not all(_is_whole(each) for each in token_ids):
            raise ContractError(f"token_ids is {clip(token_ids)}, not a list of token ids")
        if not _is_whole(start):
            raise ContractError(f"start is {clip(start)}, not a whole number of at least 0")
        if not isinstance(slope, int | float) or not 0 <= slope <= 100:
            raise ContractError(f"slope is {clip(slope)}, not a number from 0 to 100")
        return _SoftLength(tuple(token_ids), start, float(slope))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class _SoftLength:
    def __init__(self, token_ids: tuple[int, ...], start: int, slope: float) -> None:
        self._token_ids, self._start, self._slope = token_ids, start, slope

    def edits(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Mapping[int, float]:
        """Return what is added to the ends."""
        addend = self._slope * (len(output_ids) - self._start)
        return dict.fromkeys(self._token_ids, min(addend, 1000.0)) if addend > 0 else {}
