"""Pictures of the chat page in docs/images, by the real chat model in a real browser.

python load/screenshots.py [--url http://127.0.0.1:9000/]     what `make screenshots` runs

Without a URL it fetches the model of `make chat` and serves it for the time of the pictures.
"""

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import browser
import devtools
from slipstream_serve.server import repository_root

_ROOT = repository_root()
_IMAGES = _ROOT / "docs" / "images"
_MODEL = _ROOT / ".slipstream" / "chat"
_ANSWER_S = 300.0
_DESKTOP, _PHONE = (1280, 800), (390, 780)
_DONE = "document.querySelector('.turn:last-child') && !document.querySelector('.running')"
_STEADY = {"temperature": 0.3, "repetition_penalty": 1.1, "seed": 2, "max_tokens": 220}
# The first token, after some, at which the model was in doubt.
_DOUBTFUL = "[...document.querySelectorAll('.token:is(.p2, .p3, .p4, .p5)')]"


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Serve the chat model on a free port; yields the page's URL. Raises CalledProcessError."""
    command = [sys.executable, "-m", "slipstream_serve.chat_model", str(_MODEL)]
    subprocess.run(command, check=True)
    command = [sys.executable, "-m", "slipstream_client.cli", "gateway", "--port", "0"]
    command += ["--model-repository", str(_MODEL / "models")]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            yield next(found[1] for line in lines if (found := re.search(r"(http://\S+?/)", line)))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def fill(page: devtools.Page, **fields: object) -> None:
    """Write into the settings, by the names of the request's fields."""
    for name, value in fields.items():
        box = f"document.querySelector('[data-param=\"{name}\"]')"
        key = "checked" if isinstance(value, bool) else "value"
        page.run(f"{box}.{key} = {str(value).lower()}")
        page.run(f"{box}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def send(page: devtools.Page, text: str) -> None:
    """Send a message and wait for its answers."""
    page.run("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter")
    page.wait(_DONE, _ANSWER_S)
    if fault := page.run("document.querySelector('.turn:last-child .fault').textContent"):
        raise devtools.PageError(fault)


def both(page: devtools.Page, name: str) -> None:
    """Write the picture in light and in dark."""
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        page.run("new Promise(done => setTimeout(done, 400))")  # transitions
        page.screenshot(_IMAGES / f"{name}-{scheme}.png")


def take(page: devtools.Page, url: str) -> None:
    """Take all pictures."""
    page.prefer("light")
    page.resize(*_DESKTOP)
    page.open(url)
    page.wait("fetch('health').then(({ ok }) => ok)", _ANSWER_S)
    page.open(url)
    page.wait("document.querySelector('#model').value")
    both(page, "start")
    fill(page, **_STEADY)
    send(page, "Give me three tips for better sleep.")
    send(page, "What is the capital of France?")
    page.click("#open-settings")
    page.run("document.activeElement.blur()")
    both(page, "chat")
    page.click("#close-settings")
    page.resize(*_PHONE, is_phone=True)
    page.run("document.querySelector('#scroller').scrollTop = 0")
    both(page, "phone")
    page.resize(*_DESKTOP)
    page.press("Control+k")
    fill(page, logprobs=True, n=2, temperature=0.6, top_p=0.95, max_tokens=90)
    send(page, "What is the capital of France, and what is it known for?")
    page.run(f"({_DOUBTFUL}[4] ?? document.querySelector('.token')).focus()")
    both(page, "tokens")


def main() -> int:
    """Write the pictures and return 0, or the reason and 1."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--url", help="the page of a running server (default: serve the chat model)"
    )
    url = parser.parse_args().url
    _IMAGES.mkdir(exist_ok=True)
    try:
        with (
            contextlib.nullcontext(url) if url else served() as address,
            devtools.Chromium() as chromium,
            chromium.page() as page,
        ):
            take(page, address)
    except (browser.BrowserError, devtools.PageError, subprocess.CalledProcessError) as error:
        print(f"screenshots: {error}", file=sys.stderr)
        return 1
    for path in sorted(_IMAGES.glob("*.png")):
        print(f"{path.relative_to(_ROOT)}: {path.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
