"""Give bytes of Bochs' AMX products the signs that Intel's manual gives them: `signs.py amx.cc`.

Commit 783b58fd of Bochs multiplies bytes of all four products as if they had no sign.
"""

import re
import sys
from pathlib import Path

_SIGNED = {"DPBDSS": "xy", "DPBDSU": "x", "DPBDUS": "y"}  # the function of a product -> operands


def mended(text: str) -> str:
    """Return the source with signed operands; the same if they are."""
    for name, operands in _SIGNED.items():
        start = text.index(f"Bit32u {name}(Bit32u x")
        end = text.index("\n}\n", start)
        body = text[start:end]
        for operand in operands:
            body = re.sub(rf"Bit32[su]\(({operand}byte\[\d\])\)", r"Bit32s(Bit8s(\1))", body)
        text = text[:start] + body + text[end:]
    return text


def main() -> int:
    """Command line."""
    path = Path(sys.argv[1])
    before = path.read_text()
    after = mended(before)
    path.write_text(after)
    print("signs of AMX's bytes mended" if after != before else "nothing to mend", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
