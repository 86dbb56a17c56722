"""Markdown of a model in a real browser: any text, at any chunking, gives harmless elements."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

PIECES = (
    *("> ", "- ", "1. ", "* ", "**", "_", "`", "```", "```js\n", "\n", "\n\n", "  ", "    "),
    *("\t", "| a | b |\n", "|---|---|\n", "[", "](", ")", "![", "<br>", "<", ">", "$", "$$"),
    *("\\(", "\\[", "\\", "~~", "# ", "http://x ", "[ ] ", "---\n", "word", "é", "😀", "\u202e"),
    *("\x00", '"', "'", "&lt;", "javascript:alert(1)", "JaVaScRiPt:alert(1)", "vbscript:x"),
    *("<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "<svg/onload=alert(1)>"),
    *('" onclick="alert(1)', "style=color:red", "<iframe src=//x>", "\x01javascript:alert(1)"),
    "data:text/html,<b>",
)
ALLOWED = {
    *("DIV", "P", "BR", "HR", "H1", "H2", "H3", "H4", "H5", "H6", "EM", "STRONG", "S", "CODE", "A"),
    *("PRE", "UL", "OL", "LI", "INPUT", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "BLOCKQUOTE"),
    *("EQUATION-BLOCK", "EQUATION-INLINE", "SPAN", "BUTTON"),
}
ATTRIBUTES = {
    *("href", "target", "rel", "title", "class", "type", "disabled", "checked", "start"),
    "tabindex",
}
RENDER = """(async chunks => {
  const { Markdown } = await import("/page/markdown.js");
  const root = document.createElement("div");
  document.body.append(root);
  const view = new Markdown(root);
  for (const chunk of chunks) view.write(chunk);
  view.end();
  const all = [...root.querySelectorAll("*")];
  const found = {
    tags: [...new Set(all.map(one => one.tagName))],
    attributes: [...new Set(all.flatMap(one => one.getAttributeNames()))],
    links: all.filter(one => one.href).map(one => one.protocol),
    gaveUp: all.some(one => one.className === "plain-text"),
    text: root.innerText,
  };
  root.remove();
  return found;
})(%s)"""


@pytest.fixture
def blank(tab, static_url):
    tab.open(static_url)
    return tab


def render(tab, *chunks: str) -> dict:
    return tab.run(RENDER % json.dumps(chunks))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), max_size=8))
@example(chunks=["![](http://x javascript:alert(1)"])
def test_no_text_gives_a_harmful_element(blank, chunks: list[str]) -> None:
    found = render(blank, *chunks)
    assert set(found["tags"]) <= ALLOWED
    assert set(found["attributes"]) <= ATTRIBUTES
    assert set(found["links"]) <= {"http:", "https:", "mailto:"}
    assert not found["gaveUp"]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("ab <>&\"'é😀.,;*_`[])!#-$\\~|\n"), max_size=80))
def test_plain_text_is_shown_whole(blank, text: str) -> None:
    found = render(blank, *text)["text"]
    assert [sum(map(found.count, "abé😀.,;"))] == [sum(map(text.count, "abé😀.,;"))]


def test_images_of_a_model_are_links(blank) -> None:
    found = render(blank, "![a picture](https://example.org/x.png)")
    assert "IMG" not in found["tags"]
    assert found["links"] == ["https:"]
    assert "a picture" in found["text"]


def test_what_models_write(blank) -> None:
    text = "# Head\n\n- one\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    text += "```python\nx = 1\n```\n\n**b**"
    found = render(blank, *text)
    assert {"H1", "UL", "LI", "TABLE", "TH", "TD", "PRE", "CODE", "STRONG"} <= set(found["tags"])
    assert "x = 1" in found["text"]
    assert "python" in found["text"]
