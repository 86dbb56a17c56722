"""llm-compressor's side of accuracy_peer.py: runs in its environment, `python ... SPEC.json`.

SPEC names a checkpoint, its tokenizer.json and token ids; prints bits before and after as a line
of JSON.
"""

import copy
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def scheme(group: int) -> dict[str, QuantizationScheme]:
    """Return 4 bits by groups with zeros, the grid of ours."""
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=group, symmetric=False)
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}


def recipe(name: str, group: int) -> list[Any]:
    """Return the modifiers of a row."""
    groups = scheme(group)
    if name == "rtn":
        return [QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
    if name == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
    from llmcompressor.modifiers.transform.awq import AWQModifier

    awq = AWQModifier(duo_scaling="both")
    if name == "awq":
        return [awq, QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
    assert name == "awq-gptq", name
    return [awq, GPTQModifier(config_groups=groups, ignore=["lm_head"])]


@torch.inference_mode()
def bits(model: Any, text: list[list[int]]) -> float:
    """Sum the bits of all tokens but each piece's first."""
    total = 0.0
    for piece in text:
        ids = torch.tensor([piece])
        found = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])
        total -= float(found.sum()) / math.log(2)
    return total


def plain(path: Path, folder: str) -> Path:
    """Return a directory of safetensors: the checkpoint's, or made in `folder` of a GGUF file.

    `oneshot` takes no model that came of a GGUF file, which calls itself quantised.
    """
    if path.suffix != ".gguf":
        return path
    read = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    return Path(folder)


def leave_unpinned() -> None:
    """Let AWQ run without an accelerator: it pins memory for copies to one, and fails there."""
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_, **__: None


def main() -> None:
    """Quantise and measure."""
    leave_unpinned()
    spec = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        source = plain(Path(spec["checkpoint"]), folder)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        before = bits(model, spec["text"])
        rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in spec["calibration"]]
        oneshot(
            model=model,
            processor=PreTrainedTokenizerFast(tokenizer_file=spec["tokenizer"]),
            dataset=Dataset.from_list(rows),
            recipe=recipe(spec["row"], spec["group"]),
            max_seq_length=len(rows[0]["input_ids"]),
            num_calibration_samples=len(rows),
        )
        print(json.dumps({"before": before, "after": bits(model, spec["text"])}))


if __name__ == "__main__":
    main()
