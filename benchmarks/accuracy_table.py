"""The table of accuracy.py, and its goals."""

from typing import Any

from quality import ROOT

PAGE = ROOT / "docs" / "quantization.md"
BEGIN, END = "<!-- table: make accuracy -->", "<!-- end of the table of accuracy -->"
GOALS = {"int8": 0.001, "fp8": 0.003}  # of bits a byte, at most so much more
BEST, PLAIN = "awq-gptq", "int4-plain"
HALF = 0.5  # of what plain rounding to 4 bits loses
TITLES = {PLAIN: "int4, ranges that hold all"}
CACHES = {"auto": "", "fp8": "fp8", "int8": "int8", "int4": "int4"}


def missed(result: dict[str, Any]) -> list[str]:
    """Return a line for each goal that a measured row misses."""
    lines = []
    for name, model in result["models"].items():
        rows = {
            row: each["caches"]["auto"]["more"]
            for row, each in model["rows"].items()
            if "auto" in each["caches"]
        }
        goals = {row: most for row, most in GOALS.items() if row in rows}
        if BEST in rows:
            goals[BEST] = model["goal_w4"]
            if PLAIN in rows:
                goals[BEST] = min(goals[BEST], HALF * rows[PLAIN])
        lines += [
            f"{name}: {row} needs {rows[row]:+.2%}, the goal is {most:+.2%}"
            for row, most in goals.items()
            if rows[row] > most
        ]
    return lines


def table(result: dict[str, Any]) -> str:
    """Format all models as markdown."""
    return "\n\n".join(_model(name, each) for name, each in result["models"].items())


def _model(name: str, model: dict[str, Any]) -> str:
    lines = [
        f"**{model['note']}** ({model['tokens']:,} tokens, {model['bytes']:,} bytes)",
        "",
        "| weights | bits a byte | | cache fp8, KL | int8 | int4 | KL, nats | greedy: same "
        "| first other | MMLU | changed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, each in model["rows"].items():
        auto = each["caches"]["auto"]
        more = [_more(each["caches"].get(cache), cache != "auto") for cache in CACHES]
        if row == "16 bits":
            more[0] = ""
        mmlu = each.get("mmlu")
        asked = " | "
        if mmlu:
            change = f" {mmlu['changed']:.1%}"
            asked = f"{mmlu['right']:.1%} ± {mmlu['right_error']:.1%} |{change}"
        greedy = f"{auto['greedy_same']:.1%} | {auto['greedy_first']:.0f}"
        bits = f"{auto['bits_per_byte']:.4f} | {' | '.join(more)} | {auto['kl']:.5f}"
        lines.append(f"| {TITLES.get(row, row)} | {bits} | {greedy} | {asked} |")
    return "\n".join(lines)


def _more(cache: dict[str, float] | None, has_kl: bool) -> str:
    if cache is None:
        return "-"
    kl = f", {cache['kl']:.4f}" if has_kl and "kl" in cache else ""
    return f"{cache['more']:+.2%} ± {cache['more_error']:.2%}{kl}"


def write_table(result: dict[str, Any]) -> str:
    """Put the table into the page; return it."""
    text, page = table(result), PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{rest[rest.index(END) :]}")
    return text
