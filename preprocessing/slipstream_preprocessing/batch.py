"""Compute the outputs of one request of model `preprocessing`: arrays in, arrays out, pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from slipstream_contract import limits
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.inputs import decode, refuse_later, to_flag
from slipstream_contract.tensors import MODELS
from slipstream_contract.words import pack_word_list

from slipstream_preprocessing.encode import Encoder

Array = NDArray[Any]
_NONE: Mapping[str, object] = {}

# Inputs not implemented yet; the error names them as clients of the ensemble do.
_KNOWN_AS = {"DECODER_QUERY": "decoder_text_input"}
_LATER = {
    tensor.name: msgspec.structs.replace(tensor, name=_KNOWN_AS.get(tensor.name, tensor.name))
    for tensor in MODELS["preprocessing"].inputs
    if tensor.neutral is not None
}


def encode_batch(
    encoder: Encoder, inputs: Mapping[str, Array], parameters: Mapping[str, object] = _NONE
) -> dict[str, Array]:
    """Encode a request of model `preprocessing`; all arrays have a leading batch dimension B.

    Args:
        encoder: of the checkpoint.
        inputs: QUERY bytes[B, 1] and REQUEST_OUTPUT_LEN int32[B, 1]; optionally END_ID and PAD_ID
            int32[B, 1], BAD_WORDS_DICT, STOP_WORDS_DICT and EMBEDDING_BIAS_WORDS bytes[B, n],
            EMBEDDING_BIAS_WEIGHTS float32[B, n], ADD_SPECIAL_TOKENS bool[B, 1],
            PROMPT_TABLE_EXTRA_ID uint64[B, 1].
        parameters: request parameters; `add_special_tokens` may replace the input, the next step
            of the ensemble reads the others.

    Returns:
        INPUT_ID int32[B, length] padded with the pad id, REQUEST_INPUT_LEN, REQUEST_OUTPUT_LEN,
        OUT_END_ID, OUT_PAD_ID int32[B, 1]; and only if there are any words BAD_WORDS_IDS,
        STOP_WORDS_IDS int32[B, 2, n], EMBEDDING_BIAS float32[B, vocabulary]. With
        PROMPT_TABLE_EXTRA_ID, OUT_PROMPT_TABLE_EXTRA_IDS uint64[B, length] repeats it for each id.

    Raises ContractError.
    """
    for name, tensor in _LATER.items():
        if name in inputs:
            refuse_later(tensor, inputs[name], tensor.name)
    queries = _column(inputs, "QUERY", "text_input", None)
    size = len(queries)
    adds = _add_special_tokens(inputs, parameters, size)
    prompts = [_encode(encoder, query, add) for query, add in zip(queries, adds, strict=True)]
    end_id = encoder.end_ids[0] if encoder.end_ids else -1
    end_ids = _column(inputs, "END_ID", "end_id", size, end_id)
    pad_ids = _column(inputs, "PAD_ID", "pad_id", size, encoder.pad_id)
    outputs: dict[str, Array] = {
        "INPUT_ID": _rectangle(prompts, pad_ids),
        "REQUEST_INPUT_LEN": _int32_column([len(prompt) for prompt in prompts]),
        "REQUEST_OUTPUT_LEN": _int32_column(
            _column(inputs, "REQUEST_OUTPUT_LEN", "max_tokens", size)
        ),
        "OUT_END_ID": _int32_column(end_ids),
        "OUT_PAD_ID": _int32_column(pad_ids),
    }
    stop_rows = _words(inputs, "STOP_WORDS_DICT", "stop_words", size, limits.MAX_STOP_BYTES)
    bad_rows = _words(inputs, "BAD_WORDS_DICT", "bad_words", size)
    stop = [encoder.words(row) for row in stop_rows]
    bad = [encoder.bad_words(row) for row in bad_rows]
    if any(stop):
        outputs["STOP_WORDS_IDS"] = _pack(stop)
    if any(bad):
        outputs["BAD_WORDS_IDS"] = _pack(bad)
    if "PROMPT_TABLE_EXTRA_ID" in inputs:
        extra_ids = _column(inputs, "PROMPT_TABLE_EXTRA_ID", "prompt_table_extra_id", size)
        column = np.array(extra_ids, np.uint64).reshape(-1, 1)
        outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.repeat(column, outputs["INPUT_ID"].shape[1], 1)
    bias = _bias(encoder, inputs, adds)
    if bias is not None:
        outputs["EMBEDDING_BIAS"] = bias
    return outputs


def with_empty_lists(outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of `encode_batch` for a client that calls the model alone.

    NVIDIA's model has lists in every response, and its clients read them unasked: STOP_WORDS_IDS
    and BAD_WORDS_IDS int32[B, 2, 1] of no word, EMBEDDING_BIAS float32[B, 0]. The next step of an
    ensemble goes without, as each tensor costs it time.
    """
    size = len(outputs["INPUT_ID"])
    words = _pack([()] * size)
    bias = np.zeros((size, 0), np.float32)
    return {"STOP_WORDS_IDS": words, "BAD_WORDS_IDS": words, "EMBEDDING_BIAS": bias, **outputs}


def _add_special_tokens(
    inputs: Mapping[str, Array], parameters: Mapping[str, object], size: int
) -> list[bool | None]:
    """Return one value per row; None: the model's default."""
    tensor, name = "ADD_SPECIAL_TOKENS", "add_special_tokens"
    if name not in parameters:
        return _column(inputs, tensor, name, size) if tensor in inputs else [None] * size
    if tensor in inputs:
        raise ContractError(f"{name} is given as an input and as a parameter; one is enough")
    return [to_flag(name, parameters[name])] * size


def _encode(encoder: Encoder, query: object, add: bool | None) -> list[int]:
    """Encode a prompt; refuse one of far too many bytes before tokenising it."""
    if isinstance(query, bytes):
        encoder.check_size(len(query))
    return encoder.encode(decode("text_input", query), add)


def _pack(batch: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.int32]:
    """Pack the word lists of all rows, int32[B, 2, n], padded to the longest."""
    lists = [pack_word_list(words) for words in batch]
    packed = np.zeros((len(lists), 2, max(words.shape[1] for words in lists)), np.int32)
    packed[:, 1] = -1
    for row, words in zip(packed, lists, strict=True):
        row[:, : words.shape[1]] = words
    return packed


def _bias(
    encoder: Encoder, inputs: Mapping[str, Array], adds: Sequence[bool | None]
) -> NDArray[np.float32] | None:
    """Return float32[B, vocabulary]: each token of a word gets its weight; weights add up."""
    size = len(adds)
    words = _words(inputs, "EMBEDDING_BIAS_WORDS", "embedding_bias_words", size)
    weights = _rows(inputs, "EMBEDDING_BIAS_WEIGHTS", "embedding_bias_weights", size)
    if not any(any(row) for row in (*words, *weights)):
        return None
    bias = np.zeros((size, encoder.vocab.size), np.float32)
    for row, row_words, row_weights, add in zip(bias, words, weights, adds, strict=True):
        if not any(row_words) and not any(row_weights):
            continue  # clients without a bias send one empty word and one zero
        if len(row_words) != len(row_weights):
            raise ContractError(
                f"embedding_bias_weights has {len(row_weights)} values "
                f"for {len(row_words)} embedding_bias_words"
            )
        for i, weight in enumerate(row_weights):
            field = f"embedding_bias_weights[{i}]"
            limits.check_number(field, weight, -limits.MAX_BIAS, limits.MAX_BIAS)
        encoded = encoder.bias_words(row_words, add_special_tokens=add)
        for ids, weight in zip(encoded, row_weights, strict=True):
            row[ids] += weight
    return bias if bias.any() else None


def _column(
    inputs: Mapping[str, Array],
    name: str,
    known_as: str,
    size: int | None,
    default: int | None = None,
) -> list[Any]:
    """Return one value per row of an input [B, 1]."""
    value = inputs.get(name)
    if value is None:
        if size is None or default is None:
            raise ContractError(f"{known_as} is missing")
        return [default] * size
    if value.ndim == 0 or value.size != value.shape[0] or size not in (None, value.size):
        rows = "[B, 1]" if size is None else f"[{size}, 1]"
        raise ContractError(f"{known_as} has shape {clip(list(value.shape))}, not {rows}")
    return value.reshape(-1).tolist()


def _rows(inputs: Mapping[str, Array], name: str, known_as: str, size: int) -> list[list[Any]]:
    """Return the rows of an input [B, n]; empty rows if it is missing."""
    value = inputs.get(name)
    if value is None:
        return [[] for _ in range(size)]
    if value.ndim != 2 or value.shape[0] != size:
        raise ContractError(f"{known_as} has shape {clip(list(value.shape))}, not [{size}, n]")
    rows: list[list[Any]] = value.tolist()
    return rows


def _words(
    inputs: Mapping[str, Array],
    name: str,
    known_as: str,
    size: int,
    most_bytes: int = limits.MAX_LIST_BYTES,
) -> list[list[bytes]]:
    """Return the rows of words of an input [B, n], each of at most `most_bytes` bytes."""
    rows = _rows(inputs, name, known_as, size)
    for row in rows:
        limits.check_word_bytes(known_as, [word for word in row if word], most_bytes)
    return rows


def _int32_column(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32).reshape(-1, 1)


def _rectangle(rows: Sequence[Sequence[int]], fill: Sequence[int]) -> NDArray[np.int32]:
    """Return rows of any length as one array, each padded at its end with its own value."""
    filled = np.empty((len(rows), max(map(len, rows))), np.int32)
    filled[:] = np.array(fill, np.int32)[:, None]
    for target, row in zip(filled, rows, strict=True):
        target[: len(row)] = row
    return filled
