"""Guides compile to what they say, within bounds; what cannot be is refused by name."""

import ctypes
import json
import time

import pytest
from fixtures.guide.real import CHECKPOINT, VOCAB_SIZE, compiler, follows, guide, ids_of, vocabulary
from slipstream.guide.interface import GuideError
from slipstream.guide.llguidance import Compiler
from slipstream_contract.guide import Guide

AB = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]'
OLDER_TAG = {
    "structures": [{"begin": "<f=x>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}


def tag(form: dict) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAG = {"type": "tag", "begin": "<t>", "content": NUMBER, "end": "</t>"}
ANY_TAG = {**TAG, "content": {"type": "any_text"}}

LEGAL = [
    (guide("json"), ['{"a": 1}', "[1, null]"], ["1", '"a"', "x"]),
    (guide("json_object"), ["{}", '{"a": [1]}'], ["[]", "1"]),
    (guide("json_schema", AB + "}"), ['{"a": 1}', '{ "a":1,"b":2}'], ['{"a":"1"}', "{}"]),
    (guide("json_schema", AB + "}", is_closed=True), ['{"a":1}'], ['{"a":1,"b":2}']),
    (guide("json_schema", AB + "}", is_compact=True), ['{"a":1}'], ['{"a": 1}']),
    (guide("json_schema", AB + "}", whitespace_pattern=" ?"), ['{"a": 1}'], ['{"a":  1}']),
    (guide("json_schema", AB + "}"), ["{" + " " * 16 + '"a":1}'], ["{" + " " * 17 + '"a":1}']),
    (guide("json_schema", "true"), ["1", "{}", '"a"'], ["a"]),
    (guide("regex", "[a-c]+x?"), ["abc", "ax"], ["x", "axx"]),
    (guide("ebnf_grammar", 'root ::= "a" b\nb ::= [0-9]+'), ["a1", "a123"], ["a", "b1"]),
    (guide("ebnf_grammar", 'start: "a" /[0-9]+/'), ["a1"], ["a"]),
    (guide("choice", '["a.b", "c\\n", "(", "\\u00e9"]'), ["a.b", "c\n", "(", "é"], ["axb", "c"]),
    (guide("structural_tag", json.dumps(OLDER_TAG)), ["hi <f=x>12</f> yes", "hi"], ["<f=x>a"]),
    (guide("structural_tag", tag(TAG)), ["<t>1</t>"], ["<t>a</t>", "1"]),
    (guide("structural_tag", tag(ANY_TAG)), ["<t>any thing</t>"], ["<t>any"]),
    (
        guide("structural_tag", tag({"type": "or", "elements": [TAG, NUMBER]})),
        ["<t>1</t>", "1"],
        ["a"],
    ),
    (
        guide("structural_tag", tag({"type": "sequence", "elements": [NUMBER, ANY_TAG]})),
        ["1<t>a</t>"],
        ["<t>a</t>"],
    ),
    (
        guide(
            "structural_tag",
            tag({"type": "tags_with_separator", "tags": [TAG], "separator": ", "}),
        ),
        ["<t>1</t>, <t>2</t>", ""],
        ["<t>1</t>,<t>"],
    ),
]


@pytest.mark.parametrize(("wanted", "legal", "illegal"), LEGAL)
def test_a_guide_is_what_it_says(wanted, legal, illegal):
    for text in legal:
        assert follows(wanted, ids_of(text)) == (True, True), text
    for text in illegal:
        assert not follows(wanted, ids_of(text))[1], text


def is_text(wanted: Guide, text: str) -> bool:
    return follows(wanted, ids_of(text))[1]


@pytest.mark.parametrize("form", ["{0}a", "b{0}", "{0}", "a{0}{0}b"])
def test_a_choice_may_have_any_mark(form: str):
    """Some marks have another meaning after a backslash than without one."""
    texts = [form.format(chr(code)) for code in range(32, 127)]
    for text in texts:
        assert is_text(guide("choice", json.dumps([text])), text), text
    whole = guide("choice", json.dumps(texts))
    assert all(is_text(whole, text) for text in texts)
    assert not is_text(whole, form.format("éx"))


@pytest.mark.parametrize("mark", "<>&~-^#/")
def test_a_schema_may_exclude_any_mark(mark: str):
    schema = guide("json_schema", json.dumps({"type": "string", "not": {"enum": [f"{mark}b"]}}))
    assert is_text(schema, f'"{mark}c"')
    assert not is_text(schema, f'"{mark}b"')


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (guide("regex", "("), "unclosed group"),
        (guide("regex", "(?=a)b"), "look-around"),
        (guide("ebnf_grammar", "root ::= ("), "Expected"),
        (guide("ebnf_grammar", "root ::= root"), "no text follows the guide"),
        (guide("ebnf_grammar", "start: foo"), "unknown name"),
        (guide("ebnf_grammar", "#" * 65_537), "65537 bytes, at most 65536"),
        (guide("json_schema", "false"), "Unsatisfiable"),
        (guide("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'), "minimum"),
        (guide("json_schema", '{"$ref": "http://x/"}'), "http://x/"),
        (guide("json_schema", '{"not": {"pattern": "a"}}'), "not"),
        (guide("json_schema", '{"if": {"pattern": "a"}, "then": {}}'), "if"),
        (guide("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (guide("json_schema", '{"oneOf": [{"minimum": 1}, {"multipleOf": 3}]}'), "oneOf"),
        (guide("json_schema", '{"required": 3}'), "Expected array for 'required', got 3"),
        (guide("structural_tag", "{}"), "either structures and triggers, or a format"),
        (guide("structural_tag", tag({"type": "dispatch"})), "'dispatch', not one of"),
        (guide("structural_tag", tag({"type": "sequence"})), "format.elements is None"),
        (guide("structural_tag", tag({**TAG, "begin": 1})), "format.begin is 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wanted, error):
    with pytest.raises(GuideError, match=error):
        compiler().compile(wanted)


HOSTILE = [
    guide("regex", "(((a{1,999}){1,999}){1,999}){1,999}"),
    guide("regex", "(.*a){60}.{4000}b.{4000}"),
    guide("regex", "|".join(f".{{{i}}}{i}" for i in range(400))),
    guide("json_schema", json.dumps({"enum": ["x" * i for i in range(1400)]})),
    guide(
        "json_schema",
        json.dumps({"anyOf": [{"type": "string", "pattern": f"a*c.{{{i}}}"} for i in range(99)]}),
    ),
    guide(
        "json_schema",
        json.dumps(
            {
                "$defs": {
                    f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{(i + j) % 60}"} for j in range(1, 9)]}
                    for i in range(60)
                },
                "$ref": "#/$defs/d0",
            }
        ),
    ),
    guide("json_schema", '{"allOf":[{"$ref":"#"},{"$ref":"#"}]}'),
    guide("ebnf_grammar", 'root ::= root root root | "a" | ""'),
]  # fmt: skip


@pytest.mark.parametrize("wanted", HOSTILE)
def test_a_hostile_guide_ends_within_its_bound(wanted):
    started, error = time.process_time(), "none"
    try:
        matcher = compiler().compile(wanted).matcher
        mask = (ctypes.c_ubyte * compiler().num_mask_bytes)()
        for _ in range(3):
            matcher.fill(ctypes.addressof(mask))
    except GuideError as caught:
        error = str(caught)
    assert 0 < len(error) < 400
    assert time.process_time() - started < 4


def test_ten_thousand_choices():
    texts = [f"{i:05d} is {i * 7919 % 10007}" for i in range(10_000)]
    wanted = guide("choice", json.dumps(texts))
    assert follows(wanted, ids_of(texts[4321])) == (True, True)
    assert not follows(wanted, ids_of("10000 is 0"))[0]


def test_a_mask_has_the_tokens_that_are_legal_and_no_others():
    matcher = compiler().compile(guide("regex", "(ab|ac)+")).matcher.copy()
    words = (ctypes.c_uint32 * (VOCAB_SIZE // 32))()
    for text in ("", "a", "ab", "aba"):
        trial = matcher.copy()
        assert all(trial.take(i) for i in ids_of(text))
        trial.fill(ctypes.addressof(words))
        legal = {i for i in range(VOCAB_SIZE) if words[i >> 5] >> (i & 31) & 1}
        for token_id in range(1, VOCAB_SIZE, 7):
            assert trial.copy().take(token_id) == (token_id in legal)


def test_tokens_are_untaken():
    matcher = compiler().compile(guide("regex", "[0-9]+")).matcher.copy()
    ids = ids_of("1") + ids_of("2")
    assert all(matcher.take(i) for i in ids)
    assert not matcher.take(ids_of("a")[0])
    matcher.roll_back(2)
    assert not matcher.is_accepting
    assert all(matcher.take(i) for i in ids)
    assert matcher.is_accepting
    assert not matcher.is_finished


def test_what_is_forced():
    matcher = compiler().compile(guide("regex", "return [0-9]")).matcher.copy()
    forced = matcher.forced(8)
    assert b"return ".startswith(b"".join(map(vocabulary().raw, forced)))
    assert all(matcher.take(i) for i in forced)


def test_a_tokenizer_of_other_bytes_is_refused_by_its_first_token():
    text = (CHECKPOINT / "tokenizer.json").read_text()
    with pytest.raises(GuideError, match="token 100 of the tokenizer is b'x', but llguidance"):
        Compiler(text, VOCAB_SIZE, [0], lambda i: b"x" if i == 100 else vocabulary().raw(i))
    with pytest.raises(GuideError, match="names no token that ends a text"):
        Compiler(text, VOCAB_SIZE, [], vocabulary().raw)
    with pytest.raises(GuideError, match="llguidance cannot read the tokenizer"):
        Compiler("{}", VOCAB_SIZE, [0], vocabulary().raw)
