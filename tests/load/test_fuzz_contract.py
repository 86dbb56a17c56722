"""The requests of load/fuzz.py put through the contract itself, without a server.

What must come of each was drawn with it, independently of the code that decides: both must agree.
"""

import importlib
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fixtures.tiers import quick_of
from slipstream_contract.errors import ContractError
from slipstream_contract.inputs import NUMPY
from slipstream_contract.limits import check_request_id
from slipstream_contract.sampling import SamplingParams, check_sampling
from slipstream_contract.schemas.trtllm import llm_request, text_request
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_contract.stream_state import StreamState
from slipstream_contract.tensors import MODELS, TO_LLM
from slipstream_contract.vocab import TokenBytes
from slipstream_postprocessing.detokenize import detokenize_batch
from slipstream_preprocessing.batch import encode_batch
from slipstream_preprocessing.encode import Encoder
from slipstream_serve.server import repository_root

CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
CONTEXT, KV_CACHE, VOCABULARY = 2048, 1536, 4096
# The wiring of the ensemble: what its inputs and preprocessing's outputs become.
TO_PREPROCESSING = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "add_special_tokens": "ADD_SPECIAL_TOKENS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "decoder_text_input": "DECODER_QUERY",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
}


@pytest.fixture(scope="module")
def load():
    folder = str(repository_root() / "load")
    names = ("fuzz_fields", "fuzz_cases")
    sys.path.insert(0, folder)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(folder)
    for name in names:
        sys.modules.pop(name)


class Server:
    """What the stubs and the engine would look at, in their order."""

    def __init__(self) -> None:
        self.encoder = Encoder.load(CHECKPOINT, max_model_len=CONTEXT)
        self.vocab = TokenBytes.load(CHECKPOINT)

    def ask(self, case: Any) -> None:
        """Raises ContractError."""
        parameters = dict(case.parameters)
        if MODELS[case.model].is_decoupled or case.model == "ensemble":
            check_request_id(case.request_id)
        getattr(self, f"_{case.model}")(arrays(case), parameters, case.size)

    def _ensemble(self, given: Any, parameters: Any, size: int) -> None:
        own = {TO_PREPROCESSING[n]: a for n, a in given.items() if n in TO_PREPROCESSING}
        rest = {TO_LLM.get(n, n): a for n, a in given.items() if n not in TO_PREPROCESSING}
        encoded = encode_batch(self.encoder, own)
        told = {FROM_PREPROCESSING[name]: array for name, array in encoded.items()}
        self._tensorrt_llm(told | rest, parameters, size)

    def _tensorrt_llm(self, given: Any, parameters: Any, size: int) -> None:
        for row in range(size):
            inputs = {name: array[row] for name, array in given.items()}
            request = llm_request(inputs, parameters, self.vocab, False, self.encoder.end_ids)
            if not request.is_stop:
                submit(request.token_ids.tolist(), request.sampling)

    def _tensorrt_llm_bls(self, given: Any, parameters: Any, size: int) -> None:
        for row in range(size):
            inputs = {name: array[row] for name, array in given.items()}
            request = text_request(inputs, parameters)
            bad = self.encoder.bad_words(request.words.bad)
            add = request.add_special_tokens
            biased = self.encoder.bias_words(request.words.biased, add_special_tokens=add)
            sampling = request.encoded(self.encoder.end_ids, bad, biased)
            submit(self.encoder.encode(request.text, add), sampling)

    def _vllm_model(self, given: Any, parameters: Any, size: int) -> None:
        request = vllm_request(given, parameters)
        bad = self.encoder.bad_words(request.words.bad)
        sampling = request.encoded(self.encoder.end_ids, bad)
        submit(self.encoder.encode(request.text, request.add_special_tokens), sampling)

    def _preprocessing(self, given: Any, parameters: Any, size: int) -> None:
        encode_batch(self.encoder, given, parameters)

    def _postprocessing(self, given: Any, parameters: Any, size: int) -> None:
        if "STREAM_STATE" not in given:
            detokenize_batch(self.vocab, given["TOKENS_BATCH"], given["SEQUENCE_LENGTH"])
            return
        if given.keys() != {"STREAM_STATE"}:
            raise ContractError("STREAM_STATE contains its tokens")
        try:
            [row] = given["STREAM_STATE"].tolist()
            state, token_ids = StreamState.unpack(row)
        except (ValueError, OverflowError):
            raise ContractError("STREAM_STATE is malformed") from None
        if state.slot != -1 or state.drop_bytes < 0:
            raise ContractError("STREAM_STATE is malformed")
        if min(token_ids, default=0) < 0:
            raise ContractError("STREAM_STATE holds a negative id")


def arrays(case: Any) -> dict[str, Any]:
    found = {}
    for tensor in case.tensors:
        array = np.empty(len(tensor.elements), NUMPY[MODELS[case.model].input(tensor.name).dtype])
        array[:] = tensor.elements
        found[tensor.name] = array.reshape(tensor.shape)
    return found


def submit(prompt: list[int], sampling: SamplingParams) -> None:
    """The engine's own checks."""
    check_ids("input_ids", prompt)
    check_sampling(sampling)
    check_ids("end_id", sampling.end_ids)
    check_ids("stop_token_ids", sampling.stop_token_ids)
    check_ids("allowed_token_ids", sampling.allowed_token_ids)
    check_ids("top_p_reset_ids", [max(0, sampling.top_p_reset_ids)])  # -1: none
    for name, _ in sampling.logits_processors:
        raise ContractError(f"logits_processors has {name[:64]}")
    check_ids("logit_bias", [token_id for token_id, _ in sampling.bias])
    check_ids("bad_words", [token_id for word in sampling.bad_words for token_id in word])
    if sampling.drafts is not None:
        check_ids("draft_input_ids", sampling.drafts.token_ids)
    if len(prompt) + 1 > KV_CACHE:
        raise ContractError(f"the prompt is {len(prompt)} tokens long")


def check_ids(field: str, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < VOCABULARY:
            raise ContractError(f"{field}: token id {token_id}")


@pytest.mark.parametrize("number", quick_of([250, 800], [250]))
def test_the_contract_decides_as_was_drawn(load, number: int) -> None:
    server = Server()
    drawn = load.fuzz_cases.cases(number, 3)
    # What Triton answers by itself, and what is cut up on its way, needs one.
    kept = [
        case
        for case in drawn
        if case.mutation is None and load.fuzz_cases.ANY not in case.faults and not case.is_stop
    ]
    assert len(kept) > 0.75 * number
    ends = {True: 0, False: 0}
    for case in kept:
        try:
            server.ask(case)
            error = ""
        except ContractError as refusal:
            error = str(refusal)
        named = any(name in error for names in case.faults for name in names)
        assert bool(error) == bool(case.faults), f"{error}: {case}"
        assert named or not error, f"{error}: {case}"
        ends[bool(error)] += 1
    assert min(ends.values()) > number / 8
