"""Write what is made from the tables of fields: `make fields`.

The tables of docs/responses.md, openai.md and tools.md, and the gateway's OpenAPI file.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from slipstream_gateway import openapi
from slipstream_gateway.dialects import openai_fields
from slipstream_gateway.dialects.messages_fields import TABLE as MESSAGES
from slipstream_gateway.dialects.responses_fields import TABLE as RESPONSES
from slipstream_gateway.parsing import strict_page

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES: Mapping[str, Mapping[str, str]] = {
    "responses.md": {"responses": RESPONSES.markdown(), "messages": MESSAGES.markdown()},
    "openai.md": {"completions": openai_fields.markdown()},
    "tools.md": {"strict": strict_page.markdown()},
}
"""Page -> the tables between its marks, by their names."""

PAGE = DOCS / "responses.md"


def written(text: str, page: str = "responses.md") -> str:
    """Return a page with its tables made anew."""
    for name, table in PAGES[page].items():
        mark = f"<!-- {name}: make fields -->\n"
        pattern = re.escape(mark) + "(.*?)<!-- end -->"
        whole = f"{mark}{table}<!-- end -->"
        text, count = re.subn(pattern, lambda _, new=whole: new, text, flags=re.S)
        assert count == 1, f"docs/{page} has no place for {name}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        path = DOCS / page
        path.write_text(written(path.read_text(), page))
    openapi.FILE.write_bytes(openapi.file_bytes())
