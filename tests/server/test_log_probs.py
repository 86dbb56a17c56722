"""Log probs and logits of the served default model, over both protocols: those of transformers."""

import json

import numpy as np
import pytest
import torch
import transformers
from fixtures.bridge.texts import TEXT
from fixtures.server.support import CHECKPOINT, PROMPT, TEXT_MODELS, RequestError

pytestmark = pytest.mark.triton

IDS = TEXT.encode(PROMPT)
MOST = 6
VOCABULARY = 4096


@pytest.fixture(scope="module")
def oracle():
    """Logits of transformers at every position of the prompt and an output."""
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)

    @torch.inference_mode()
    def logits(outputs: list[int]) -> torch.Tensor:
        return model(torch.tensor([IDS + outputs])).logits[0]

    return logits


def greedy(oracle) -> list[int]:
    outputs: list[int] = []
    for _ in range(MOST):
        outputs.append(int(oracle(outputs)[-1].argmax()))
    return outputs


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", [*TEXT_MODELS, "tensorrt_llm"])
def test_whole_logits(idle, oracle, model, stream):
    inputs = {"text_input": PROMPT, "max_tokens": MOST, "stream": stream}
    if model == "tensorrt_llm":
        inputs = {
            "input_ids": np.array([IDS], np.int32), "input_lengths": len(IDS),
            "request_output_len": MOST, "streaming": stream,
        }  # fmt: skip
    asked = {"return_context_logits": True, "return_generation_logits": True}
    responses = idle.stream(model, **inputs, **asked, exclude_input_in_output=True)
    want = oracle(greedy(oracle))
    contexts = [r["context_logits"] for r in responses if "context_logits" in r]
    assert len(contexts) == 1, "the prompt's come once"
    assert contexts[0].shape == (1, len(IDS), VOCABULARY)
    np.testing.assert_allclose(contexts[0][0], want[: len(IDS)], atol=1e-3)
    rows = np.concatenate([r["generation_logits"] for r in responses], axis=2)
    assert rows.shape == (1, 1, MOST, VOCABULARY)
    np.testing.assert_allclose(rows[0, 0], want[len(IDS) - 1 : -1], atol=1e-3)


@pytest.mark.parametrize("is_http", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_log_probs_of_vllm_model(idle, oracle, stream, is_http):
    asked = {"max_tokens": MOST, "temperature": 0, "logprobs": 3, "prompt_logprobs": 2}
    body = {
        "text_input": PROMPT, "stream": stream, "exclude_input_in_output": True,
        "return_logprobs": True, "sampling_parameters": json.dumps(asked),
    }  # fmt: skip
    ask = idle.events if is_http else idle.stream
    responses = ask("vllm_model", **body)

    def values(name: str) -> list[object]:
        found = []
        for response in responses:
            if name in response:
                value = response[name]
                found += json.loads(value if is_http else value[0])
        return found

    want = oracle(greedy(oracle)).log_softmax(-1)
    prompt, outputs = values("prompt_logprobs"), values("logprobs")
    assert prompt[0] is None
    assert [next(iter(each)) for each in prompt[1:]] == [str(i) for i in IDS[1:]]
    assert [int(next(iter(each))) for each in outputs] == greedy(oracle)
    for place, entry in enumerate([*prompt[1:], *outputs]):
        top = want[place].topk(3 if place >= len(IDS) - 1 else 2)
        assert {str(i) for i in top.indices.tolist()} <= entry.keys()
        for token_id, each in entry.items():
            value = float(want[place, int(token_id)])
            assert each["logprob"] == pytest.approx(value, abs=1e-4)
            assert abs(each["rank"] - 1 - int((want[place] > value).sum())) <= 1
            text = TEXT.vocab.raw(int(token_id)).decode(errors="replace")
            assert each["decoded_token"] == text


def test_a_whole_vocabulary_is_bounded(idle):
    asked = json.dumps({"max_tokens": 1000, "logprobs": -1})
    with pytest.raises(RequestError, match=r"logprobs = -1 of .* take \d+ bytes, at most 67108864"):
        idle.generate("vllm_model", text_input=PROMPT, return_logprobs=True,
                      sampling_parameters=asked)  # fmt: skip
    small = json.dumps({"max_tokens": 2, "logprobs": -1, "temperature": 0})
    reply = idle.generate("vllm_model", text_input=PROMPT, return_logprobs=True,
                          sampling_parameters=small)  # fmt: skip
    assert [len(each) for each in json.loads(reply["logprobs"])] == [VOCABULARY] * 2
