"""Print the table of docs/sdks.md from a report of run.py: `page.py REPORT`."""

import json
import re
import sys
from pathlib import Path

from table import TOOLS


def main() -> None:
    """Print a line for each tool of the report."""
    report = json.loads(Path(sys.argv[1]).read_bytes())
    print("| tool | version | through | checked | passed |\n|---|---|---|---|---|")
    for name in TOOLS:
        if name not in report:
            continue
        found = report[name]
        checks = [re.split(r" \(\d|: [A-Z]\w+Error", each["check"])[0] for each in found["checks"]]
        passed = sum(each["result"] == "pass" for each in found["checks"])
        shown = "; ".join(checks)
        print(
            f"| {name} | `{TOOLS[name].package}` {found['version']} | {found['what']} "
            f"| {shown} | {passed} of {len(checks)} |"
        )


if __name__ == "__main__":
    main()
