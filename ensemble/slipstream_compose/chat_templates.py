"""Chat templates of models whose files have none, and do not say which: chosen by their names.

They say in Jinja what the code beside these checkpoints does, which is never run. Facts are from
THUDM/chatglm-6b, chatglm2-6b and chatglm3-6b, and internlm/internlm-chat-7b, whose first files end
a user's turn otherwise than later ones.
"""

from dataclasses import dataclass
from pathlib import Path

from slipstream.models.files import read_json
from slipstream_contract.errors import clip
from tokenizers import Tokenizer

from slipstream_compose.compose import ComposeError

FILE = "chat_template.jinja"


@dataclass(frozen=True)
class NamedTemplate:
    """Describe one: the tokenizer's class, the template, the tokens that it names."""

    tokenizer_class: str
    source: str
    tokens: tuple[str, ...]


_CHATGLM2 = """\
[gMASK]sop
{%- set turns = namespace(count=0) -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{%- set turns.count = turns.count + 1 -%}
{{- '[Round ' ~ turns.count ~ ']\\n\\n问\uff1a' + message['content'] + '\\n\\n答\uff1a' -}}
{%- elif message['role'] == 'assistant' -%}
{{- message['content'] + '\\n\\n' -}}
{%- else -%}
{{- raise_exception('ChatGLM2 has turns of user and assistant, not of ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
"""
_CHATGLM1 = """\
{%- set turns = namespace(count=0) -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{%- if messages | length > 1 -%}
{{- '[Round ' ~ turns.count ~ ']\\n问\uff1a' + message['content'] + '\\n答\uff1a' -}}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- set turns.count = turns.count + 1 -%}
{%- elif message['role'] == 'assistant' -%}
{{- message['content'] + '\\n' -}}
{%- else -%}
{{- raise_exception('ChatGLM has turns of user and assistant, not of ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}[gMASK]<sop>{%- endif -%}
"""
_CHATGLM3 = """\
[gMASK]sop
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n ' + message['content'] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
_INTERNLM = """\
<s>
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- message['content'] + '<eoa>\\n' -}}
{%- elif message['role'] == 'system' -%}
{{- '<|System|>:' + message['content'] + '\\n' -}}
{%- else -%}
{{- '<|User|>:' + message['content'] + 'END\\n<|Bot|>:' -}}
{%- endif -%}
{%- endfor -%}
"""
TEMPLATES = {
    "chatglm1": NamedTemplate("ChatGLMTokenizer", _CHATGLM1, ("[gMASK]", "<sop>")),
    "chatglm2": NamedTemplate("ChatGLMTokenizer", _CHATGLM2, ("[gMASK]", "sop")),
    "chatglm3": NamedTemplate(
        "ChatGLMTokenizer",
        _CHATGLM3,
        ("[gMASK]", "sop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "internlm": NamedTemplate("InternLMTokenizer", _INTERNLM.replace("END", ""), ("<s>", "<eoa>")),
    "internlm-eoh": NamedTemplate(
        "InternLMTokenizer", _INTERNLM.replace("END", "<eoh>"), ("<s>", "<eoh>", "<eoa>")
    ),
}


def put_template(checkpoint: Path, name: str, is_check: bool = False) -> list[Path]:
    """Write the template of this name into the checkpoint; return what was written.

    Raises ComposeError for another tokenizer, where there is another template, where a token of
    it is missing, and if it `is_check`, where it would be written.
    """
    known, path = TEMPLATES[name], checkpoint / FILE
    config = _read(checkpoint / "tokenizer_config.json")
    own = config.get("tokenizer_class")
    if own != known.tokenizer_class:
        raise ComposeError(
            f"--chat-template {name} is of {known.tokenizer_class}: tokenizer_config.json has "
            f"tokenizer_class = {clip(own)}"
        )
    if path.is_file() and path.read_text(encoding="utf-8") == known.source:
        return []
    if path.is_file() or config.get("chat_template"):
        where = FILE if path.is_file() else "tokenizer_config.json"
        raise ComposeError(f"--chat-template {name}: {checkpoint} has a template, in {where}")
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    encode = tokenizer.encode
    missing = [x for x in known.tokens if len(encode(x, add_special_tokens=False).ids) != 1]
    if missing:
        raise ComposeError(
            f"--chat-template {name}: {missing[0]!r} is no token of {checkpoint}/tokenizer.json"
        )
    if is_check:
        raise ComposeError(f"{path} is not there yet: compose without --check writes it")
    path.write_text(known.source, encoding="utf-8")
    return [path]


def _read(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}
