"""What may and may not stand in every input of every model, by the contract and not by its code.

A field has values that must be served and values that must be refused; the error must then hold one
of the names beside them. Values are the elements of one row of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from slipstream_contract.declarations import DType, Tensor
from slipstream_contract.tensors import MODELS

VOCABULARY = 4096  # of the default checkpoint
INT32_MAX = 2**31 - 1
NAN, INF = float("nan"), float("inf")
MAX_TOKENS = 5  # answers are short: it is the requests that count


@dataclass(frozen=True)
class Field:
    """One input. `names` are what an error may call it."""

    good: st.SearchStrategy[Any]
    bad: st.SearchStrategy[Any] | None
    names: tuple[str, ...] = ()


def _scalars(good: Sequence[Any], bad: Sequence[Any], *names: str) -> Field:
    wrong = st.sampled_from([[value] for value in bad]) if bad else None
    return Field(st.sampled_from([[value] for value in good]), wrong, names)


def _number(low: float, high: float, step: float = 0.5) -> Field:
    good = [low, high, low + (high - low) / 2]
    return _scalars(good, [low - step, high + step, NAN, INF, -INF, -3e38])


_TEXT = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab \n\0é😀")), min_size=1, max_size=12
).map(str.encode)
# An error quotes the beginning of a value alone: some are long for that.
_LONG = "long " * 199
_LONG_WHOLE = 10**999
_BAD_TEXTS = [b"\xff", b"a\xc3", b"\xed\xa0\xbd", b"\xf8\x88\x80\x80\x80"]
_BAD_TEXTS += [b"\xff" * 199, _LONG.encode() + b"\xff"]
_WORD = st.text("ab(): \né", min_size=1, max_size=5).map(str.encode)
_TOO_MANY, _TOO_LONG = [b"w%d" % i for i in range(1025)], [b"x" * 4097]
_TOO_BIG = [b"y" * 4096] * 17
_FLAG = _scalars([True, False], [])
_WORDS = Field(
    st.lists(st.one_of(_WORD, st.just(b"")), min_size=1, max_size=4),
    st.sampled_from([_TOO_MANY, _TOO_LONG, _TOO_BIG, *([word] for word in _BAD_TEXTS)]),
)
_PROMPT = Field(
    st.lists(_TEXT, min_size=1, max_size=1),
    st.sampled_from([[b""], [b"x" * 50_000], [b"x = 1\n" * 700], *([t] for t in _BAD_TEXTS)]),
    ("text_input", "prompt"),
)
_LENGTH = _scalars(range(1, MAX_TOKENS + 1), [0, -1, -INT32_MAX - 1])
_IDS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)
_ID = _scalars([-1, 0, 5, VOCABULARY - 1], [-2, -INT32_MAX])

# Of the text models, and under their own names of tensorrt_llm.
_SAMPLING = {
    "max_tokens": _LENGTH,
    "num_return_sequences": _scalars([1, 1, 2, 3], [0, -1, 257, INT32_MAX]),
    "top_k": _scalars([0, 1, 5, VOCABULARY + 9, INT32_MAX], [-1, -INT32_MAX]),
    "top_p": _number(0, 1, 0.001),
    "temperature": _scalars([0, 1e-30, 1e-4, 0.5, 1, 9, 1e6], [-1e-3, -1, 3e38, NAN, INF, -INF]),
    "repetition_penalty": _scalars([1, 0.125, 1.5, 1000], [0, -1, 1000.5, NAN, INF]),
    "presence_penalty": _number(-1000, 1000),
    "frequency_penalty": _number(-1000, 1000),
    "no_repeat_ngram_size": _scalars([0, 0, 1, 2, 64, 2**30], [-1, 65, 2**30 - 1, INT32_MAX]),
    "min_tokens": _scalars([0, 1], [-1, INT32_MAX]),
    "seed": _scalars([0, 1, 2**63, 2**64 - 1], []),
    "random_seed": _scalars([0, 2**64 - 1], []),
    "min_length": _scalars([0, 1], [-1, INT32_MAX], "min_tokens"),
    "end_id": _ID,
    "pad_id": _ID,
    "beam_width": _scalars([1], [0, 33, -1]),
    "length_penalty": _scalars([0, 1], [2, NAN, -1]),
}
_GUIDES = {
    "guided_decoding_guide_type": Field(
        st.sampled_from([[b""], [b"json"]]),
        st.sampled_from([[b"xml"], [b"json_schema"], [b"regex"], [_LONG.encode()]]),
        ("guided_decoding_guide",),
    ),
    "guided_decoding_guide": Field(
        st.just([b""]), st.sampled_from([[b"[a-z]"], [b"{"]]), ("guided_decoding_guide_type",)
    ),
}
_EDITS = {
    "allowed_token_ids": Field(
        st.sampled_from([[*range(300)], [*range(300), -1]]),
        st.sampled_from([[-2], [VOCABULARY], [-1], [5] * 4097]),
    ),
    "dry_sequence_breakers": Field(
        st.sampled_from([[b""], [b"a", "é".encode()]]),
        st.sampled_from([[b"x"] * 65, [b"x" * 65], [b"\xff"]]),
    ),
    "logits_processors": Field(
        st.sampled_from([[b""], [b"{}"]]),
        st.sampled_from([[b"x"], [b"5"], [b'{"zz": {}}'], [b'{"zz": 5}'], [b"\xff"]]),
    ),
}
_TASK = _scalars([0], [1, 77])  # without weights that came before
_TEXT_FIELDS = (
    _SAMPLING
    | _GUIDES
    | _EDITS
    | {
        "text_input": _PROMPT,
        "lora_task_id": _TASK,
        "stop_words": _WORDS,
        "bad_words": _WORDS,
        "embedding_bias_words": _WORDS,  # with their weights: see `fuzz_cases`
    }
)
_BLS_FIELDS = _TEXT_FIELDS | {
    "num_draft_tokens": _scalars([0, 1, 8, 64], [-1, 65, INT32_MAX]),
    "use_draft_logits": _scalars([False], []),  # true needs a number of drafts
}
_PACKED = st.lists(_IDS, min_size=1, max_size=3)


def pack(words: Sequence[Sequence[int]]) -> list[list[int]]:
    """Two rows: ids, and ends padded with -1."""
    ids = [i for word in words for i in word]
    ends = [sum(map(len, words[: n + 1])) for n in range(len(words))]
    return [ids, ends + [-1] * (len(ids) - len(ends))]


_LIST = Field(
    _PACKED.map(pack),
    st.sampled_from(
        [
            *([[1, 2], [9, -1]], [[1, 2], [2, 1]], [[-5, 2], [1, 2]], [[1, 2], [-1, 1]]),
            [[7] * 99, [100] * 99],
        ]
    ),
)
_LLM_NAMES = {
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
}
_LLM_FIELDS = (
    {_LLM_NAMES.get(name, name): field for name, field in _SAMPLING.items()}
    | _GUIDES
    | _EDITS
    | {
        "beam_search_diversity_rate": _scalars([0], [0.5, -1, NAN]),
        "runtime_top_p_min": _number(0, 1, 0.001),
        "runtime_top_p_reset_ids": _scalars(
            [-1, 0, VOCABULARY - 1], [-2, VOCABULARY, INT32_MAX], "top_p_reset_ids"
        ),
        "runtime_top_p_decay": _scalars([0.5, 0.9, 1], [0, -1, 1.5, NAN, INF]),
        "input_ids": Field(
            _IDS,
            st.sampled_from([[-1], [5, VOCABULARY], [INT32_MAX], [5] * 2047]),
            ("input", "prompt"),
        ),
        # Sometimes with logits: see `fuzz_cases`.
        "draft_input_ids": Field(
            _IDS, st.sampled_from([[-1], [5, VOCABULARY], [INT32_MAX], [5] * 1025])
        ),
        "lora_task_id": _TASK,
        "draft_acceptance_threshold": _scalars([0], [0.5, -1, 2, NAN, INF]),
        # With the two other numbers of lookahead decoding: see `fuzz_cases`.
        "lookahead_ngram_size": _scalars([1, 3, 65], [0, -1, 66, INT32_MAX]),
        "stop_words_list": _LIST,
        "bad_words_list": Field(
            _LIST.good, st.one_of(_LIST.bad, st.just(pack([[VOCABULARY]]))), ("bad_words",)
        ),
        # With ends, priorities and sometimes durations: see `fuzz_cases`.
        "retention_token_range_starts": Field(
            st.sampled_from([[0], [3], [0, 40], [INT32_MAX - 9]]),
            st.sampled_from([[-1], [5, 3], [0, 0], list(range(0, 90_000, 10))]),
        ),
        "retention_decode_priority": _scalars([0, 35, 100], [-1, 101, INT32_MAX]),
        "retention_decode_duration_ms": _scalars([-1, 1, INT32_MAX], [0, -2, -INT32_MAX]),
        "embedding_bias": Field(
            st.just([0.0] * 9 + [5.0, -1000.0]),
            st.sampled_from([[NAN], [0.0, 1e6], [0.0] * VOCABULARY + [1.0]]),
        ),
    }
)
_VLLM_FIELDS = {"text_input": _PROMPT}
_PREPROCESSING_FIELDS = {
    "QUERY": Field(_PROMPT.good, st.sampled_from([[b""], [b"x" * 50_000], [b"\xff"]]), ("text_",)),
    "REQUEST_OUTPUT_LEN": _scalars([1, 5, 0, -1, INT32_MAX], []),
    "STOP_WORDS_DICT": Field(_WORDS.good, _WORDS.bad, ("stop_words",)),
    "BAD_WORDS_DICT": Field(_WORDS.good, _WORDS.bad, ("bad_words",)),
    "EMBEDDING_BIAS_WORDS": Field(_WORDS.good, _WORDS.bad, ("embedding_bias_words",)),
    "END_ID": _scalars([-1, 0, INT32_MAX], []),
    "PAD_ID": _scalars([-1, 0, INT32_MAX], []),
}
_POSTPROCESSING_FIELDS = {
    "TOKENS_BATCH": Field(
        _IDS.map(lambda ids: [ids]), st.sampled_from([[[-1]], [[5, -7, 9]]]), ("TOKENS_BATCH",)
    ),
    "SEQUENCE_LENGTH": _scalars([1], [-1, 9, INT32_MAX]),
    "STREAM_STATE": Field(
        st.tuples(
            st.sampled_from([[-1, 0, 3, 0, 0, 0], [-1, 7, 1, 0, 1, 0xC3], [-1, 0, 2, 1, 0, 0]]),
            _IDS,
        ).map(lambda pair: [*pair[0], *pair[1]]),
        st.one_of(
            # A slot of the credit file, made up: it must not reach the stream that has it.
            st.tuples(st.integers(0, 63), st.integers(0, 2**62)).map(lambda p: [*p, 3, 0, 0, 0]),
            st.sampled_from([[-2, 0, 0, 0, 0, 0], [-1, 0, 3, -1, 0, 0], [-1, 0, 3, 0, 9, 0]]),
            st.sampled_from([[-1, 0, 3], [-1, 0, 3, 0, 0, 0, 5, -7]]),
            st.lists(st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=6).map(
                lambda values: [2**60, *values[1:]]
            ),
            st.just([-2, *range(10**6, 10**6 + 99)]),
        ),
    ),
}
FIELDS: dict[str, dict[str, Field]] = {
    "ensemble": _TEXT_FIELDS,
    "tensorrt_llm_bls": _BLS_FIELDS,
    "tensorrt_llm": _LLM_FIELDS,
    "vllm_model": _VLLM_FIELDS,
    "preprocessing": _PREPROCESSING_FIELDS,
    "postprocessing": _POSTPROCESSING_FIELDS,
}
REQUIRED = {
    "ensemble": ("text_input", "max_tokens"),
    "tensorrt_llm_bls": ("text_input", "max_tokens"),
    "tensorrt_llm": ("input_ids", "input_lengths", "request_output_len"),
    "vllm_model": ("text_input",),
    "preprocessing": ("QUERY", "REQUEST_OUTPUT_LEN"),
    "postprocessing": ("TOKENS_BATCH", "SEQUENCE_LENGTH"),
}

# Request parameters of the models that generate: values to be served, values to be refused.
PARAMETERS: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "dry_multiplier": ([0, 0.5, "2"], [-1, 1001, "much", _LONG]),
    "dry_base": ([1, 1.75], [0.5, 1001]),
    "dry_allowed_length": ([1, 2, INT32_MAX], [0, -1, 1.5]),
    "dry_penalty_last_n": ([-1, 0, 64, 1024], [-2, 1025, "x"]),
    "request_priority": ([0, 5, 9, "3"], [-1, 10, "first", 1.5, True, _LONG]),
    "timeout_ms": ([60_000, 86_400_000, "60000"], [0, -1, 86_400_001, "soon", 0.5, _LONG]),
    "min_p": ([0, 1, 0.5, "0.25"], [-1, 2, "much", _LONG]),
    "typical_p": ([1, 0.5, "0.25"], [0, -1, 2, "much", _LONG]),
    "top_n_sigma": ([-1, 0, 1.5, "2"], [-2, 1e6, "much", _LONG]),
    "epsilon_cutoff": ([0, 1, 0.01, "0.25"], [-1, 2, "much", _LONG]),
    "eta_cutoff": ([0, 1, 0.01, "0.25"], [-1, 2, "much", _LONG]),
    "xtc_probability": ([0, 1, 0.5, "0.25"], [-1, 2, "much", _LONG]),
    "dynatemp_range": ([0, 1, 0.5, "0.25"], [-1, 1e7, "much", _LONG]),
    "top_p_reset_ids": ([-1, 5], [-2, 1.5, INT32_MAX, "much", _LONG]),
    "mirostat": ([0], [1, 3, -1, "much", _LONG]),  # 2 goes with no other filter
    "cache_salt": (["", "tenant", "é" * 9], [5, True, "s" * 3000]),
    "ignore_eos": ([True, False, "true", "0"], ["maybe", 2, _LONG]),
    "temprature": ([], [1, "1", True]),
    "zz": ([], [0, "x" * 3000]),
    "z" * 999: ([], [0]),
}

# `sampling_parameters` of vllm_model.
VLLM: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "max_tokens": (
        range(1, MAX_TOKENS + 1),
        [0, -1, 2**31, 2**63, 1.5, "x", True, [], {}, _LONG_WHOLE],
    ),
    "min_tokens": ([0, 1], [-1, 99, "x"]),
    "n": ([1, 1, 2], [0, -1, 257, 10**6, "two", _LONG, _LONG_WHOLE]),
    "temperature": (
        [0.5, 1, 2, 1e-4, "0.5"],
        [-1, NAN, INF, 1e39, "hot", [], _LONG, [7] * 99, _LONG_WHOLE],
    ),
    "top_p": ([1, 0.5, 1e-6], [0, 1.1, NAN, -1]),
    "top_k": ([-1, 0, 1, 50, INT32_MAX], [-2, 2**40, "x", _LONG_WHOLE]),
    "min_p": ([0, 0.5, 1], [-1, 2, NAN]),
    "presence_penalty": ([-2, 0, 2], [-2.1, 2.1, NAN]),
    "frequency_penalty": ([-2, 0, 2], [-2.1, 2.1, INF]),
    "repetition_penalty": ([1, 0.5, 2], [0, -1, 1001, NAN]),
    "dry_multiplier": ([0, 0.5, 2], [-1, 1001, NAN, "much"]),
    "dry_base": ([1, 1.75], [0.5, INF]),
    "dry_allowed_length": ([1, 2], [0, -1, 1.5]),
    "dry_penalty_last_n": ([-1, 0, 64, 1024], [-2, 1025, "x"]),
    "dry_sequence_breakers": ([[], ["a", "é"], '["b"]'], ["", [""], [5], 5, {}, ["x" * 65]]),
    "allowed_token_ids": (
        [None, list(range(300)), str(list(range(300)))],
        [[], 5, "x", [-1], [VOCABULARY], ["x"], [True], [5] * 4097, [_LONG_WHOLE]],
    ),
    "logits_processors": ([None, [], {}], [5, "x", {"zz": {}}, {"zz": 5}, [5], {_LONG: {}}]),
    "no_repeat_ngram_size": ([0, 1, 3, 64], [-1, 65, 2**30, "x", NAN]),
    "seed": ([None, 0, -1, 2**63 - 1, -(2**63)], [2**63, 2**70, "x", 1.5, _LONG, _LONG_WHOLE]),
    "stop": (
        ["a", ["\n", "ab"], None, []],
        ["", ["a", ""], [5], ["w"] * 1025, "x" * 4097, {}, {_LONG: 1}, [[_LONG]], [_LONG_WHOLE]],
    ),
    "stop_token_ids": (
        [[], [5], [VOCABULARY - 1]],
        [[-1], [VOCABULARY], [True], ["x"], 5, [1.5], [_LONG], [_LONG_WHOLE], {_LONG: _LONG}],
    ),
    "include_stop_str_in_output": ([True, False], ["maybe", 5, _LONG, [7] * 99]),
    "ignore_eos": ([True, False], ["maybe"]),
    "skip_special_tokens": ([True, False], ["maybe"]),
    "bad_words": ([[], ["a", "é"]], ["", [5], ["w"] * 1025, "x" * 4097, {_LONG: 1}]),
    "logit_bias": (
        [{}, {"5": 1}, {"5": -100, "6": 100}],
        [
            *({"x": 1}, {"5": 101}, {"5": NAN}, {str(VOCABULARY): 1}, {"-1": 1}, {"05": 1, "5": 1}),
            *(5, _LONG, {_LONG: 1}, {"5": _LONG}, {"5": _LONG_WHOLE}, {str(_LONG_WHOLE): 1}),
        ],
    ),
    "logprobs": ([0, None, 5, 20, -1], [-2, 21, 10**6, "x"]),
    "best_of": ([None], [0, 257, "x", _LONG]),
    "use_beam_search": ([False], ["x", 5]),
    "structured_outputs": (
        [None, {}],
        [
            5,
            "x",
            {"zz": 1},
            {"regex": 5},
            {"regex": "a", "choice": ["b"]},
            {"choice": []},
            {"regex": "a", "enable_in_reasoning": "no"},
        ],
    ),
    "guided_decoding": ([None], ["x", [1], {"json": 5}, {_LONG: 1}]),
    "prompt_logprobs": ([None, 0, 1, 20], [-2, 10**6, "x"]),
    "response_format": ([], [{"type": "json_object"}]),
    "zz": ([], [None, 1]),
    "z" * 999: ([], [None]),
}


def later(model: str) -> list[Tensor]:
    """Inputs that only say that they are not used; those with a scalar's shape."""
    return [
        tensor
        for tensor in MODELS[model].inputs
        if tensor.neutral is not None and tensor.dims == (1,) and tensor.name not in FIELDS[model]
    ]


def later_values(tensor: Tensor) -> tuple[list[Any], list[Any]]:
    """Elements of no effect, and one that asks for what is not there."""
    assert tensor.neutral is not None
    if tensor.dtype is DType.STRING:
        return [b""], [b"zz", _LONG.encode()]
    cast = bool if tensor.dtype is DType.BOOL else float if "FP" in tensor.dtype else int
    return [cast(value) for value in tensor.neutral], [cast(True) if cast is bool else cast(77)]


def flags(model: str) -> list[str]:
    """Inputs that are true or false, whatever else is asked."""
    skipped = ["stop", "stream", "streaming"]
    if model == "vllm_model":  # one that streams must exclude the prompt
        skipped.append("exclude_input_in_output")
    return [
        tensor.name
        for tensor in MODELS[model].inputs
        if tensor.dtype is DType.BOOL
        and tensor.neutral is None
        and tensor.name not in (*skipped, *FIELDS[model])
    ]
