"""What quantisation costs: `python benchmarks/quality.py [CHECKPOINT] [--text FILE ...]`.

Bits that the model needs for a byte of text, with the weights as they are and in fp8. Without
`--text`: the modules of this Python's standard library that the default model has not seen
(training/data.py). Each text is cut into pieces of half the context, each scored by itself.
"""

import argparse
import importlib.util
import math
import sysconfig
from pathlib import Path

import torch
from slipstream.config import EngineConfig
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.decoder import Decoder
from slipstream.models.decoder import build
from slipstream.models.source import Weights
from slipstream.models.weights import FileSource
from slipstream.runner.plan import resolve
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
BLOCK = 32


class Model:
    """A checkpoint, and a cache for one piece of text."""

    def __init__(
        self, checkpoint: Path, quantization: str, dtype: str, device: str, kv_cache_dtype: str
    ) -> None:
        config = EngineConfig(
            checkpoint=str(checkpoint),
            dtype=dtype,
            device=device,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            block_size=BLOCK,
        )
        plan = resolve(config)
        self.device, dims = plan.device, plan.model.dims
        self.attention = plan.attention
        self.max_tokens = plan.max_model_len // 2
        source = FileSource(checkpoint, plan.device, plan.model.tensors)
        weights = Weights(source, plan.device, plan.dtype, quantization)
        self.decoder: Decoder = build(plan.model, weights, plan.max_model_len)
        self.windows = plan.model.windows
        self.num_blocks = -(-self.max_tokens // BLOCK)
        shape = plan.kv.layer_shape(self.num_blocks)
        self.caches = [
            torch.zeros(shape, dtype=plan.cache_dtype, device=plan.device)
            for _ in range(dims.num_layers)
        ]

    def bits(self, tokens: list[int]) -> float:
        """Sum the bits of all tokens but the first, each given those before it."""
        token_ids = torch.tensor(tokens, device=self.device)
        count = len(tokens)
        every = torch.arange(count, device=self.device)
        numbers = {"dtype": torch.int32, "device": self.device}
        rows = StepRows(
            positions=every,
            slots=every,
            block_tables=torch.arange(self.num_blocks, **numbers)[None],
            query_starts=torch.tensor([0, count], **numbers),
            lengths=torch.tensor([count], **numbers),
            num_decodes=0,
            max_queries=count,
        )
        inputs = {
            window: AttentionInputs.of(self.attention, self.caches[0], rows, window)
            for window in set(self.windows)
        }
        of_layers = [inputs[window] for window in self.windows]
        logits = self.decoder(token_ids, of_layers, self.caches).float()
        log_probs = logits[:-1].log_softmax(-1).gather(1, token_ids[1:, None])
        return -float(log_probs.sum()) / math.log(2)


@torch.inference_mode()
def bits_per_byte(
    checkpoint: Path,
    texts: list[str],
    quantization: str,
    dtype: str,
    device: str,
    kv_cache_dtype: str = "auto",
) -> float:
    """Over all pieces of the texts; a piece's first token is free."""
    model = Model(checkpoint, quantization, dtype, device, kv_cache_dtype)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    bits, num_bytes = 0.0, 0
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        for first in range(0, len(tokens), model.max_tokens):
            piece = tokens[first : first + model.max_tokens]
            if len(piece) > 1:
                bits += model.bits(piece)
                num_bytes += len(tokenizer.decode(piece[1:]).encode())
    return bits / num_bytes


def heldout() -> list[Path]:
    """Read the held-out text of the default model's training."""
    spec = importlib.util.spec_from_file_location("data", ROOT / "training" / "data.py")
    assert spec is not None
    assert spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    library = Path(sysconfig.get_path("stdlib"))
    return [library / name for name in data.HELDOUT if (library / name).is_file()]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT)
    parser.add_argument("--text", nargs="*", type=Path, default=[])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    texts = [path.read_text() for path in args.text or heldout()]
    print(f"{len(texts)} texts, {sum(len(text.encode()) for text in texts):,} bytes, {args.dtype}")
    figures = {}
    for quantization in ("none", "fp8"):
        figures[quantization] = bits_per_byte(
            args.checkpoint, texts, quantization, args.dtype, args.device
        )
        print(f"{quantization:5} {figures[quantization]:.4f} bits a byte", flush=True)
    print(f"fp8 needs {figures['fp8'] / figures['none'] - 1:+.2%}")


if __name__ == "__main__":
    main()
