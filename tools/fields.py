"""Write the tables of fields into docs/responses.md: `make fields`."""

import re
from collections.abc import Mapping
from pathlib import Path

from slipstream_gateway.dialects.fields import Table, markdown
from slipstream_gateway.dialects.messages_fields import TABLE as MESSAGES
from slipstream_gateway.dialects.responses_fields import TABLE as RESPONSES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "responses.md"
TABLES: Mapping[str, Table] = {"responses": RESPONSES, "messages": MESSAGES}


def written(text: str) -> str:
    """Return the page with its tables made anew."""
    for name, table in TABLES.items():
        mark = f"<!-- {name}: make fields -->\n"
        pattern = re.escape(mark) + "(.*?)<!-- end -->"
        text, count = re.subn(
            pattern, lambda _, m=mark, t=table: f"{m}{markdown(t)}<!-- end -->", text, flags=re.S
        )
        assert count == 1, f"docs/responses.md has no place for {name}"
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
