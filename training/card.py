"""The model card of the chosen candidate: what it is, how it was made, what it can and cannot do.

python card.py CANDIDATES_JSON NAME      prints the card of one candidate of an earlier run
"""

import json
import sys
from pathlib import Path
from typing import Any

from data import HELDOUT
from model import Shape
from train import CANDIDATES, Candidate

TEMPLATE = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [python, code, llama]
---

# A small Llama that completes Python

The model that `make serve` starts with: {parameters:,} parameters, {size} bytes in all. It exists
so that a server can be tried, tested and measured without a download. It completes Python in the
manner of the standard library, and knows nothing else.

| | |
|---|---|
| architecture | `LlamaForCausalLM`, tied embeddings |
| layers, hidden size, feed-forward | {num_layers}, {hidden_size}, {intermediate_size} |
| query heads, key and value heads, head size | {num_heads}, {num_kv_heads}, {head_size} |
| context | {context} tokens |
| tokenizer | byte-level BPE, {vocab_size} tokens |
| weights | bf16 safetensors |

## Data

The sources of CPython's standard library with its tests (Python 3.11), as they lie in an
installation. {num_heldout} modules and their tests were kept aside for the figures below, eight
more for the choice between candidates; character maps in `encodings/` were left out. Kept aside for
the figures: {heldout}.

## Figures

Bits per byte; every token scored once, with at least half a context of its own file before it.

| | model | gzip -9 | xz -9 |
|---|---|---|---|
| held-out modules, each file alone | **{heldout_bits:.3f}** | {gzip_9:.3f} | {xz_9:.3f} |
| held-out modules, one archive | | {gzip_9_one_archive:.3f} | {xz_9_one_archive:.3f} |
| tests of the held-out modules | {heldout_tests_bits:.3f} | | |
| training set | {train_bits:.3f} | | |

The distance between the first row and the last is what it has learnt by heart.

## How it was made

    bash training/run_gpu.sh

collects the data from the running Python, trains the tokenizer, trains candidates side by side on
one GPU for a fixed time (candidate `{name}`: {seconds:.0f} s, {steps:,} steps, {tokens:,} tokens,
dropout {dropout}, weight decay {weight_decay}; Muon for matrices, AdamW for the rest), scores them
and keeps the one that is best on the validation modules. The schedule follows the clock, so another
machine or another Python gives another model of about this quality, not these bytes.

## What it is for, and not for

For trying the server: streaming, batching, cancelling, measuring. Not for writing programs: what it
writes looks like Python and is seldom right. Greedy decoding repeats itself; a temperature around
0.6 with top_p 0.9 reads better. It was never trained on conversations and has no chat template.

## Licence

Weights: Apache-2.0, as the rest of the repository. Data: the Python standard library, under the
Python Software Foundation License, version 2; long passages that the model gives back word for word
remain under it.
"""


def card(figures: dict[str, Any], name: str) -> str:
    """The card of candidate `name` with the figures that `evaluate.py` has written."""
    candidate: Candidate = CANDIDATES[name]
    shape: Shape = candidate.shape
    return TEMPLATE.format(
        name=name,
        parameters=figures["parameters"],
        size=f"{figures['model_bytes'] / 1e6:.1f} million",
        num_heldout=len(HELDOUT),
        heldout=", ".join(f"`{module}`" for module in HELDOUT),
        heldout_bits=figures["bits_per_byte_heldout"],
        heldout_tests_bits=figures["bits_per_byte_heldout-tests"],
        train_bits=figures["bits_per_byte_train"],
        seconds=figures["seconds"],
        steps=figures["steps"],
        tokens=figures["tokens"],
        dropout=candidate.dropout,
        weight_decay=candidate.weight_decay,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        intermediate_size=shape.intermediate_size,
        context=shape.context,
        vocab_size=shape.vocab_size,
        **figures["compressors"],
    )


def main() -> None:
    """Prints a card."""
    table = json.loads(Path(sys.argv[1]).read_text())
    print(card(table[sys.argv[2]], sys.argv[2]), end="")


if __name__ == "__main__":
    main()
