"""Checks of lm-eval: local-completions and local-chat-completions, tasks end to end.

The tasks are made here of this Python's own library, real text that the small model knows: which of
four lines follows in a file, and how likely a file is. Log likelihoods are compared with those that
transformers computes on the same checkpoint in fp32, by SLIPSTREAM_PYTHON, which has it.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checks import Checks, Target

MODULES = ("argparse", "ast", "configparser", "csv", "difflib", "shlex", "tarfile", "textwrap")
NUM_QUESTIONS = 24
NUM_LINES = 8  # of a context
TOLERANCE = 1e-3
_DATA = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\n"
TASKS = {
    "next_line": "output_type: multiple_choice\n"
    "doc_to_text: '{{context}}'\n"
    "doc_to_choice: choices\ndoc_to_target: answer\ntarget_delimiter: ''\n"
    "metric_list:\n  - metric: acc\n",
    "files": "output_type: loglikelihood_rolling\n"
    "doc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list:\n  - metric: byte_perplexity\n",
    "continued": "output_type: generate_until\n"
    "doc_to_text: '{{context}}'\ndoc_to_target: '{{line}}'\n"
    'generation_kwargs:\n  max_gen_toks: 16\n  temperature: 0.0\n  until: ["\\n"]\n'
    "metric_list:\n  - metric: exact_match\n",
}


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    each = _Checks(target)
    return {
        "local-completions: multiple choice": each.choose,
        "... its log likelihoods are transformers'": each.compare,
        "local-completions: rolling log likelihood, remote tokenizer": each.roll,
        "... its log likelihoods are transformers' too": each.compare_rolled,
        "local-completions: generation": each.generate,
        "local-chat-completions: generation": each.chat,
    }


def questions(seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield questions: lines of a module, what follows, and three lines from elsewhere in it."""
    chosen = random.Random(seed)
    for number in range(NUM_QUESTIONS):
        lines = _lines(MODULES[number % len(MODULES)])
        place = chosen.randrange(NUM_LINES, len(lines) - 1)
        context = "".join(lines[place - NUM_LINES : place])
        wrong = chosen.sample(sorted({line for line in lines if line != lines[place]}), 3)
        choices = [line.rstrip("\n") for line in [lines[place], *wrong]]
        line = choices[0]
        chosen.shuffle(choices)
        answer = choices.index(line)
        yield {"context": context, "line": line, "choices": choices, "answer": answer}


def _lines(module: str) -> list[str]:
    """Return the lines of a module of this Python that are long enough to be told apart."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    return [line for line in text.splitlines(keepends=True) if len(line.strip()) > 8]


class _Checks:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.home = Path(tempfile.mkdtemp(prefix="lm-eval-"))
        rows = list(questions())
        texts = [{"text": "".join(_lines(name))[:12000]} for name in MODULES[:3]]
        for task, form in TASKS.items():
            file = self.home / f"{task}.jsonl"
            kept = texts if task == "files" else rows
            file.write_text("".join(json.dumps(row) + "\n" for row in kept))
            text = f"task: {task}\n" + _DATA.format(file=file) + form
            (self.home / f"{task}.yaml").write_text(text)

    def _run(self, model: str, task: str, **options: object) -> dict[str, Any]:
        """Run a task, and return its results; its samples are kept."""
        path = "chat/completions" if "chat" in model else "completions"
        given: dict[str, object] = {
            "base_url": f"{self.target.base}/{path}",
            "model": self.target.model,
            "num_concurrent": 2,
            "max_retries": 3,
            "max_length": 2047,
            "auth_token": self.target.key,
            **options,
        }
        command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", task]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in given.items())]
        command += ["--include_path", str(self.home), "--output_path", str(self.home / task)]
        command += ["--batch_size", "4"]
        command += ["--log_samples", *(["--apply_chat_template"] if "chat" in model else [])]
        environment = {**os.environ, "OPENAI_API_KEY": self.target.key, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stderr[-250:]
        (found,) = (self.home / task).rglob("results_*.json")
        results: dict[str, Any] = json.loads(found.read_bytes())["results"][task]
        return results

    def _hf(self) -> dict[str, object]:
        return {"tokenizer_backend": "huggingface", "tokenizer": self.target.checkpoint}

    def choose(self) -> str:
        results = self._run("local-completions", "next_line", **self._hf())
        accuracy = results["acc,none"]
        assert accuracy > 0.25, f"accuracy {accuracy}, that of chance is 0.25"
        return f"{NUM_QUESTIONS} questions, accuracy {accuracy:.3f}"

    def roll(self) -> str:
        results = self._run("local-completions", "files", tokenizer_backend="remote")
        return f"byte perplexity {results['byte_perplexity,none']:.4f}"

    def compare(self) -> str:
        return self._compare("next_line")

    def compare_rolled(self) -> str:
        return self._compare("files")

    def _compare(self, task: str) -> str:
        (samples,) = (self.home / task).rglob("samples_*.jsonl")
        command = [os.environ["SLIPSTREAM_PYTHON"], str(Path(__file__).with_name("likelihoods.py"))]
        command += [self.target.checkpoint, str(samples)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0, done.stderr[-250:]
        count, largest = done.stdout.split()
        assert float(largest) <= TOLERANCE, f"the largest difference is {largest}"
        return f"{count} log likelihoods, the largest difference is {float(largest):.2e}"

    def generate(self) -> str:
        results = self._run("local-completions", "continued", **self._hf())
        return f"exact match {results['exact_match,none']:.3f}"

    def chat(self) -> str:
        (self.home / "continued").rename(self.home / "completed")
        results = self._run("local-chat-completions", "continued")
        return f"exact match {results['exact_match,none']:.3f}"
