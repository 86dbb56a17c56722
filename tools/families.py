"""Write the table of docs/families.md, and the file that it shows, from the families."""

from pathlib import Path

from slipstream.models.families_page import written

PAGE = Path(__file__).parents[1] / "docs" / "families.md"

if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
