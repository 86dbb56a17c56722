"""Compare log likelihoods in samples of lm-eval with transformers': `likelihoods.py DIR FILE`.

Prints how many there are, and the largest difference.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW = 2045  # tokens that lm-eval rates at once, given the max_length of with_lm_eval.py


def log_likelihood(model: Any, context: list[int], answer: list[int]) -> float:
    """Return the log likelihood of token ids after others."""
    ids = torch.tensor([context + answer])
    with torch.no_grad():
        log_probs = model(ids).logits[0].float().log_softmax(-1)
    rows = log_probs[len(context) - 1 : -1]
    return float(rows.gather(1, torch.tensor(answer)[:, None]).sum())


def split(tokenizer: Any, context: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and its answer, cut where the context ends."""
    blanks = len(context) - len(context.rstrip())
    if blanks:
        context, answer = context[:-blanks], context[-blanks:] + answer
    whole = tokenizer.encode(context + answer)
    size = len(tokenizer.encode(context))
    return whole[:size], whole[size:]


def rolled(model: Any, tokenizer: Any, text: str) -> float:
    """Return the log likelihood of a whole text, in windows that do not overlap."""
    ids = tokenizer.encode(text)
    first = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.bos_token_id
    total, place = 0.0, 0
    while place < len(ids):
        part = ids[place : place + WINDOW]
        place += len(part)
        if place == len(part):
            total += log_likelihood(model, [first], part)
        else:  # lm-eval gives the last window as much context as it has room for
            window = ids[max(0, place - WINDOW - 1) : place]
            total += log_likelihood(model, window[: -len(part)], part)
    return total


def main() -> None:
    """Compare."""
    checkpoint, samples = sys.argv[1:]
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    differences = []
    for line in Path(samples).read_text().splitlines():
        row = json.loads(line)
        for name, response in zip(row["arguments"], row["resps"], strict=True):
            given = row["arguments"][name]
            found = response[0][0] if isinstance(response[0], list) else response[0]
            if "arg_1" in given:
                wanted = log_likelihood(model, *split(tokenizer, given["arg_0"], given["arg_1"]))
            else:
                wanted = rolled(model, tokenizer, given["arg_0"])
            differences.append(abs(float(found) - wanted))
    print(len(differences), max(differences))


if __name__ == "__main__":
    main()
