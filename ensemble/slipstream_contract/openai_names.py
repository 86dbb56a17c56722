"""OpenAI's names among the request parameters: mapped, without effect, or refused.

Proxies such as LiteLLM send the fields of a chat completion on, beside the contract's own.
docs/clients.md lists what each name does.
"""

from collections.abc import Mapping

from slipstream_contract.inputs import refuse_unsupported, to_whole
from slipstream_contract.limits import check_whole

MAX_COMPLETION_TOKENS = "max_completion_tokens"
SAME = {"n": "num_return_sequences"}
"""OpenAI's name -> the input of the text models that means the same."""

WITHOUT_EFFECT: Mapping[str, tuple[object, ...] | None] = {
    "model": None,  # the URL names the model
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""OpenAI's name -> the values that change nothing; None: no value does."""

NAMES = frozenset({MAX_COMPLETION_TOKENS, *WITHOUT_EFFECT})


def split_openai(parameters: Mapping[str, object]) -> tuple[int | None, dict[str, object]]:
    """Take OpenAI's names out of the request parameters.

    Returns:
        `max_completion_tokens`, None if it is not given: beside `max_tokens` the smaller one holds,
            as LiteLLM adds a `max_tokens` of its own.
        All other parameters.

    Raises ContractError.
    """
    others: dict[str, object] = {}
    most: int | None = None
    for name, value in parameters.items():
        if name == MAX_COMPLETION_TOKENS:
            most = None if value is None else check_whole(name, to_whole(name, value), 1)
        elif name in WITHOUT_EFFECT:
            harmless = WITHOUT_EFFECT[name]
            if harmless is not None and value is not None and _plain(value) not in harmless:
                raise refuse_unsupported(name, value, harmless)
        else:
            others[name] = value
    return most, others


def _plain(value: object) -> object:
    """Return a request parameter's flag, which may be the text `false`."""
    return False if isinstance(value, str) and value.lower() == "false" else value
