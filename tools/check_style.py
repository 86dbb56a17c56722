"""Check what linters cannot: sizes, words, docstring openings, and who may name or import what.

    python tools/check_style.py            fail where a folder has more findings than its baseline
    python tools/check_style.py --write    write the baseline anew, unless a rule's total would rise

`tools/style_baseline.json` holds how many findings each folder still has of a rule; a folder or
rule that it does not name has none. Write it anew after findings were removed or files moved.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_name("style_baseline.json")
PRODUCT = ("backend", "client", "ensemble", "gateway", "preprocessing", "postprocessing")
SIZED = (*PRODUCT, "training", "load", "benchmarks", "tests", "tools")
WITHOUT_FAMILIES = tuple(
    f"backend/slipstream/{name}/"
    for name in ("bridge", "core", "engine", "fuse", "kvcache", "quant", "runner")
)
MODELS = "backend/slipstream/models"

PERSONS = r"(?<!users )(?<!user )(?<!operators )(?<!operator )(?<!person )(?<!people )(?<!reader )"


@dataclass(frozen=True)
class Rule:
    """A pattern that prose or names must not match, and what to write instead."""

    name: str
    pattern: re.Pattern[str]
    instead: str


OPENING = Rule(
    "opening",
    re.compile(r"(Of|It|Its|Those|One|Ones|Likewise|Who|Whose|Whoever|As|So many|The same)\b"),
    "open a docstring with a verb or a noun",
)
WORDS = (
    Rule(
        "who",
        re.compile(rf"\b{PERSONS}who(m|ever|mever)?\b", re.IGNORECASE),
        "things are `it`, `which` or `that`",
    ),
    Rule(
        "told",
        re.compile(r"\b(is|are|was|were|be|been|being) (told|asked)\b|\blet(s|ting)? go\b", re.I),
        "things are reported, requested, released",
    ),
    Rule("products", re.compile(r"\bproducts\b", re.IGNORECASE), "GEMMs"),
    Rule("draws", re.compile(r"\b(draws|drawn)\b", re.IGNORECASE), "samples, sampled"),
)
VERB = Rule(
    "verb",
    re.compile(r"_*(begin|tell|forget)(_\w+)?"),
    "start; report; release, evict, disconnect or unwatch",
)
SIZE = Rule("size", re.compile(r"_*(is_)?(wide|few)(_\w+)?"), "skinny GEMM, small M")
FAMILY = Rule("family", re.compile(""), "ask the model for a property: only models/ names families")
IMPORT = Rule("test import", re.compile(""), "put what tests share into tests/fixtures")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 60
FILE = Rule("file", re.compile(""), f"split it: at most {MAX_FILE_LINES} lines")
FUNCTION = Rule("function", re.compile(""), f"split it: at most {MAX_FUNCTION_LINES} lines")
NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*""",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Finding:
    """A line that breaks a rule."""

    rule: Rule
    path: str
    line: int
    text: str

    @property
    def folder(self) -> str:
        """The folder that the baseline counts it in."""
        return self.path.rpartition("/")[0]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule.name}: {self.text!r}: {self.rule.instead}"


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a module's statements at all depths, and the module; expressions are passed over."""
    yield tree
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for part in getattr(tree, name, ()):
            yield from statements(part)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in statements(tree):
        if isinstance(node, holders) and (text := ast.get_docstring(node, clean=False)) is not None:
            yield node.body[0].lineno, text


def python_prose(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every line of a docstring and every comment."""
    for first, text in docstrings(tree):
        yield from enumerate(text.splitlines(), first)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def cuda_prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment in CUDA source."""
    for number, line in enumerate(source.splitlines(), 1):
        if (found := re.search(r"//.*|^\s*\*.*|/\*.*", line)) is not None:
            yield number, found[0]


def defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every function and class."""
    for node in statements(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every module, and of what is taken from it, that is imported."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names)


def families(root: Path) -> re.Pattern[str]:
    """Return a pattern of the names of model families that models/ has architectures of."""
    text = "".join(path.read_text() for path in sorted((root / MODELS).rglob("*.py")))
    found = re.findall(r"\b([A-Z][A-Za-z]+)\d*\w*?For(?:CausalLM|ConditionalGeneration)", text)
    names = {re.sub(r"\d.*", "", name) for name in found}
    # Names of three letters are parts of words, too.
    parts = [f"(?<![a-z]){name}(?![a-z])" if len(name) < 4 else name for name in sorted(names)]
    return re.compile("|".join(parts) or "(?!)", re.IGNORECASE)


def in_product(path: str, source: str) -> Iterator[Finding]:
    """Yield what a file of the product breaks of words, openings and names."""
    if not path.endswith(".py"):
        prose = list(cuda_prose(source))
    else:
        tree = ast.parse(source)
        prose = list(python_prose(source, tree))
        for line, text in docstrings(tree):
            if OPENING.pattern.match(text.lstrip()):
                yield Finding(OPENING, path, line, text.strip().splitlines()[0][:40])
        for line, name in defined(tree):
            for rule in (VERB, SIZE):
                if rule.pattern.fullmatch(name):
                    yield Finding(rule, path, line, name)
    stem = path.rpartition("/")[2].partition(".")[0]
    if SIZE.pattern.fullmatch(stem):
        yield Finding(SIZE, path, 1, stem)
    for line, text in prose:
        for rule in WORDS:
            yield from (Finding(rule, path, line, m[0]) for m in rule.pattern.finditer(text))


def python_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """Yield line, name and number of lines of every function, without its decorators."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def cuda_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """Yield line, name and number of lines of every function in CUDA source.

    A function's body is a brace after a head with parentheses; those in a body are its own.
    """
    code = NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
    depth, body = 0, 0  # of braces; that of the function's body, 0 outside functions
    start, name, head = 0, "", 0  # of the function; offset at which the next head starts
    for found in re.finditer(r"[{};]", code):
        if found[0] == "{":
            depth += 1
            text = code[head : found.start()]
            named = re.search(r"\b(?!__)([\w~]+|operator\W+?)\s*\(", text)
            if not body and named is not None and not re.match(r"\s*(struct|union|enum)\b", text):
                start = head + len(text) - len(text.lstrip())
                body, name = depth, named[1]
        elif found[0] == "}":
            if depth == body:
                line = code.count("\n", 0, start) + 1
                yield line, name, code.count("\n", start, found.start()) + 1
                body = 0
            depth -= 1
        head = found.end()


def too_long(path: str, source: str) -> Iterator[Finding]:
    """Yield a finding for a file that is too long, and one for each such function in it."""
    if (size := len(source.splitlines())) > MAX_FILE_LINES:
        yield Finding(FILE, path, 1, f"{size} lines")
    functions = python_functions if path.endswith(".py") else cuda_functions
    for line, name, size in functions(source):
        if size > MAX_FUNCTION_LINES:
            yield Finding(FUNCTION, path, line, f"{name}: {size} lines")


def sources(root: Path, top: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of every source file under a folder."""
    for file in sorted((root / top).rglob("*")):
        path = file.relative_to(root).as_posix()
        if file.suffix in (".py", ".cu", ".cuh") and "__pycache__" not in path:
            yield path, file.read_text()


def findings(root: Path) -> list[Finding]:
    """Return all findings in a checkout, by file and line."""
    result: list[Finding] = []
    family = families(root)
    for top in SIZED:
        for path, source in sources(root, top):
            result += too_long(path, source)
            if top in PRODUCT:
                result += in_product(path, source)
            if path.startswith(WITHOUT_FAMILIES):
                lines = enumerate(source.splitlines(), 1)
                result += [
                    Finding(FAMILY, path, n, m[0])
                    for n, text in lines
                    if (m := family.search(text))
                ]
            if top == "tests" and path.rpartition("/")[2].startswith("test_"):
                for line, name in imported(ast.parse(source)):
                    if any(part.startswith("test_") for part in name.split(".")):
                        result.append(Finding(IMPORT, path, line, name))
    return sorted(result, key=lambda one: (one.path, one.line, one.rule.name))


Baseline = dict[str, dict[str, int]]


def counted(found: Iterable[Finding]) -> Baseline:
    """Return folder -> rule -> findings."""
    counts = Counter((one.folder, one.rule.name) for one in found)
    result: Baseline = {}
    for (folder, rule), count in sorted(counts.items()):
        result.setdefault(folder, {})[rule] = count
    return result


def excess(found: list[Finding], allowed: Baseline) -> Iterator[str]:
    """Yield the lines of a report on each folder and rule with more findings than are allowed."""
    for folder, rules in counted(found).items():
        for rule, count in rules.items():
            limit = allowed.get(folder, {}).get(rule, 0)
            if count > limit:
                yield f"{folder}: {rule}: {count} findings, {limit} allowed; new ones are among"
                yield from (
                    f"  {one}" for one in found if (one.folder, one.rule.name) == (folder, rule)
                )


def totals(baseline: Baseline) -> Counter[str]:
    """Return rule -> findings of all folders."""
    result: Counter[str] = Counter()
    for rules in baseline.values():
        result.update(rules)
    return result


def main() -> int:
    """Check, or write the baseline; the exit code."""
    parser = argparse.ArgumentParser(
        description="Check sizes, words, openings, families, test imports."
    )
    parser.add_argument("--write", action="store_true", help="write the baseline anew")
    arguments = parser.parse_args()
    found = findings(ROOT)
    allowed = json.loads(BASELINE.read_text()) if BASELINE.is_file() else counted(found)
    if not arguments.write:
        report = list(excess(found, allowed))
        print("\n".join(report), end="\n" if report else "", file=sys.stderr)
        return 1 if report else 0
    now, before = totals(counted(found)), totals(allowed)
    if more := [
        f"{rule}: {now[rule]}, not {before[rule]}" for rule in now if now[rule] > before[rule]
    ]:
        print(f"the baseline only falls: {'; '.join(more)}", file=sys.stderr)
        return 1
    BASELINE.write_text(json.dumps(counted(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
