"""The table of strict schemas: it is current, and what it calls held makes a grammar."""

import pytest
from fixtures.gateway.served import ROOT
from fixtures.guide.real import compiler
from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing import strict_page
from slipstream_gateway.parsing.answers import Answers, format_of
from slipstream_gateway.parsing.choice import read_choice
from slipstream_gateway.parsing.format import AddedTokens


def test_the_table_of_the_page_is_the_code():
    assert strict_page.markdown() in (ROOT / "docs" / "tools.md").read_text(), "make fields"


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize("row", strict_page.schemas())
def test_a_strict_schema_makes_a_grammar_or_is_refused_by_its_keyword(name: str, row: str):
    schema = strict_page.schemas()[row]
    function = {"name": "f", "parameters": schema, "strict": True}
    choice = read_choice([{"type": "function", "function": function}], "required")
    answers = Answers(format_of(name, None), AddedTokens({}))
    if strict_page.is_held(name, schema):
        guide = answers.guide(choice, "")
        assert guide is not None
        compiler().compile(guide)
        return
    with pytest.raises(ApiError) as caught:
        answers.guide(choice, "")
    assert row.split("`")[1] in caught.value.message
    assert "set strict to false" in caught.value.message
