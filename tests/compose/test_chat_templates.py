"""Chat templates by name: what the code beside these checkpoints makes of a conversation."""

import json
from pathlib import Path

import pytest
from fixtures.composing import run
from fixtures.stages.zoo import CORPUS
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from slipstream_compose.chat_templates import TEMPLATES, put_template
from slipstream_compose.compose import ComposeError
from slipstream_compose.convert import convert_tokenizer
from slipstream_compose.tokenizer_classes import CLASSES
from slipstream_contract.errors import ContractError
from slipstream_preprocessing.chat import ChatTemplate
from slipstream_preprocessing.tokenizer import load_tokenizer

TURNS = [("Hello.", "Hi! What is it?"), ("  漢字?", "You can\nread."), ("Bye", "")]
SYSTEM = "Be brief."
_CLASS = '"tokenizer_class": "ChatGLMTokenizer"'


def messages(*, has_system: bool) -> list[dict[str, str]]:
    found = [{"role": "system", "content": SYSTEM}] if has_system else []
    for asked, answer in TURNS:
        found.append({"role": "user", "content": asked})
        found.append({"role": "assistant", "content": answer})
    return found[:-1]


def chatglm2() -> str:
    """`build_prompt`, behind the tokens that begin each of its texts."""
    prompt = ""
    for i, (asked, answer) in enumerate(TURNS[:-1], 1):
        prompt += f"[Round {i}]\n\n问\uff1a{asked}\n\n答\uff1a{answer}\n\n"
    return f"[gMASK]sop{prompt}[Round {len(TURNS)}]\n\n问\uff1a{TURNS[-1][0]}\n\n答\uff1a"


def chatglm1() -> str:
    """`chat` and `build_inputs_with_special_tokens`: rounds are counted where there are several."""
    prompt = ""
    for i, (asked, answer) in enumerate(TURNS[:-1]):
        prompt += f"[Round {i}]\n问\uff1a{asked}\n答\uff1a{answer}\n"
    return f"{prompt}[Round {len(TURNS) - 1}]\n问\uff1a{TURNS[-1][0]}\n答\uff1a[gMASK]<sop>"


def chatglm3() -> str:
    """`build_chat_input`: roles are tokens, with a line behind each; SentencePiece's own space."""
    turns = [("system", SYSTEM)]
    for asked, answer in TURNS:
        turns += [("user", asked), ("assistant", answer)]
    text = "".join(f"<|{role}|>\n {content}" for role, content in turns[:-1])
    return f"[gMASK]sop{text}<|assistant|>"


def internlm(end: str, system: str) -> str:
    """`build_inputs`."""
    prompt = f"<s>{system}"
    for asked, answer in TURNS[:-1]:
        prompt += f"<|User|>:{asked}{end}\n<|Bot|>:{answer}<eoa>\n"
    return f"{prompt}<|User|>:{TURNS[-1][0]}{end}\n<|Bot|>:"


WANTED = {
    "chatglm1": (False, chatglm1()),
    "chatglm2": (False, chatglm2()),
    "chatglm3": (True, chatglm3()),
    "internlm": (True, internlm("", f"<|System|>:{SYSTEM}\n")),
    "internlm-eoh": (False, internlm("<eoh>", "")),
}


@pytest.fixture(scope="module", params=TEMPLATES)
def converted(request, tmp_path_factory) -> tuple[str, Path]:
    """A checkpoint of the class with a vocabulary of its kind, made for the template."""
    name, known = request.param, TEMPLATES[request.param]
    path = tmp_path_factory.mktemp(name)
    config = {"tokenizer_class": known.tokenizer_class, "num_image_tokens": 0}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    ice = CLASSES["ChatGLM1Tokenizer"]
    named = [*ice.special, *(x for _, x in ice.spelled)] if name == "chatglm1" else []
    with (path / vocabulary(name)).open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 4),
            model_writer=file,
            model_type="bpe",
            vocab_size=700,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            user_defined_symbols=["<eoh>", "<eoa>", *named],
            minloglevel=2,
        )
    convert_tokenizer(path, known.tokens)
    return name, path


def test_a_template_says_what_the_models_code_says(converted: tuple[str, Path]) -> None:
    """Its tokens are one each, and the rest is what SentencePiece makes of the text between."""
    name, path = converted
    assert put_template(path, name) == [path / "chat_template.jinja"]
    assert put_template(path, name, is_check=True) == []
    has_system, wanted = WANTED[name]
    text = ChatTemplate.load(path).render(messages(has_system=has_system))
    assert text == wanted
    ids = load_tokenizer(path).encode(text, add_special_tokens=False).ids
    original = SentencePieceProcessor(model_file=str(path / vocabulary(name)))
    spelled = CLASSES["ChatGLM1Tokenizer"].spelled if name == "chatglm1" else ()
    parts = [text]
    for token in TEMPLATES[name].tokens:
        parts = [x for part in parts for x in _split(part, token)]
    ours = load_tokenizer(path)
    expected: list[int] = []
    for part in parts:
        for characters, piece in spelled:
            part = part.replace(characters, piece)
        is_token = part in TEMPLATES[name].tokens
        expected += [ours.token_to_id(part)] if is_token else original.encode(part)
    assert ids == expected


def test_one_question_of_chatglm_1_is_its_prompt(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["chatglm1"].source)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    rendered = ChatTemplate.load(tmp_path).render([{"role": "user", "content": " 你好"}])
    assert rendered == " 你好[gMASK]<sop>"


def vocabulary(name: str) -> str:
    """The file of a template's model."""
    return "ice_text.model" if name == "chatglm1" else "tokenizer.model"


def _split(text: str, token: str) -> list[str]:
    first, *rest = text.split(token)
    found = [first]
    for part in rest:
        found += [token, part]
    return [part for part in found if part]


def test_roles_that_a_model_has_no_turns_of(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["chatglm2"].source)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ContractError, match="turns of user and assistant, not of system"):
        ChatTemplate.load(tmp_path).render(messages(has_system=True))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"chat_template.jinja": "x"}, "has a template, in chat_template.jinja"),
        (
            {"tokenizer_config.json": f'{{{_CLASS}, "chat_template": "x"}}'},
            "has a template, in tokenizer_config.json",
        ),
        ({"tokenizer_config.json": "{}"}, "is of ChatGLMTokenizer: .* tokenizer_class = None"),
    ],
)
def test_templates_that_are_not_written(tmp_path: Path, files: dict[str, str], words: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(f"{{{_CLASS}}}")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ComposeError, match=words):
        put_template(tmp_path, "chatglm3")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_token_that_is_missing_and_a_check(converted: tuple[str, Path], tmp_path: Path) -> None:
    """A tokenizer of ChatGLM 2 has no tokens of roles."""
    name, path = converted
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((path / file).read_bytes())
    if name == "chatglm2":
        with pytest.raises(ComposeError, match=r"'<\|system\|>' is no token of .*tokenizer\.json"):
            put_template(tmp_path, "chatglm3")
    with pytest.raises(ComposeError, match="compose without --check writes it"):
        put_template(tmp_path, name, is_check=True)
    assert not (tmp_path / "chat_template.jinja").exists()


def test_the_option(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ComposeError, match="--chat-template internlm is of InternLMTokenizer"):
        run(checkpoint, tmp_path / "out", "--chat-template", "internlm")
