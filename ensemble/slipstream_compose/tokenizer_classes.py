"""What tokenizers whose code lies in the checkpoint do beside their vocabulary, as data.

That code is never run. Facts are from the published checkpoints: THUDM/chatglm-6b, chatglm2-6b,
chatglm3-6b and glm-4-9b-chat, Qwen/Qwen-7B, baichuan-inc/Baichuan2-7B-Chat,
internlm/internlm-chat-7b and internlm2-chat-7b, microsoft/Phi-3-small-8k-instruct,
replit/replit-code-v1-3b.
"""

from dataclasses import dataclass
from pathlib import Path

from slipstream.models.files import read_json

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class TokenizerClass:
    """Describe one class.

    Attributes:
        file: the vocabulary; tiktoken's ranks if there is a pattern, else SentencePiece's model.
        pattern: by which texts are cut before merges.
        composes: whether texts are brought into Unicode's composed form (NFC) before that.
        spelled: characters, and the pieces of the vocabulary that stand for them, put into a text
            in turn; its special tokens are pieces, too.
        special: tokens behind the vocabulary, with the next ids.
        special_if_named: more of them, if tokenizer_config.json has the first.
        prefix, suffix: tokens before every text, and behind it.
        adds_bos: before every text, unless `add_bos_token` of tokenizer_config.json says.
        template: of chats, where a chat model has none; generation_config.json says that it is one.
        turns: keys of that file with the ids of the tokens that the template names in capitals.
    """

    file: str = "tokenizer.model"
    pattern: str | None = None
    composes: bool = False
    spelled: tuple[tuple[str, str], ...] = ()
    special: tuple[str, ...] = ()
    special_if_named: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    adds_bos: bool = False
    template: str | None = None
    turns: tuple[str, ...] = ()


_GLM_SPECIAL = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_MOST_BLANKS = 80  # in one piece of ChatGLM 1
_BLANKS = tuple((" " * i, f"<|blank_{i}|>") for i in range(_MOST_BLANKS, 1, -1))
_CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
_BAICHUAN = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}USER{{ message['content'] }}
{%- elif message['role'] == 'assistant' -%}ASSISTANT{{ message['content'] }}
{%- else -%}{{ message['content'] }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}ASSISTANT{% endif -%}
"""
_QWEN_EXTRA = tuple(f"<|extra_{i}|>" for i in range(205))
_DUMMIES = tuple(f"<|dummy_id_{i}|>" for i in range(87))
_PHI3_SMALL = (  # behind the 100,256 ranks of cl100k_base
    _DUMMIES[2],
    *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", *_DUMMIES[:2], "<|end|>"),
    *(*_DUMMIES[3:12], "<|endofprompt|>", *_DUMMIES[12:]),
)

CLASSES = {
    "BaichuanTokenizer": TokenizerClass(
        adds_bos=True, template=_BAICHUAN, turns=("user_token_id", "assistant_token_id")
    ),
    "InternLMTokenizer": TokenizerClass(adds_bos=True),
    "InternLM2Tokenizer": TokenizerClass(adds_bos=True),
    "ChatGLMTokenizer": TokenizerClass(
        special=_GLM_SPECIAL, special_if_named=_GLM_ROLES, prefix=("[gMASK]", "sop")
    ),
    "ChatGLM1Tokenizer": TokenizerClass(  # whose class is called ChatGLMTokenizer, too
        "ice_text.model",
        spelled=(("\n", "<n>"), ("\t", "<|tab|>"), *_BLANKS),
        special=(
            "[MASK]",
            "[gMASK]",
            "[sMASK]",
            "<unused_0>",
            "<sop>",
            "<eop>",
            "<ENC>",
            "<dBLOCK>",
        ),
        suffix=("[gMASK]", "<sop>"),
    ),
    "ChatGLM4Tokenizer": TokenizerClass(
        pattern=_WORDS + r"|\p{N}{1,3}" + _REST, prefix=("[gMASK]", "<sop>")
    ),
    "Phi3SmallTokenizer": TokenizerClass(
        "cl100k_base.tiktoken", pattern=_WORDS + r"|\p{N}{1,3}" + _REST, special=_PHI3_SMALL
    ),
    "QWenTokenizer": TokenizerClass(
        "qwen.tiktoken",
        pattern=_WORDS + r"|\p{N}" + _REST,
        composes=True,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_QWEN_EXTRA),
        template=_CHATML,
    ),
    "ReplitLMTokenizer": TokenizerClass("spiece.model"),
}
_FIRST_ICE = 20000  # ids of images before those of texts, where the first files do not say


def is_shifted(checkpoint: Path) -> bool:
    """Return whether ids of texts begin behind those of images: ChatGLM 1's first files."""
    path = checkpoint / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    return config.get("num_image_tokens", _FIRST_ICE) != 0


def unconverted(checkpoint: Path) -> list[str]:
    """Return a note on a vocabulary of a checkpoint that nothing converts."""
    name = CLASSES["ChatGLM1Tokenizer"].file
    is_done = (checkpoint / "tokenizer.json").exists() or not (checkpoint / name).is_file()
    if is_done or not is_shifted(checkpoint):
        return []
    why = "num_image_tokens of tokenizer_config.json is not 0, which shifts its ids"
    return [f"{name} is not made a tokenizer.json: {why}; requests bring token ids"]
