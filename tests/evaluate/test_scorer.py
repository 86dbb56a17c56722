"""`slipstream eval`: scores are transformers', ends are honoured; lm-eval itself, where it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from fixtures.quantize import tiny
from slipstream.config import EngineConfig
from slipstream_client.cli import main
from slipstream_eval.cli import PACKAGE
from slipstream_eval.scorer import Scorer

TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("eval") / "checkpoint", "llama")


@pytest.fixture(scope="module")
def config(directory: Path) -> EngineConfig:
    return EngineConfig(checkpoint=str(directory), device="cpu", kv_cache_tokens=4096, block_size=8)


@pytest.fixture(scope="module")
def scorer(config: EngineConfig) -> Scorer:
    return Scorer(config)


def test_scores_are_those_of_transformers(directory: Path, scorer: Scorer) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    [answer] = scorer.answers({"encode": TEXT, "special": True})
    ids = answer["ids"]
    assert len(ids) == len(TEXT)
    pairs = [(ids[:10], ids[10:13]), (ids[:1], ids[1:60]), (ids, ids * 2)]
    lines = [{"context": context, "score": scored} for context, scored in pairs]
    greedy = model(torch.tensor([ids])).logits[0, -1].argmax().item()
    lines.append({"context": ids, "score": [greedy]})
    answers = {each["number"]: each for each in scorer.answers({"batch": lines})}
    assert answers.keys() == set(range(len(lines)))
    for number, line in enumerate(lines):
        whole = (line["context"] + line["score"])[-127:]  # of a context of 128, one is written
        count = min(len(line["score"]), len(whole) - 1)
        with torch.no_grad():
            logits = model(torch.tensor([whole[:-1]])).logits[0, -count:]
        scored = torch.tensor(whole[-count:])
        expected = logits.log_softmax(-1).gather(1, scored[:, None]).sum().item()
        assert answers[number]["log_prob"] == pytest.approx(expected, abs=1e-3)
        assert answers[number]["is_greedy"] == bool((logits.argmax(-1) == scored).all())
    assert answers[3]["is_greedy"]


def test_texts_end_before_their_ends(scorer: Scorer) -> None:
    free = {"text": TEXT, "until": [], "most": 40}
    [whole] = scorer.answers({"batch": [free]})
    letters = [letter for letter in whole["text"] if letter.isascii()]  # others are parts of some
    end = next(letter for letter in letters[2:] if letter not in letters[:2])
    [cut] = scorer.answers({"batch": [free | {"until": [end]}]})
    got = [letter for letter in cut["text"] if letter.isascii()]
    assert got == letters[: letters.index(end)]


@pytest.mark.rest
def test_the_process_answers_lines_and_names_what_is_wrong(config: EngineConfig) -> None:
    def run(config: EngineConfig, lines: str) -> list[dict[str, object]]:
        command = [sys.executable, "-P", "-m", "slipstream_eval.scorer"]
        command.append(msgspec.json.encode(config).decode())
        done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
        return [json.loads(line) for line in done.stdout.splitlines()]

    about, ids = run(config, json.dumps({"encode": "ab", "special": False}) + "\n")
    assert about["max_length"] == 128
    assert len(ids["ids"]) == 2
    [error] = run(msgspec.structs.replace(config, checkpoint="/none"), "")
    assert "no such directory" in error["error"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", ","], "--tasks ',' names no task"),
        (["--output", "/nowhere/x"], "--output /nowhere/x: its directory does not exist"),
        (["--include-path", "/nowhere"], "--include-path /nowhere: no such directory"),
        (["--num-fewshot", "-1"], "--num-fewshot: '-1' is not a whole number of at least 0"),
        (["--limit", "0"], "--limit: '0' is not a whole number of at least 1"),
        (["--device", "tpu"], "device = 'tpu'"),
        (["--dtype", "int3"], "dtype = 'int3'"),
        (["--quantization", "int3"], "quantization = 'int3'"),
        (["--kv-cache-dtype", "int3"], "kv_cache_dtype = 'int3'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_installed(
    options: list[str],
    said: str,
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    apart = tmp_path / "environment"
    given = ["--tasks", "a", "--output", str(tmp_path / "x"), "--environment", str(apart)]
    try:
        code = main(["eval", str(directory), *given, *options])
    except SystemExit as refused:
        code = refused.code
    assert code in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not apart.exists()


def test_wrong_options(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results.json"
    output.write_text("mine")
    assert main(["eval", str(directory), "--tasks", "a", "--output", str(output)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert output.read_text() == "mine"
    apart = tmp_path / "environment"
    arguments = ["--tasks", "a", "--output", str(tmp_path / "x"), "--environment", str(apart)]
    assert main(["eval", str(tmp_path / "none"), *arguments]) == 1
    assert "no such directory" in capsys.readouterr().err
    assert not apart.exists()


TASK = """task: wishes
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: '{{{{context}}}}'
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.mark.slow
def test_lm_eval_runs_tasks(directory: Path, tmp_path: Path) -> None:
    """Needs `SLIPSTREAM_LM_EVAL`, a folder that `slipstream eval --environment` has made."""
    home = os.environ.get("SLIPSTREAM_LM_EVAL")
    if not home or (Path(home) / "made").read_text() != PACKAGE:
        pytest.skip("SLIPSTREAM_LM_EVAL names no environment of lm-eval")
    questions = [{"context": TEXT[:i], "choices": ["x", "yz"], "answer": 0} for i in (9, 20, 33)]
    file, output = tmp_path / "wishes.jsonl", tmp_path / "results.json"
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tmp_path / "wishes.yaml").write_text(TASK.format(file=file))
    options = ["--include-path", str(tmp_path), "--environment", home, "--device", "cpu"]
    command = ["eval", str(directory), "--tasks", "wishes", "--output", str(output), *options]
    assert main(command) == 0
    results = json.loads(output.read_text())
    assert 0 <= results["results"]["wishes"]["acc,none"] <= 1
    assert results["n-samples"]["wishes"]["effective"] == len(questions)
