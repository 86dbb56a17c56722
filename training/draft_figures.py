"""How often drafts for the default model are right, by position, through the engine's own runner.

    python draft_figures.py .train/drafts      JSON on stdout

Prompts are the beginnings of modules that no weight has seen; half of the texts are greedy, half
have temperature 0.7. Position i counts drafts all before which were right. `tokens_per_step` is
what a step makes of a sequence; `differing` counts tokens that differ from those without drafts.
"""

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

from data import collect, of_split
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch, Row
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from tokenizers import Tokenizer

TARGET = Path(__file__).parents[1] / "model_repository/tensorrt_llm/1/checkpoint"
NUM_DRAFTS = 4


def generate(
    runner: ModelRunner, prompt: list[int], sampling: SamplingParams, seed: int, length: int
) -> tuple[list[int], list[int], list[int]]:
    """Tokens of one sequence, and how often drafts of each position were judged and right."""
    block_size = runner.block_size
    count = -(-(len(prompt) + length + NUM_DRAFTS + 1) // block_size)
    table = list(range(count))
    judged, right = [0] * NUM_DRAFTS, [0] * NUM_DRAFTS
    outputs: list[int] = []
    runs = [(prompt, 0)]
    while len(outputs) < length:
        rows = tuple(
            Row(
                0, 0, pack(tokens), start, (table,), True, sampling, seed, len(outputs) + i,
                num_prompt=len(prompt), num_drafts=NUM_DRAFTS,
            )
            for i, (tokens, start) in enumerate(runs)
        )  # fmt: skip
        num_decodes = len(rows) if outputs else 0
        sampled = runner.run(Batch(rows, num_decodes, num_drafts=max(0, len(rows) - 1)))
        number = 0
        outputs.append(sampled.token_ids[0])
        for position, (tokens, _) in enumerate(runs[1:]):
            judged[position] += 1
            if tokens[0] != outputs[-1]:
                break
            right[position] += 1
            number += 1
            outputs.append(sampled.token_ids[number])
        known = len(prompt) + len(outputs)
        drafts = sampled.drafts.get(number, [])
        runs = [([token], known - 1 + i) for i, token in enumerate([outputs[-1], *drafts])]
    return outputs[:length], judged, right


def measure(name: str, drafts: Path, prompts: list[list[int]], length: int) -> dict[str, Any]:
    """Figures of one drafter."""
    found: dict[str, Any] = {}
    common = {"checkpoint": str(TARGET), "device": "cpu", "kv_cache_tokens": 8192}
    plain = ModelRunner(resolve(EngineConfig(**common)))
    drafted = ModelRunner(
        resolve(
            EngineConfig(
                **common, speculation=name, draft_checkpoint=str(drafts / name),
                num_draft_tokens=NUM_DRAFTS,
            )
        )
    )  # fmt: skip
    for kind, temperature in (("greedy", 0.0), ("temperature 0.7", 0.7)):
        sampling = SamplingParams(max_tokens=1, temperature=temperature)
        judged, right, differing = [0] * NUM_DRAFTS, [0] * NUM_DRAFTS, 0
        for seed, prompt in enumerate(prompts):
            expected, _, _ = generate(plain, prompt, sampling, seed, length)
            outputs, own_judged, own_right = generate(drafted, prompt, sampling, seed, length)
            differing += sum(a != b for a, b in zip(outputs, expected, strict=True))
            judged = [a + b for a, b in zip(judged, own_judged, strict=True)]
            right = [a + b for a, b in zip(right, own_right, strict=True)]
        rates = [round(r / j, 3) if j else 0.0 for r, j in zip(right, judged, strict=True)]
        steps = max(1, judged[0])
        found[kind] = {
            "acceptance_by_position": rates,
            "tokens_per_step": round(1 + sum(right) / steps, 2),
            "differing": differing,
            "tokens": length * len(prompts),
        }
    return found


def main() -> None:
    """Prints the figures of all drafters that are there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("drafts", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = of_split(collect(Path(sysconfig.get_path("stdlib"))), "heldout")
    prompts = [tokenizer.encode(text).ids[:96] for text in texts[: arguments.prompts]]
    names = [name for name in ("draft", "medusa", "eagle3") if (arguments.drafts / name).is_dir()]
    figures = {name: measure(name, arguments.drafts, prompts, arguments.length) for name in names}
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
