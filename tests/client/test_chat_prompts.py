"""What `slipstream chat --template` makes the server compute, against transformers itself."""

import io
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from fixtures.client.triton import inputs_of
from fixtures.stages.zoo import ZOO, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slipstream.bridge.text import Text
from slipstream_client.cli import main
from slipstream_client.codec import request_of
from slipstream_client.commands import chat
from slipstream_client.commands.common import TEXT_MODELS
from slipstream_client.results import Chunk
from slipstream_contract.schemas.llmapi import llmapi_request
from slipstream_contract.schemas.trtllm import text_request
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_preprocessing.batch import encode_batch
from slipstream_preprocessing.encode import Encoder
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

ANSWER = "ok"
ENDS = {"none": "$A", "beginning": "<s> $A", "both": "<s> $A </s>"}  # what the tokenizer adds
BEGINNINGS = ["", "{{ bos_token }}", "<s>", "{{ bos_token }}{{ bos_token }}", " {{ bos_token }}"]
TURNS = [
    "{{ bos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}\n",
    "<|im_start|>{{ m.role }}\n{{ m.content }}</s>\n",
    "[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}",
]
PROMPTS = ["", "<|im_start|>assistant\n", "{{ bos_token }}assistant: "]
TEMPLATES = st.builds(
    lambda start, turn, prompt: (
        f"{start}{{% for m in messages %}}{turn}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    ),
    *map(st.sampled_from, (BEGINNINGS, TURNS, PROMPTS)),
)
LINES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1, max_size=12),
    st.sampled_from(["fox", "<s>", "<s> the fox</s>", "it's <|im_start|>", " été "]),
).filter(str.strip)


class Server:
    """Encodes a request as the model that it names does, and answers in one word."""

    def __init__(self, directory: Path, model: str) -> None:
        self.prompts: list[list[int]] = []
        self._model = model
        self._encoder = Encoder.load(directory)
        self._text = Text(directory, True, True, 2048)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, prompt: str, **parameters: object) -> "Answer":
        arrays = inputs_of(request_of(self._model, prompt, parameters, ""))
        if self._model == "ensemble":
            names = {"QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens"}
            names["ADD_SPECIAL_TOKENS"] = "add_special_tokens"
            given = {inner: arrays[name] for inner, name in names.items() if name in arrays}
            outputs = encode_batch(self._encoder, given)
            ids = outputs["INPUT_ID"][0].tolist()
        elif self._model == "tensorrt_llm_bls":
            row = {name: array[0] for name, array in arrays.items()}
            ids = self._text.encode_request(text_request(row, {})).token_ids.tolist()
        elif self._model == "llmapi_model":
            request = request_of(self._model, prompt, parameters, "")
            given = {name: value.string_param for name, value in request.parameters.items()}
            ids = self._text.encode_request(llmapi_request(arrays, given)).token_ids.tolist()
        else:
            ids = self._text.encode_request(vllm_request(arrays, {})).token_ids.tolist()
        self.prompts.append(ids)
        return Answer([Chunk(text=ANSWER)])


class Answer(list):
    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@cache
def checkpoint(name: str, adds: str) -> tuple[Path, PreTrainedTokenizerFast]:
    tokenizer = ZOO[name]()
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(single=ENDS[adds], special_tokens=special)
    directory = save(tokenizer, Path(mkdtemp()))
    return directory, PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("name", ZOO)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    adds=st.sampled_from(list(ENDS)),
    model=st.sampled_from(TEXT_MODELS),
    template=TEMPLATES,
    system=st.none() | LINES,
    lines=st.lists(LINES, min_size=1, max_size=2),
)
def test_the_model_sees_the_ids_of_apply_chat_template(
    monkeypatch, name, adds, model, template, system, lines
):
    directory, tokenizer = checkpoint(name, adds)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    server = Server(directory, model)
    monkeypatch.setattr(chat, "connect", lambda args: server)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    options = [] if system is None else [f"--system={system}"]
    assert main(["chat", "--template", str(directory), "--model", model, *options]) == 0
    messages = [] if system is None else [{"role": "system", "content": system}]
    expected = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        expected.append(
            tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, return_dict=False
            )
        )
        messages.append({"role": "assistant", "content": ANSWER})
    assert server.prompts == expected


@pytest.mark.parametrize("lines", ["a\n/exit\nb\n", "a\n  /exit \nb\n"])
def test_exit_ends_the_conversation(monkeypatch, lines):
    directory, _ = checkpoint("Gemma", "none")
    server = Server(directory, "ensemble")
    monkeypatch.setattr(chat, "connect", lambda args: server)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", "--plain"]) == 0
    assert len(server.prompts) == 1
