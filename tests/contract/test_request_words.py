"""Stop words, bad words and bias of `tensorrt_llm`: token ids in, bytes and ids out."""

import math

import numpy as np
import pytest
from fixtures.contract.asking import Vocabulary, inputs_of
from hypothesis import given
from hypothesis import strategies as st
from slipstream_contract.errors import ContractError
from slipstream_contract.request import GenerateRequest
from slipstream_contract.schemas.trtllm import llm_request
from slipstream_contract.tensors import MODELS
from slipstream_contract.words import pack_word_list

LLM = MODELS["tensorrt_llm"]


def llm_with(vocab=None, **arrays) -> GenerateRequest:
    base = inputs_of(LLM, input_ids=[1], input_lengths=1, request_output_len=1)
    return llm_request(base | arrays, {}, vocab)


@given(st.lists(st.text(min_size=1, max_size=6).map(str.encode), max_size=8))
def test_stop_words_of_a_request_are_bytes(words):
    packed = pack_word_list([list(word) for word in words])
    sampling = llm_with(Vocabulary(), stop_words_list=packed).sampling
    assert sampling.stop_words == tuple(words)
    assert sampling.stop_token_ids == ()


def test_stop_words_of_special_tokens_and_without_a_vocabulary():
    packed = pack_word_list([[300], [400], [65, 66]])
    sampling = llm_with(Vocabulary(), stop_words_list=packed).sampling
    assert sampling.stop_words == (b"<end>", b"AB")
    assert sampling.stop_token_ids == (400,)
    assert llm_with(stop_words_list=pack_word_list([[300]])).sampling.stop_token_ids == (300,)
    with pytest.raises(ContractError, match="word of 2 tokens; without a tokenizer"):
        llm_with(stop_words_list=packed)
    with pytest.raises(ContractError, match="tokens without a text"):
        llm_with(Vocabulary(), stop_words_list=pack_word_list([[400, 401]]))


def test_bad_words_and_bias():
    bias = np.zeros(12, np.float32)
    bias[[3, 7]] = 1.5, -2
    packed = pack_word_list([[5], [6, 7]])
    sampling = llm_with(bad_words_list=packed, embedding_bias=bias).sampling
    assert sampling.bad_words == ((5,), (6, 7))
    assert sampling.bias == ((3, 1.5), (7, -2.0))
    for value in (math.nan, math.inf, 1e9):
        bias[3] = value
        with pytest.raises(ContractError, match=r"embedding_bias .* of token 3 is "):
            llm_with(embedding_bias=bias)
    with pytest.raises(ContractError, match="10000 biased tokens, at most 4096"):
        llm_with(embedding_bias=np.ones(10_000, np.float32))
