"""Split texts as the pre-tokenizers do whose names GGUF files have, in tokenizer.json's terms.

A byte-level tokenizer merges bytes only inside the pieces that these make. llama.cpp knows the
names (`tokenizer.ggml.pre`); the patterns are those of the models' own tokenizer.json.
"""

from dataclasses import dataclass
from typing import Any

from slipstream.models.gguf.cased import CASED, EAST, KANA, MARKS

_NUMBERS = r"\p{N}{1,3}"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
# Words of which upper case starts a new one.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is split.

    Attributes:
        pattern: pieces are its matches; empty: GPT-2's, which ByteLevel has.
        before: other patterns, by which texts are split first, one after another.
        splits_digits: before that, every digit is a piece.
        ignores_merges: a piece that is a token is not merged.
        adds_bos: whether a file means so that does not say.
        is_nfc: whether texts are composed first.
    """

    pattern: str = ""
    before: tuple[str, ...] = ()
    splits_digits: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False
    is_nfc: bool = False

    def spec(self) -> dict[str, Any]:
        """Return the `pre_tokenizer` of tokenizer.json."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        parts: list[dict[str, Any]] = [level | {"use_regex": not self.pattern}]
        patterns = [*self.before, *filter(None, [self.pattern])]
        rest = {"behavior": "Isolated", "invert": False}
        splits = [{"type": "Split", "pattern": {"Regex": each}} | rest for each in patterns]
        parts = splits + parts
        if self.splits_digits:
            parts.insert(0, {"type": "Digits", "individual_digits": True})
        return {"type": "Sequence", "pretokenizers": parts} if len(parts) > 1 else parts[0]


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(splits_digits=True)
_LLAMA3 = PreTokenizer(
    "|".join((_CONTRACTIONS, _WORDS, _NUMBERS, _REST)), ignores_merges=True, adds_bos=True
)
_QWEN2 = PreTokenizer("|".join((_CONTRACTIONS, _WORDS, r"\p{N}", _REST)), is_nfc=True)
_GPT2_COMPOSED = PreTokenizer(is_nfc=True)
_GLM4 = PreTokenizer("|".join((_CONTRACTIONS, _WORDS, _NUMBERS, _REST)))
_BLOOM = PreTokenizer(r" ?[^(\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+")
_TEKKEN = PreTokenizer(
    "|".join(
        (
            f"{_LEAD}{_UPPER}*{_LOWER}+",
            f"{_LEAD}{_UPPER}+{_LOWER}*",
            r"\p{N}",
            _CASED_REST,
        )
    ),
    ignores_merges=True,
    adds_bos=True,
)
_GPT4O = PreTokenizer(
    "|".join(
        (
            f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
            f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
            _NUMBERS,
            _CASED_REST,
        )
    )
)
_DEEPSEEK_LLM = PreTokenizer(
    r"\p{N}+",
    before=(r"[\r\n]", rf"\s?[{CASED}]+", rf"\s?[{MARKS}]+", r"\s+$", f"[{EAST}]+"),
)
_DEEPSEEK_CODER = PreTokenizer(
    r"\p{N}", before=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{EAST}]+")
)
_DEEPSEEK_V3 = PreTokenizer(
    "|".join(
        (
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    before=(_NUMBERS, f"[{KANA}]+"),
)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2_COMPOSED,
    "olmo": _GPT2_COMPOSED,
    "bloom": _BLOOM,
    "chatglm-bpe": _GLM4,
    "glm4": _GLM4,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "hunyuan": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}
