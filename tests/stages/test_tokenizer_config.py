"""Tokens and roles that only the configuration has, against transformers itself."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fixtures.stages.zoo import ZOO, byte_level_bpe, save
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_contract.decoder import UnsupportedTokenizerError
from slipstream_contract.tokenizer_config import ROLES, TokenizerConfig
from slipstream_postprocessing.detokenize import detokenize
from slipstream_preprocessing.encode import Encoder
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

# Tokens that are special, tokens that are added, pieces of a vocabulary, and tokens that are new.
CONTENTS = ["<s>", "</s>", "<|im_start|>", "added word", "été", "the", "dog", "[UNK]"]
NEW = ["<|a|>", "<|b|>", "<pad>", "new word", "dog's"]
TEXTS = st.lists(st.sampled_from([*CONTENTS, *NEW, " ", "fox", "\n"]), min_size=1).map("".join)
FLAGS = st.fixed_dictionaries(
    {}, optional={n: st.booleans() for n in ("lstrip", "rstrip", "single_word", "normalized")}
)
CONTENT = st.sampled_from([*CONTENTS, *NEW])
# As `save_pretrained` has written them over the years: a text, or an object that says what it is.
OBJECTS = [
    {
        "__type": "AddedToken",
        "content": content,
        "special": index % 2 == 0,
        "lstrip": index % 3 == 0,
        "rstrip": index % 4 == 0,
        "single_word": index % 5 == 0,
    }
    | ({} if index % 3 == 1 else {"normalized": index % 3 == 2})
    for index, content in enumerate([*CONTENTS, *NEW])
]
TOKENS = CONTENT | st.sampled_from(OBJECTS)
LISTS = st.lists(TOKENS, max_size=3, unique_by=str)
NAMED = st.dictionaries(st.sampled_from(["image_token", "boi_token"]), CONTENT, min_size=1)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(ROLES, st.none() | TOKENS),
        "audio_token": TOKENS,
        "extra_special_tokens": LISTS | NAMED,
        "additional_special_tokens": st.none() | LISTS,
        "model_specific_special_tokens": st.none() | NAMED,
        "split_special_tokens": st.booleans(),
    },
)
NUMBERED = st.lists(st.tuples(CONTENT, FLAGS, st.booleans()), max_size=3, unique_by=lambda t: t[0])
# The two files of older checkpoints.
ROLES_MAP = st.dictionaries(st.sampled_from(ROLES[:5]), CONTENT, max_size=2)


@cache
def trained(name: str) -> Tokenizer:
    return ZOO[name]()


def numbered(tokenizer: Tokenizer, drawn: list[Any]) -> dict[str, Any]:
    """`added_tokens_decoder`: known tokens by their ids, new ones behind the last."""
    following, tokens = tokenizer.get_vocab_size(), {}
    for content, flags, special in drawn:
        token_id = tokenizer.token_to_id(content)
        if token_id is None:
            token_id, following = following, following + 1
        tokens[str(token_id)] = {"content": content, "special": special, **flags}
    return tokens


@pytest.mark.parametrize("name", ZOO)
@settings(max_examples=80, deadline=None)
@given(
    config=CONFIGS,
    drawn=st.none() | NUMBERED,
    roles=ROLES_MAP,
    text=TEXTS,
    add_special=st.booleans(),
    skip_special=st.booleans(),
)
def test_tokens_are_added_as_transformers_adds_them(
    name: str,
    config: dict[str, Any],
    drawn: list[Any] | None,
    roles: dict[str, str],
    text: str,
    add_special: bool,
    skip_special: bool,
) -> None:
    tokenizer = trained(name)
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        if drawn is not None:
            config = config | {"added_tokens_decoder": numbered(tokenizer, drawn)}
        else:
            (directory / "special_tokens_map.json").write_text(json.dumps(roles))
            added = {"<|b|>": tokenizer.get_vocab_size()}
            (directory / "added_tokens.json").write_text(json.dumps(added))
        save(tokenizer, directory, **config)
        theirs = PreTrainedTokenizerFast.from_pretrained(directory)
        mine = Encoder.load(directory, add_special)
        variables = {r: t.content for r, t in TokenizerConfig.load(directory).roles.items()}
    assert repr(mine.tokenizer.get_added_tokens_decoder()) == repr(theirs.added_tokens_decoder)
    assert variables == theirs.special_tokens_map
    ids = theirs.encode(text, add_special_tokens=add_special)
    assert not ids or mine.encode(text) == ids
    vocab = mine.vocab
    assert vocab.size == len(theirs)
    all_ids = range(vocab.size)
    assert [mine.tokenizer.id_to_token(i) for i in all_ids] == theirs.convert_ids_to_tokens(all_ids)
    expected = theirs.decode(ids, skip_special_tokens=skip_special)
    # The library decodes a token that is found in the normalised text to its normalised form.
    if mine.tokenizer.normalizer is None and "�" not in expected:
        assert detokenize(vocab, ids, skip_special=skip_special) == expected


def test_a_token_whose_id_is_taken_gets_the_next_free_one(tmp_path: Path) -> None:
    """A reserved token has a new name in tokenizer.json, but not in the configuration."""
    config = {"added_tokens_decoder": {"2": {"content": "<|reserved|>", "special": True}}}
    directory = save(byte_level_bpe(), tmp_path, **config)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    mine = Encoder.load(directory)
    size = byte_level_bpe().get_vocab_size()
    assert mine.encode("<|reserved|><|im_start|>") == theirs.encode("<|reserved|><|im_start|>")
    assert mine.encode("<|reserved|>") == [size]
    assert mine.vocab.raw(size) == b"<|reserved|>"


def test_extra_tokens_as_the_map_of_older_checkpoints_has_them(tmp_path: Path) -> None:
    entry = {"content": "<|a|>", "lstrip": False, "normalized": False, "rstrip": False}
    directory = save(byte_level_bpe(), tmp_path)
    older = {"additional_special_tokens": [entry, "<|b|>"]}
    (directory / "special_tokens_map.json").write_text(json.dumps(older))
    encoder, size = Encoder.load(directory), byte_level_bpe().get_vocab_size()
    assert encoder.encode("<|b|><|a|>") == [size + 1, size]
    assert {size, size + 1} <= encoder.vocab.special


def test_an_end_that_the_model_cannot_make_is_none(tmp_path: Path) -> None:
    """Else the engine refuses every request: the id is outside its vocabulary."""
    tokenizer = byte_level_bpe()
    size = tokenizer.get_vocab_size()
    directory = save(tokenizer, tmp_path, eos_token="<|new|>")
    assert Encoder.load(directory).end_ids == (size,)
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": [1, {size}]}}')
    for config in ({"vocab_size": size}, {"text_config": {"vocab_size": size}}):
        (directory / "config.json").write_text(json.dumps(config))
        assert Encoder.load(directory).end_ids == (1,)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": 5}, "bos_token is 5, neither a text nor a token"),
        ({"eos_token": {"text": "x"}}, "eos_token is .*content"),
        ({"extra_special_tokens": "<|a|>"}, "extra_special_tokens is '<|a|>', not tokens"),
        ({"model_specific_special_tokens": ["<|a|>"]}, "model_specific_special_tokens is .*<|a|>"),
        ({"additional_special_tokens": [None]}, r"extra_special_tokens\[0\] is None, neither"),
        ({"added_tokens_decoder": ["<|a|>"]}, r"added_tokens_decoder is \['<|a|>'\], not tokens"),
        ({"added_tokens_decoder": {"7": {}}}, r"added_tokens_decoder\[7\] is .*content"),
        ({"added_tokens_decoder": {"x": "a"}}, r"added_tokens_decoder\['x'\] is no token id"),
    ],
)
def test_what_is_no_token_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    directory = save(byte_level_bpe(), tmp_path, **config)
    with pytest.raises(UnsupportedTokenizerError, match=rf"tokenizer_config\.json: {message}"):
        TokenizerConfig.load(directory)
