"""tools/check_style.py finds what is planted, and its baseline only falls."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from slipstream_serve.server import repository_root

ENGINE = "backend/slipstream/engine/loop.py"
KERNEL = "backend/slipstream/kernels/gemm/x.cu"
LONG_KERNEL = "#if 1  // {\nstruct A {\n  int f(int x) {\n" + "  {}\n" * 59 + "}\n};"
FAMILY_FILE = 'ARCHITECTURES = {"Llama4ForCausalLM": 1, "Qwen3MoeForCausalLM": 2}\n'


@pytest.fixture(scope="module")
def style() -> ModuleType:
    path = repository_root() / "tools" / "check_style.py"
    spec = importlib.util.spec_from_file_location("check_style", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_style"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def plant(root: Path, path: str, source: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(source)


@pytest.mark.parametrize(
    ("path", "source", "rule", "line"),
    [
        (ENGINE, '"""Of a request."""\n', "opening", 1),
        (ENGINE, '"""Loop."""\n\n\ndef f():\n    """Those that wait."""\n', "opening", 5),
        (ENGINE, '"""Loop.\n\nA step who waits.\n"""\n', "who", 3),
        (ENGINE, "x = 1  # whoever is last\n", "who", 1),
        (ENGINE, "x = 1\n# the engine is told\n", "told", 2),
        (ENGINE, "# blocks are let go\n", "told", 1),
        (ENGINE, "# matrix products\n", "products", 1),
        (ENGINE, "# tokens that a row draws\n", "draws", 1),
        (ENGINE, "class A:\n    def begin_step(self): ...\n", "verb", 2),
        (ENGINE, "def _tell(): ...\n", "verb", 1),
        (ENGINE, "def is_wide(): ...\n", "size", 1),
        ("backend/slipstream/kernels/wide.py", "", "size", 1),
        (ENGINE, "if name == 'qwen3': ...\n", "family", 1),
        (KERNEL, "int x;\n/* whoever is last\n */\n", "who", 2),
        (ENGINE, "x = 1\n" * 451, "file", 1),
        ("tests/engine/test_a.py", "@mark\ndef f():\n" + "    x = 1\n" * 60, "function", 2),
        (KERNEL, LONG_KERNEL, "function", 3),
        ("tests/engine/test_a.py", "from engine.test_b import c\n", "test import", 1),
        ("tests/engine/test_a.py", "import test_b\n", "test import", 1),
    ],
)
def test_what_is_planted_is_found(style, tmp_path, path, source, rule, line) -> None:
    plant(tmp_path, "backend/slipstream/models/families/llama.py", FAMILY_FILE)
    plant(tmp_path, path, source)
    found = [(one.rule.name, one.path, one.line) for one in style.findings(tmp_path)]
    assert found == [(rule, path, line)]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (ENGINE, '"""Return the block whose users who wait are few; Often one, of a request."""\n'),
        (ENGINE, "message = 'who is told of products'\n"),
        (ENGINE, "def start(): ...\n\n\ndef widest(): ...\n"),
        ("backend/slipstream/models/families/qwen.py", "# Llama and Qwen3\n"),
        (KERNEL, "int who = products;\n"),
        (ENGINE, "x = 1\n" * 450),
        (ENGINE, "@mark\ndef f():\n" + "    x = 1\n" * 59),
        (KERNEL, "void f() {\n" + "  //  }\n" * 58 + "}\nvoid g() {\n" + "  x();\n" * 58 + "}\n"),
        (
            KERNEL,
            "struct A {\n" + "  int f();\n" * 90 + "};\nint a[] = {\n" + "  1,\n" * 90 + "};\n",
        ),
        ("tests/engine/test_a.py", '"""Of a test."""\nfrom fixtures.crashes import b\n'),
    ],
)
def test_what_is_right_is_not_found(style, tmp_path, path, source) -> None:
    plant(tmp_path, "backend/slipstream/models/families/llama.py", FAMILY_FILE)
    plant(tmp_path, path, source)
    assert style.findings(tmp_path) == []


def test_a_folder_may_have_what_the_baseline_says(style, tmp_path) -> None:
    plant(tmp_path, ENGINE, "# whoever\n# whoever\n")
    found = style.findings(tmp_path)
    folder = ENGINE.rpartition("/")[0]
    assert list(style.excess(found, {folder: {"who": 2}})) == []
    report = list(style.excess(found, {folder: {"who": 1}}))
    assert report[0].startswith(f"{folder}: who: 2 findings, 1 allowed")
    assert len(report) == 3
    assert list(style.excess(found, {"elsewhere": {"who": 2}}))


def test_the_baseline_only_falls(style, tmp_path, monkeypatch, capsys) -> None:
    baseline = tmp_path / "baseline.json"
    monkeypatch.setattr(style, "ROOT", tmp_path)
    monkeypatch.setattr(style, "BASELINE", baseline)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["check_style.py", *words])
        return style.main()

    plant(tmp_path, ENGINE, "# whoever\n# whoever\n")
    assert run("--write") == 0
    assert run() == 0
    plant(tmp_path, ENGINE, "# whoever\n")
    plant(tmp_path, "backend/slipstream/core/batch.py", "# whoever\n")
    assert run() == 1  # a finding moved: the other folder has none in the baseline
    assert "backend/slipstream/core/batch.py:1: who: 'whoever'" in capsys.readouterr().err
    assert run("--write") == 0
    assert run() == 0
    plant(tmp_path, ENGINE, "# whoever, whoever\n")
    before = baseline.read_text()
    assert run("--write") == 1
    assert "the baseline only falls: who: 3, not 2" in capsys.readouterr().err
    assert baseline.read_text() == before


@pytest.mark.rest
def test_the_baseline_is_no_higher_than_it_must_be(style) -> None:
    allowed = json.loads(style.BASELINE.read_text())
    assert not list(style.excess(style.findings(style.ROOT), allowed))
