"""No data that comes in is ever run: none of our code can turn bytes into objects or code.

The rule is about our own modules, all that are installed and all that Triton loads. Libraries
import `pickle` for uses of their own; that none of them uses it while we serve is seen from within
a running engine, in `server/test_exposure.py`.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream_serve.server import repository_root

ROOT = repository_root()
MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("yaml", "multiprocessing", "code", "codeop", "pty", "telnetlib", "xmlrpc", "imp"),
}
CALLS = {
    *("eval", "exec", "compile", "__import__", "breakpoint"),
    *("builtins.eval", "builtins.exec", "builtins.compile"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("asyncio.create_subprocess_shell", "pty.spawn", "runpy.run_path", "runpy.run_module"),
    *("torch.load", "torch.jit.load", "torch.package", "torch.hub.load", "torch.compile"),
    *("numpy.load", "concurrent.futures.ProcessPoolExecutor"),
}
UNSANDBOXED = {"jinja2.Environment", "jinja2.Template"}  # as annotations they do no harm
METHODS = {"recv_pyobj", "send_pyobj"}  # pyzmq's, by pickle
FALSE_ONLY = {"shell", "allow_pickle", "trust_remote_code"}


def sources() -> list[Path]:
    """Every module of our packages, and what Triton loads by path."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    roots = [ROOT / path for path in tool["package-dir"].values()]
    files = [file for root in roots for file in root.rglob("*.py")]
    return files + [
        root.parent / "model.py" for root in roots if (root.parent / "model.py").is_file()
    ]


def names_of(tree: ast.AST) -> dict[str, str]:
    """Local name -> what was imported by it, in full."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """`a.b.c` with what `a` was imported as; empty for other expressions."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, names)
        return f"{before}.{node.attr}" if before else ""
    return ""


def faults(text: str) -> Iterator[str]:
    """What the source does that it must not, with its line."""
    tree = ast.parse(text)
    names = names_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            whole = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            of = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
            for name in [*whole, of or ""]:
                if name.split(".")[0] in MODULES:
                    yield f"{node.lineno}: import of {name}"
        if isinstance(node, ast.Name | ast.Attribute):  # also where it is passed on uncalled
            name = dotted(node, names)
            if name in CALLS:
                yield f"{node.lineno}: {name}"
            if isinstance(node, ast.Attribute) and node.attr in METHODS:
                yield f"{node.lineno}: {node.attr}"
        if isinstance(node, ast.keyword) and node.arg in FALSE_ONLY and not is_false(node.value):
            yield f"{node.lineno}: {node.arg}"
        if isinstance(node, ast.Call):
            name = dotted(node.func, names)
            if name == "importlib.import_module":
                yield f"{node.lineno}: import_module({ast.unparse(node.args[0])})"
            if name in UNSANDBOXED:
                yield f"{node.lineno}: {name}"


def is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


# Modules by names of our own tables, never by what a request or a checkpoint says.
OWN_TABLES = {
    "slipstream_client/cli.py": {"module", "COMMANDS[args.command][0]"},
    "slipstream_client/__init__.py": {"_MODULES[name]"},
    "slipstream/kernels/runtime/registry.py": {"package", "module"},
    "slipstream/quant/__init__.py": {"f'{__name__}.{name}'"},  # one of its own names
    "slipstream/core/processors.py": {"module"},  # an operator's option, loaded at start
    "slipstream/models/registry.py": {"f'{families.__name__}.{module.name}'"},
}
# `slipstream convert`, offline, by torch's loader of weights alone.
TENSORS_ONLY = ROOT / "backend/slipstream_convert/pickles.py"


def test_our_code_makes_neither_objects_nor_code_of_data():
    found = []
    files = sources()
    assert len(files) > 100
    assert any(file.name == "model.py" and file.parent.name == "backend" for file in files)
    for file in files:
        allowed = next((own for end, own in OWN_TABLES.items() if str(file).endswith(end)), set())
        lines = {f"import_module({name})" for name in allowed}
        lines |= {"torch.load"} if file == TENSORS_ONLY else set()
        found += [
            f"{file.relative_to(ROOT)}:{fault}"
            for fault in faults(file.read_text())
            if fault.partition(": ")[2] not in lines
        ]
    assert found == []


def test_pickles_are_read_as_tensors_alone():
    calls = [
        {word.arg: ast.unparse(word.value) for word in node.keywords}
        for node in ast.walk(ast.parse(TENSORS_ONLY.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert [call.get("weights_only") for call in calls] == ["True"]
    assert TENSORS_ONLY.read_text().count("torch.load") == 1


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from multiprocessing import Pool",
        "import yaml",
        "import marshal, os",
        "def f():\n    import shelve",
        "eval('1')",
        "exec(compile('', '', 'exec'))",
        "list(map(eval, texts))",
        "import os\nos.system('ls')",
        "from os import system as s\ns('ls')",
        "import os as o\no.popen('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run('ls', shell=is_shell)",
        "import torch\ntorch.load('x')",
        "from torch import load\nload('x')",
        "import torch as t\nt.load('x', weights_only=True)",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.save('x', a, allow_pickle=True)",
        "socket.recv_pyobj()",
        "from jinja2 import Environment\nEnvironment()",
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module\nimport_module(request.module)",
        "AutoTokenizer.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_the_rule_sees_it(text):
    assert list(faults(text))


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "import re\nre.compile('x')",
        "AutoTokenizer.from_pretrained(x, trust_remote_code=False)",
        "import subprocess\nsubprocess.run(['ls'])",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment",
        "x.load(y)",
    ],
)
def test_the_rule_leaves_other_things_alone(text):
    assert not list(faults(text))


# --- what Triton's processes import ---------------------------------------------------------------

ENTRIES = ("backend/model.py", "preprocessing/model.py", "postprocessing/model.py")
LIBRARIES = {"jinja2", "msgspec", "numpy", "tokenizers", "triton_python_backend_utils", "zmq"}


def imports_of(path: Path, package: str) -> set[str]:
    """Modules that are imported anywhere in it, and names from them, which may be modules too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, [above, node.module]))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def closure(entry: Path) -> tuple[set[Path], set[str]]:
    """Our own files that are imported from there on, and the top names of what is not ours."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {name: ROOT / path for name, path in tool["package-dir"].items()}
    files, others = set(), set()
    todo = [(entry, "")]
    while todo:
        file, package = todo.pop()
        if file in files:
            continue
        files.add(file)
        for name in imports_of(file, package):
            top, *rest = name.split(".")
            if top not in packages:
                others.add(top)
                continue
            for number in range(len(rest) + 1):  # a module is imported with all above it
                place = packages[top].joinpath(*rest[:number])
                own, within = ".".join([top, *rest[:number]]), place / "__init__.py"
                if within.is_file():
                    todo.append((within, own))
                elif (module := place.with_suffix(".py")).is_file():
                    todo.append((module, own.rpartition(".")[0]))
    return files, others


@pytest.mark.parametrize("entry", ENTRIES)
def test_nothing_that_a_process_of_triton_imports_makes_objects_or_code_of_data(entry):
    files, others = closure(ROOT / entry)
    assert len(files) > 10
    assert files <= set(sources())
    assert [(file, fault) for file in sorted(files) for fault in faults(file.read_text())] == []
    assert others <= LIBRARIES | sys.stdlib_module_names - MODULES


def test_the_closure_is_followed_through_packages_and_into_functions():
    files, others = closure(ROOT / "backend/model.py")
    names = {str(file.relative_to(ROOT)) for file in files}
    for each in ("backend/slipstream/bridge/vllm.py", "backend/slipstream/wire.py"):
        assert each in names
    assert {"zmq", "numpy", "msgspec"} <= others
    assert "torch" in closure(ROOT / "backend/slipstream/engine/process.py")[1]  # in a function
