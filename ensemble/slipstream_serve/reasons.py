"""Why a tritonserver could not start, from its log."""

from __future__ import annotations

import re

# The log quotes a message like JSON; the reason ends before the traceback, which starts with \\n.
_LOAD_FAILURE = re.compile(
    r"failed to load '(?P<model>[^']*)' version \d+: [\w ]+: (?:\w+(?:Error|Exception): )?"
    r'(?P<reason>(?:(?!\\n)[^\n])*?)(?:\\n|"?\n|"?$)'
)
# A config.pbtxt that cannot be read, which names its model; then one that does not fit others.
_CONFIG_FAILURE = re.compile(
    r"^E\d{4} .* model_repository_manager\.cc:\d+\] \""
    r"(?:Poll failed for model directory '(?P<model>[^']*)': |Invalid argument: )"
    r'(?P<reason>.*?)"?$',
    re.MULTILINE,
)


def reason_of(log: str) -> str | None:
    """Return why the first model could not be loaded, in one line; None: the log says nothing."""
    if found := _LOAD_FAILURE.search(log):
        return f"{found['model']}: {found['reason']}"
    if found := _CONFIG_FAILURE.search(log):
        model = f"{found['model']}/config.pbtxt: " if found["model"] else ""
        return f"{model}{found['reason']}; `slipstream compose` writes it anew"
    return None
