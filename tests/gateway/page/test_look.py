"""What the page looks like: dark and light, contrast, widths, names for screen readers."""

import socket

import pytest

PAIRS = [
    *(("--text", "--back"), ("--text", "--raised"), ("--text", "--soft"), ("--muted", "--back")),
    *(("--muted", "--raised"), ("--accent", "--back"), ("--accent", "--raised")),
    *(("--on-accent", "--accent"), ("--bad", "--bad-back"), ("--bad", "--raised")),
]
CONTRAST = """(pairs => {
  const probe = document.body.appendChild(document.createElement("i"));
  const light = colour => {
    probe.style.color = colour;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number)
      .map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const found = pairs.map(([a, b]) => ratio(light(`var(${a})`), light(`var(${b})`)));
  for (const level of [1, 2, 3, 4, 5]) {
    const token = document.body.appendChild(document.createElement("span"));
    token.className = `token p${level}`;
    found.push(ratio(light(getComputedStyle(token).backgroundColor), light("var(--text)")));
    token.remove();
  }
  probe.remove();
  return found;
})(%s)"""
NAMELESS = ("button", "textbox", "combobox", "checkbox", "link", "dialog")


@pytest.fixture
def page(tab, static_url):
    tab.open(static_url)
    tab.wait("document.querySelector('#empty .fault')")  # it serves no models
    return tab


def background(tab) -> str:
    return tab.run("getComputedStyle(document.body).backgroundColor")


def test_dark_and_light_follow_the_system_and_the_switch(page, static_url) -> None:
    page.prefer("light")
    light = background(page)
    page.prefer("dark")
    dark = background(page)
    assert light != dark
    page.click("#theme")
    assert background(page) == light
    page.click("#theme")
    page.prefer("light")
    assert background(page) == dark
    page.open("about:blank")
    page.open(static_url)
    assert background(page) == dark
    page.click("#theme")
    assert background(page) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(page, scheme: str) -> None:
    page.prefer(scheme)
    ratios = page.run(CONTRAST % str([list(pair) for pair in PAIRS]))
    for name, ratio in zip([*PAIRS, 1, 2, 3, 4, 5], ratios, strict=True):
        assert ratio >= 4.5, name


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_window(page, width: int) -> None:
    page.resize(width, 700, is_phone=width < 500)
    broader = """[...document.querySelectorAll('body *')].filter(one => {
      const box = one.getBoundingClientRect();
      return box.width && !one.closest('.unseen') && box.right > innerWidth + 1;
    }).map(one => one.outerHTML.slice(0, 80))"""
    assert page.run(broader) == []
    page.click("#open-settings")
    assert page.run(broader) == []
    page.press("Escape")
    assert page.run("document.querySelector('#settings').hidden")


def test_all_controls_have_names(page) -> None:
    page.resize(1280, 800)
    page.click("#open-settings")
    page.send("Accessibility.enable")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    controls = [one for one in nodes if one.get("role", {}).get("value") in NAMELESS]
    assert len(controls) > 20
    for one in controls:
        assert one.get("name", {}).get("value"), one


def test_a_server_without_models_is_reported(page) -> None:
    assert "No models" in page.run("document.querySelector('#empty .fault').textContent")


def test_a_broken_rule_of_content_is_a_fault_of_a_page(chromium, static_url) -> None:
    with chromium.page() as page:
        page.open(static_url)
        page.run("document.body.setAttribute('style', 'color: red')")
        page.run("0")
        assert any("style-src" in fault or "ContentSecurity" in fault for fault in page.faults)


def test_a_browser_that_closes_its_connection_between_tests_is_seen(browsers, chromium) -> None:
    """Nothing reads the connection then; the next test gets another browser."""
    assert not chromium.has_ended
    chromium._socket.get_extra_info("socket").shutdown(socket.SHUT_RD)
    assert chromium._process.poll() is None
    assert chromium.has_ended
