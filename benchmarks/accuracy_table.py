"""The table of accuracy.py, and its goals."""

from typing import Any, NamedTuple

from quality import ROOT

PAGE = ROOT / "docs" / "quantization.md"
BEGIN, END = "<!-- table: make accuracy -->", "<!-- end of the table of accuracy -->"
GOALS = {"int8": 0.001, "fp8": 0.003, "fp8-gptq-rows16": 0.003}  # at most so much more bits
BEST, PLAIN = "awq-gptq", "int4-plain"
HALF, HALF_OF = 0.5, "awq-gptq, half of plain rounding"  # to 4 bits
TITLES = {PLAIN: "int4, ranges that hold all", "fp8-gptq-rows16": "fp8-gptq, `--rows16 auto`"}
CACHES = {"auto": "", "fp8": "fp8", "int8": "int8", "int4": "int4"}


class Goal(NamedTuple):
    """What a row of a model may cost at most, and does, in parts of the bits a byte in 16 bits."""

    title: str
    row: str
    most: float
    found: dict[str, Any]

    @property
    def is_missed(self) -> bool:
        """Return whether it costs more; the error is not counted for either side."""
        return bool(self.found["more"] > self.most)


def goals(model: dict[str, Any]) -> list[Goal]:
    """Return the goals of the rows that are measured."""
    rows = {
        row: each["caches"]["auto"]
        for row, each in model["rows"].items()
        if "auto" in each["caches"]
    }
    wanted = [(row, row, most) for row, most in GOALS.items()]
    wanted.append((BEST, BEST, model["goal_w4"]))
    if PLAIN in rows:
        wanted.append((HALF_OF, BEST, HALF * rows[PLAIN]["more"]))
    return [Goal(title, row, most, rows[row]) for title, row, most in wanted if row in rows]


def missed(result: dict[str, Any]) -> list[str]:
    """Return a line for each goal that a measured row misses."""
    return [
        f"{name}: {goal.title} costs {goal.found['more']:+.2%}, the goal is {goal.most:+.2%}"
        for name, model in result["models"].items()
        for goal in goals(model)
        if goal.is_missed
    ]


def table(result: dict[str, Any]) -> str:
    """Format the goals and all models as markdown."""
    models = result["models"]
    return "\n\n".join([_goals(models), *(_model(name, each) for name, each in models.items())])


def _goals(models: dict[str, Any]) -> str:
    titles = [*GOALS, BEST, HALF_OF]
    lines = [f"| at most | {' | '.join(titles)} |", f"|---{'|---' * len(titles)}|"]
    for model in models.values():
        cells = dict.fromkeys(titles, "-")
        for goal in goals(model):
            cell = f"{_more(goal.found, False)} of {goal.most:+.2%}"
            cells[goal.title] = f"**{cell}**" if goal.is_missed else cell
        name = model["note"].split()[0].rstrip(",")
        lines.append(f"| {name} | {' | '.join(cells.values())} |")
    return "\n".join(lines)


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
