"""Write the tables of docs/families.md, and the file that it shows, from the families."""

from pathlib import Path

from slipstream.models.families_page import written
from slipstream.runner import served_page

PAGE = Path(__file__).parents[1] / "docs" / "families.md"

if __name__ == "__main__":
    page = served_page.written(written(PAGE.read_text(encoding="utf-8")))
    PAGE.write_text(page, encoding="utf-8")
