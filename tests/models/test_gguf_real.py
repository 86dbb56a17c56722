"""A real GGUF file, SmolLM2-135M-Instruct: logits and tokens are those that transformers reads."""

from pathlib import Path

import pytest
import torch
import transformers
from fixtures.models.checkpoints import Driver, Generation, make_runner
from fixtures.models.gguf_files import unpacked
from slipstream_preprocessing.chat import ChatTemplate
from slipstream_preprocessing.tokenizer import load_tokenizer
from slipstream_serve.chat_model import ChatModelError, fetch
from tokenizers import pre_tokenizers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.rest, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return fetch(ROOT / ".slipstream" / "chat")
    except ChatModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def directory(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(path, tmp_path_factory.mktemp("real") / "checkpoint")


@pytest.fixture(scope="module")
def model(path: Path) -> transformers.PreTrainedModel:
    """What transformers makes of the file, in fp32."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert model.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model


@pytest.mark.parametrize(("quantization", "most"), [("none", 1e-3), ("auto", 1e-2)])
def test_logits(
    model: transformers.PreTrainedModel, directory: Path, quantization: str, most: float
) -> None:
    """In fp32 as the file is read; where codes are multiplied as they are, rows have 16 bits."""
    runner = make_runner(directory, kv_cache_tokens=4096, quantization=quantization)
    driver = Driver(runner, keep_logits=True)
    tokenizer, template = load_tokenizer(directory), ChatTemplate.load(directory)
    asked = ["What is the capital of France?", "Write a haiku about 2 cats, it's late."]
    generations = [
        Generation(tokenizer.encode(template.render([{"role": "user", "content": text}])).ids, 24)
        for text in asked
    ]
    driver.finish(generations, 16)
    for generation in generations:
        with torch.no_grad():
            truth = model(torch.tensor([generation.tokens])).logits[0]
        for i, logits in enumerate(generation.logits):
            expected = truth[len(generation.prompt) - 1 + i]
            assert (logits - expected).abs().max() <= most
            assert generation.outputs[i] == int(expected.argmax())
    assert tokenizer.decode(generations[0].outputs).startswith("The capital of France is Paris.")


def test_tokens(path: Path, directory: Path) -> None:
    """transformers leaves out that the model's own tokenizer splits numbers into digits."""
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    original = theirs.backend_tokenizer
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), original.pre_tokenizer]
    )
    ours = load_tokenizer(directory)
    texts = [file.read_text() for file in sorted(ROOT.glob("docs/*.md"))]
    texts += [file.read_text() for file in sorted(ROOT.glob("backend/slipstream/*.py"))]
    texts += ["<|im_start|>user\nNaïve 漢字 😀 1234<|im_end|>\n\n  x"]
    for text in texts:
        ids = ours.encode(text).ids
        assert ids == original.encode(text).ids
        assert ours.decode(ids) == original.decode(ids)
    assert theirs.chat_template == (directory / "chat_template.jinja").read_text()
    special = {token: theirs.convert_tokens_to_ids(token) for token in theirs.all_special_tokens}
    assert special == {token: ours.token_to_id(token) for token in special}
