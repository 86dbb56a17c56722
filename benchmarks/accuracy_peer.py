"""Our recipes beside llm-compressor's on SmolLM2: `python benchmarks/accuracy_peer.py [ROW ...]`.

Both get the same pieces to calibrate with, the same groups of 4 bits with zeros, and are measured
on the same text, in fp32. llm-compressor runs in an environment apart, which is made once. The
result goes into `benchmarks/results/accuracy-peer.json`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import venv
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accuracy_metrics import bits_and_kl, text_of
from accuracy_models import FOLDER, model_of
from quality import ROOT
from report import commit
from slipstream.models.gguf.unpack import as_directory
from slipstream_quantize.job import Job
from slipstream_quantize.make import recipe_of
from slipstream_quantize.opened import Opened
from slipstream_quantize.text import default_texts, pieces, tokenizer_of

RESULT = ROOT / "benchmarks/results/accuracy-peer.json"
PACKAGES = ("llmcompressor==0.14.0.1", "gguf==0.19.0")
ROWS = {"rtn": "int4", "awq": "awq", "gptq": "gptq", "awq-gptq": "awq-gptq"}  # theirs: ours
PIECE = 512
WORSE = 0.002  # of bits a byte, at most so much more than theirs


def python_of(given: Path | None) -> Path:
    """Return the Python of llm-compressor's environment, made if none is given."""
    if given:
        return given
    home = FOLDER / "llmcompressor"
    if not (home / "made").is_file():
        print(f"installing {' '.join(PACKAGES)} into {home}", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True, clear=True)
        command = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *PACKAGES]
        subprocess.run(command, check=True)
        (home / "made").touch()
    return home / "bin" / "python"


def theirs(python: Path, spec: dict[str, Any]) -> dict[str, float]:
    """Return the bits before and after."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(spec, file)
        file.flush()
        script = Path(__file__).with_name("accuracy_llmcompressor.py")
        command = [str(python), str(script), file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@torch.inference_mode()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--pieces", type=int, default=8, help=f"of {PIECE} tokens to measure on")
    parser.add_argument("--samples", type=int, default=16, help=f"of {PIECE} tokens to calibrate")
    parser.add_argument("--python", type=Path, help="an environment with llm-compressor and gguf")
    parser.add_argument("--device", default="cpu", help="of ours")
    args = parser.parse_args()
    model, python = model_of("smollm2"), python_of(args.python)
    about = {"commit": commit(), "packages": PACKAGES, "pieces": args.pieces}
    result: dict[str, Any] = {"about": {**about, "samples": args.samples}, "rows": {}}
    before_now = json.loads(RESULT.read_text()) if RESULT.is_file() else {"about": {}}
    if all(before_now["about"].get(key) == result["about"][key] for key in ("pieces", "samples")):
        result["rows"] = before_now["rows"]  # others, measured alike
    with ExitStack() as stack:
        folder, _ = stack.enter_context(as_directory(model.path))
        tokenizer = tokenizer_of(folder)
        text = text_of(tokenizer, model.texts(), PIECE, args.pieces)
        calibration = pieces(tokenizer, default_texts(False), PIECE, args.samples, "the text")
        for row in args.rows:
            opened = Opened(folder, args.device)
            before = sum(bits_and_kl(opened, text, "auto", None)[0])
            recipe, start = recipe_of(opened, ROWS[row], None, False), time.process_time()
            Job(opened, recipe, calibration if recipe.needs_text else None).run()
            seconds = round(time.process_time() - start, 1)
            after = sum(bits_and_kl(opened, text, "auto", None)[0])
            spec = {"checkpoint": str(model.path), "row": row, "group": recipe.group}
            spec["tokenizer"] = str(folder / "tokenizer.json")
            ids = {"text": text.tolist(), "calibration": calibration.tolist()}
            other = theirs(python, spec | ids)
            entry = {"ours": after / before - 1, "theirs": other["after"] / other["before"] - 1}
            entry |= {"bits_before": [before, other["before"]], "processor_seconds": seconds}
            result["rows"][row] = entry
            print(json.dumps({row: entry}), flush=True)
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
    worse = [row for row, each in result["rows"].items() if each["ours"] > each["theirs"] + WORSE]
    if worse:
        sys.exit(f"worse than llm-compressor's by more than {WORSE:.1%}: {', '.join(worse)}")


if __name__ == "__main__":
    main()
