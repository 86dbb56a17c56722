"""The engine's side of `slipstream eval`: scores and writes for lm-eval, over stdin and stdout.

    python -m slipstream_eval.scorer CONFIG

CONFIG is an `EngineConfig` as JSON. A line is a JSON object; the first that is written describes
the model. A line of stdin gets one answer, or one for each of its `batch`, with its `number`.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.settings import limits_of
from slipstream.errors import StartError
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import FinishReason, Submit, Tokens
from slipstream_contract.errors import ContractError
from slipstream_contract.ids import pack
from slipstream_contract.log_probs import LogProbs
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.vocab import TokenBytes
from slipstream_preprocessing.chat import ChatTemplate
from slipstream_preprocessing.tokenizer import load_tokenizer

_BRIDGE = b"eval"
_SCORE = LogProbs(prompt=0)


class Scorer:
    """An engine, and what stands around it."""

    def __init__(self, config: EngineConfig) -> None:
        plan = resolve(config)
        directory = Path(config.checkpoint)
        self._tokenizer = load_tokenizer(directory)
        self._templates = ChatTemplate.load(directory)
        vocab = TokenBytes.load(directory)
        self._engine = Engine(limits_of(config, plan), ModelRunner(plan), vocab)
        self._vocab = vocab
        self._end_ids = plan.model.eos_ids
        self._most = plan.max_model_len
        ends = self._tokenizer.encode("", add_special_tokens=True).ids or list(self._end_ids)
        self.about = {
            "prefix": ends[0] if ends else 0,
            "max_length": self._most,
            "name": plan.model_name,
        }

    def answers(self, line: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answers to a line."""
        if "batch" in line:
            yield from self._batch(line["batch"])
        elif "chat" in line:
            opens = line["opens"]
            yield {"text": self._templates.render(line["chat"], add_generation_prompt=opens)}
        else:
            ids = self._tokenizer.encode(line["encode"], add_special_tokens=line["special"]).ids
            yield {"ids": ids}

    def _batch(self, lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines):
            self._submit(number, line)
        waiting = [_Waiting(line) for line in lines]
        while self._engine.has_work:
            for tokens in self._engine.step().get(_BRIDGE, []):
                one = waiting[tokens.request]
                one.add(tokens)
                if tokens.finished is not None:
                    if tokens.finished.reason is FinishReason.ERROR:
                        raise ContractError(tokens.finished.error or "the engine failed")
                    yield {"number": tokens.request, **one.answer(self._vocab)}

    def _submit(self, number: int, line: dict[str, Any]) -> None:
        """Offer a request; a context that is too long loses its first tokens, as lm-eval's do."""
        if "score" in line:
            prompt = (line["context"] + line["score"])[-(self._most - 1) :]
            line["count"] = min(len(line["score"]), len(prompt) - 1)
            sampling = SamplingParams(max_tokens=1, temperature=0.0, values=_SCORE)
        else:
            prompt = self._tokenizer.encode(line["text"], add_special_tokens=True).ids
            prompt = prompt[-(self._most - line["most"]) :]
            sampling = SamplingParams(
                max_tokens=line["most"],
                temperature=0.0,
                end_ids=self._end_ids,
                stop_words=tuple(word.encode() for word in line["until"]),
                include_stop=False,
            )
        request = Submit(number, pack(prompt), sampling, time.monotonic_ns())
        self._engine.submit(_BRIDGE, request)


class _Waiting:
    """What has come of a request."""

    def __init__(self, line: dict[str, Any]) -> None:
        self._line = line
        self._ids: list[int] = []
        self._drop = 0
        self._values: list[float] = []
        self._ranks: list[int] = []

    def add(self, tokens: Tokens) -> None:
        """Add a message."""
        self._ids += tokens.token_ids
        self._drop = tokens.drop_bytes
        if tokens.values is not None:
            for part in tokens.values.prompt:
                self._values += np.frombuffer(part.values, np.float32).tolist()
                self._ranks += np.frombuffer(part.ranks, np.int32).tolist()

    def answer(self, vocab: TokenBytes) -> dict[str, Any]:
        """Return what lm-eval wants of it."""
        if "score" not in self._line:
            text, _ = vocab.join(self._ids, is_first=False, drop_bytes=self._drop)
            return {"text": text.decode("utf-8", "replace")}
        count = self._line["count"]
        values, ranks = self._values[-count:], self._ranks[-count:]
        return {"log_prob": sum(values), "is_greedy": all(rank == 1 for rank in ranks)}


def main() -> int:
    """Serve until stdin ends; return the exit code."""

    def write(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    try:
        scorer = Scorer(msgspec.json.decode(sys.argv[1], type=EngineConfig))
        write(scorer.about)
        for line in sys.stdin:
            for answer in scorer.answers(json.loads(line)):
                write(answer)
    except (StartError, ContractError, OSError) as error:
        write({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
