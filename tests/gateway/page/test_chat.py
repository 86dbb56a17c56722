"""The page in a real browser on a real gateway: what it sends, shows and stops."""

import json
import time

import jsonschema
import pytest
from fixtures.gateway.served import MODEL, serving
from fixtures.server.support import LONG
from slipstream_serve.server import repository_root

SEVERAL = {"max_tokens": 25_000, "n": 4, "temperature": 1.0}  # all of them fit the cache
HOSTILE = [
    "<img src=x onerror=window.hit=1>",
    "[x](javascript:window.hit=1)",
    "<script>window.hit=1</script>",
    "![x](data:text/html,window.hit=1)",
    "<svg/onload=window.hit=1>",
]

COUNT_REMOVALS = """{
  window.removed = 0;
  const count = records => { for (const one of records) removed += one.removedNodes.length; };
  new MutationObserver(count).observe(document.querySelector(".answer .text"),
    { childList: true, subtree: true, characterData: true });
}"""


def test_a_message_is_answered_with_its_figures(chat) -> None:
    assert chat.texts("#model option") == [MODEL]  # its other names are left out
    chat.set(max_tokens=24, seed=1)
    body = chat.send("import os")
    assert body["messages"] == [{"role": "user", "content": "import os"}]
    assert body["model"] == MODEL
    assert body["stream"] is True
    assert body["stream_options"]["include_usage"] is True
    assert chat.text(".user p") == "import os"
    assert chat.text(".answer .text").strip()
    figures = chat.text(".figures")
    assert "first token" in figures
    assert "tokens/s" in figures
    assert "24 tokens" in figures
    assert "max tokens" in chat.text(".answer > .note")
    assert chat.tab.run("document.activeElement.id") == "prompt"


@pytest.mark.rest
def test_the_answer_grows_while_it_is_written(long_chat) -> None:
    chat = long_chat
    chat.set(max_tokens=LONG, seed=4)
    chat.add(ignore_eos=True)
    chat.start("class Stack:")
    size = "document.querySelector('.answer .text').textContent.length"
    chat.tab.wait(f"document.querySelector('.answer .text') && {size} > 20", 120)
    first = chat.tab.run(size)
    chat.tab.run(COUNT_REMOVALS)
    assert chat.tab.run("document.querySelector('.running') !== null")
    chat.tab.wait(f"{size} > {first}")
    figures = "document.querySelector('.figures').textContent"
    assert "tokens/s" in chat.tab.run(figures)
    chat.tab.wait(f"{size} > 400", 120)
    assert chat.tab.run("window.removed") == 0  # it appends, and makes nothing anew
    chat.tab.press("Escape")
    chat.tab.wait("!document.querySelector('.running')")


@pytest.mark.parametrize("how", ["key", pytest.param("button", marks=pytest.mark.rest)])
def test_stop_is_a_cancel_on_the_server(long_chat, long_gateway, how: str) -> None:
    chat, gateway = long_chat, long_gateway
    gateway.wait_idle()
    name = 'slipstream_gateway_ended_total{how="abandoned"}'
    before = gateway.figures().get(name, 0)
    chat.set(**SEVERAL)
    chat.add(ignore_eos=True)
    chat.start("class Stack:")
    chat.tab.wait("document.querySelector('.answer .text')?.textContent.length > 5")
    if how == "key":
        chat.tab.press("Escape")
    else:
        chat.tab.click("#stop")
    chat.tab.wait("!document.querySelector('.running')")
    gateway.wait_idle()
    assert gateway.figures()[name] == before + 1
    assert chat.texts(".answer > .note") == ["Stopped."] * 4
    assert chat.tab.run("document.querySelector('#send').offsetParent !== null")
    chat.set(max_tokens=4, n=1)
    body = chat.send("again")  # and the conversation goes on
    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "user"]


def test_every_setting_arrives_in_the_request(chat) -> None:
    fields = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "n": 1}
    fields |= {"repetition_penalty": 1.1, "max_tokens": 8, "seed": 2**53 - 1}
    chat.set(**fields, stop="\\n\nend\na\\tb", messages="Be brief.", logprobs=True)
    body = chat.send("def f(x):")
    assert {name: body[name] for name in fields} == fields
    assert body["stop"] == ["\n", "end", "a\tb"]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["logprobs"], body["top_logprobs"]) == (True, 5)
    chat.tab.click("#open-settings")
    chat.tab.click("#reset")
    chat.set(max_tokens=4)
    body = chat.send("more")
    assert set(body) == {"model", "messages", "max_tokens", "stream", "stream_options"}
    assert body["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("param", "value", "is_sent"),
    [("top_p", "7", True), ("temperature", "warm", False), ("seed", str(2**53), False)],
)
def test_errors_are_shown_as_they_are(chat, gateway, param: str, value: str, is_sent: bool) -> None:
    chat.set(**{param: value})
    chat.send("x = 1")
    shown = chat.text(".turn .fault")
    assert f"param: {param}" in shown
    if is_sent:
        said = gateway.chat("x = 1", **{param: 7}).error
        assert said["message"] in shown
        assert f"type: {said['type']}" in shown
        assert "status: 400" in shown
    else:
        assert value in shown
        assert chat.tab.posts == []
    marked = "document.querySelector('[aria-invalid]').dataset.param"
    assert chat.tab.run(marked) == param
    chat.tab.click("#open-settings")
    chat.tab.click("#reset")
    chat.set(max_tokens=2)
    body = chat.send("y = 2")  # the refused message is no part of the conversation
    assert [one["content"] for one in body["messages"]] == ["y = 2"]


def quoted(text: str) -> str:
    """A regular expression of exactly this text."""
    return "".join(f"\\{one}" if not one.isalnum() and one not in "<>=:/ " else one for one in text)


@pytest.mark.parametrize(
    ("texts", "logprobs"),
    [
        (HOSTILE[:2], False),
        pytest.param(HOSTILE, False, marks=pytest.mark.rest),
        pytest.param(HOSTILE, True, marks=pytest.mark.rest),
    ],
)
def test_what_a_model_writes_is_no_element(chat, texts: list[str], logprobs: bool) -> None:
    text = " ".join(texts)
    chat.add(structured_outputs={"regex": quoted(text)})
    chat.set(max_tokens=400, logprobs=logprobs)
    chat.send("x")
    shown = chat.text(".tokens" if logprobs else ".answer .text")
    assert "<img src=x onerror=window.hit=1>" in shown
    assert ("<script>" in shown) == (texts == HOSTILE)
    assert chat.count("#turns :is(img, script, iframe, svg, object)") == 0
    assert chat.tab.run("[...document.querySelectorAll('#turns [href]')].length") == 0
    time.sleep(0.1)
    assert chat.tab.run("window.hit") is None


@pytest.mark.rest
def test_answers_side_by_side_and_the_chosen_one_goes_on(chat) -> None:
    chat.set(n=3, max_tokens=12, temperature=1.2, seed=5)
    chat.send("def f(")
    assert chat.count(".answer") == 3
    tops = "[...document.querySelectorAll('.answer')].map(one => one.getBoundingClientRect().top)"
    assert len(set(chat.tab.run(tops))) == 1
    assert all(chat.texts(".answer .text"))
    chat.tab.click(".answer:nth-child(2) .pick")
    pressed = "[...document.querySelectorAll('.pick')].map(one => one.ariaPressed)"
    assert chat.tab.run(pressed) == ["false", "true", "false"]
    chat.set(n=1)
    body = chat.send("next")
    second = chat.tab.run(
        "document.querySelectorAll('.turn')[0].querySelectorAll('.text')[1].innerText"
    )
    sent = body["messages"][1]["content"]
    assert "".join(filter(str.isalnum, sent)) in "".join(filter(str.isalnum, second))


def test_tokens_are_coloured_and_show_their_alternatives(chat) -> None:
    chat.set(logprobs=True, max_tokens=20, temperature=1.0, seed=3)
    chat.send("import ")
    tokens = chat.texts(".token")
    assert len(tokens) == 20
    levels = "[...document.querySelectorAll('.token')].map(one => one.className)"
    assert len(set(chat.tab.run(levels))) > 1
    colours = (
        "new Set([...document.querySelectorAll('.token')].map("
        "one => getComputedStyle(one).backgroundColor)).size"
    )
    assert chat.tab.run(colours) > 1
    chat.tab.run("document.querySelector('.token[tabindex=\"0\"]').focus()")
    assert chat.tab.run("document.querySelector('#alternatives').offsetParent !== undefined")
    assert 5 <= chat.count(".alternative") <= 6
    shares = [float(text.rstrip(" %")) for text in chat.texts(".percent")]
    assert 0 < sum(shares) <= 100.5
    assert chat.count(".alternative.chosen") == 1
    chat.tab.press("ArrowRight")
    assert chat.tab.run("document.activeElement.dataset.index") == "1"
    assert chat.tab.run("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    chat.tab.press("Escape")
    assert chat.tab.run("document.querySelector('#alternatives').hidden")
    chat.tab.click(".tools .link:nth-child(2)")
    assert chat.tab.run("document.querySelector('.tokens').hidden")


@pytest.mark.rest
def test_an_answer_keeps_to_the_schema(chat) -> None:
    chat.tab.click("#open-settings")
    chat.tab.click("#example")
    chat.set(max_tokens=300, seed=2)
    body = chat.send("x")
    schema = body["response_format"]["json_schema"]["schema"]
    jsonschema.validate(json.loads(chat.text(".answer pre")), schema)
    assert "Complete JSON." in chat.text(".answer > .note")
    chat.set(response_format="{oops")
    chat.send("x")
    assert "The JSON schema is not JSON" in chat.text(".turn:last-child .fault")


def test_keys_alone_do_everything(chat) -> None:
    tab = chat.tab
    chat.set(max_tokens=6)
    assert tab.run("document.activeElement.id") == "prompt"
    tab.type("a = 1")
    tab.press("Shift+Enter")
    tab.type("b = 2")
    tab.press("Enter")
    tab.wait("document.querySelector('.turn') && !document.querySelector('.running')")
    assert chat.text(".user p") == "a = 1\nb = 2"
    tab.press("ArrowUp")
    assert tab.run("document.querySelector('#prompt').value") == "a = 1\nb = 2"
    assert tab.run("document.querySelector('.turn').classList.contains('edited')")
    tab.press("Escape")
    assert tab.run("document.querySelector('#prompt').value") == ""
    tab.press("ArrowUp")
    tab.type("\nc = 3")
    tab.press("Enter")
    tab.wait("document.querySelector('.user p').textContent.includes('c = 3')")
    tab.wait("!document.querySelector('.running')")
    assert chat.count(".turn") == 1
    tab.press("Control+k")
    assert chat.count(".turn") == 0
    assert tab.run("document.querySelector('#empty').offsetParent !== null")
    assert tab.run("document.activeElement.id") == "prompt"
    reached = set()
    for _ in range(40):
        tab.press("Tab")
        reached.add(tab.run("document.activeElement.id || document.activeElement.className"))
    assert {"model", "new", "theme", "open-settings", "starter", "prompt", "send"} <= reached


@pytest.mark.rest
def test_a_model_without_a_chat_template_goes_on_with_the_text(tab, open_chat, tmp_path) -> None:
    with serving(repository_root() / "model_repository", tmp_path / "log") as gateway:
        chat = open_chat(tab, f"{gateway.url}/")
        tab.wait("document.querySelectorAll('.starter').length === 3")
        assert "import " in chat.texts(".starter")
        assert not tab.run("document.querySelector('#empty-kind').hidden")
        chat.set(max_tokens=12, seed=3, logprobs=True)
        body = chat.send("import ")
        assert (body["prompt"], body["logprobs"], body["max_tokens"]) == ("import ", 5, 12)
        assert "messages" not in body
        assert "top_logprobs" not in body
        assert "12 tokens" in chat.text(".figures")
        assert chat.count(".token") == 12
        del body["stream"], body["stream_options"]
        whole = gateway.post("/v1/completions", body).json["choices"][0]["text"]
        assert "".join(chat.texts(".answer .plain-text")) == whole


@pytest.mark.rest
def test_reasoning_is_folded_and_not_sent_back(
    tab, open_chat, gateway_repository, tmp_path
) -> None:
    options = ("--reasoning-parser", "qwen3")
    with serving(gateway_repository, tmp_path / "log", *options) as gateway:
        chat = open_chat(tab, f"{gateway.url}/")
        text = "<think>Two and two.</think>It is four."
        chat.add(structured_outputs={"regex": quoted(text)})
        chat.set(max_tokens=100)
        chat.send("2 + 2?")
        assert chat.text(".reasoning .text").strip() == "Two and two."
        assert chat.text(".answer > .text").strip() == "It is four."
        assert not tab.run("document.querySelector('.reasoning').open")
        tab.click(".reasoning summary")
        assert tab.run("document.querySelector('.reasoning').open")
        body = chat.send("Sure?")
        assert body["messages"][1] == {"role": "assistant", "content": "It is four."}


@pytest.mark.rest
def test_a_key_is_asked_for_and_kept_in_this_tab_alone(
    tab, open_chat, gateway_repository, tmp_path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("s3cret-key-of-the-test\n")
    keys.chmod(0o600)
    with serving(gateway_repository, tmp_path / "log", "--api-key-file", str(keys)) as gateway:
        chat = open_chat(tab, f"{gateway.url}/")
        tab.wait("document.querySelector('dialog[open]')")
        tab.type("wrong-key")
        tab.press("Enter")
        tab.wait("document.querySelector('#key-reason').textContent.includes('key')")
        tab.type("s3cret-key-of-the-test")
        tab.press("Enter")
        tab.wait("document.querySelector('#model').value")
        chat.set(max_tokens=4, temperature=0)
        chat.send("x = ")
        assert chat.text(".answer .text").strip()
        assert tab.run("JSON.stringify(sessionStorage)").count("s3cret") == 1
        assert "s3cret" not in tab.run("JSON.stringify(localStorage)")
        assert tab.send("Network.getCookies")["cookies"] == []
        assert "s3cret" not in tab.run("document.documentElement.outerHTML")


@pytest.mark.rest
def test_a_server_that_dies_in_mid_answer_is_reported(
    tab, open_chat, gateway_repository, tmp_path
) -> None:
    with serving(gateway_repository, tmp_path / "log") as gateway:
        chat = open_chat(tab, f"{gateway.url}/")
        chat.set(**SEVERAL)
        chat.add(ignore_eos=True)
        chat.start("class Stack:")
        tab.wait("document.querySelector('.answer .text')?.textContent.length > 5")
        gateway.process.kill()
        gateway.process.wait(120)
        tab.wait("!document.querySelector('.running')")
        assert chat.text(".turn .fault")
        assert chat.texts(".answer .text")  # what had come stays
