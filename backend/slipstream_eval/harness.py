"""lm-eval's side of `slipstream eval`: runs in its environment, where Slipstream is not installed.

Reads its options from stdin, starts the scorer, and writes the results file.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from tqdm import tqdm

_GENERATION = ("until", "max_gen_toks", "temperature", "do_sample")
_AT_ONCE = 512  # requests that the scorer holds at a time


class Slipstream(TemplateLM):  # type: ignore[misc]
    """The engine in another process, a line of JSON for each request and each answer."""

    def __init__(self, command: list[str], config: str) -> None:
        super().__init__()
        self._process = subprocess.Popen(
            [*command, config], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._about = self._read()

    @property
    def eot_token_id(self) -> int:
        """Return the id that ends a text; it stands for an empty context, too."""
        return int(self._about["prefix"])

    @property
    def max_length(self) -> int:
        """Return the tokens of the context."""
        return int(self._about["max_length"])

    @property
    def tokenizer_name(self) -> str:
        """Return what lm-eval's caches call the chat template."""
        return str(self._about["name"])

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return token ids, with the special ones that the tokenizer adds unless it is False."""
        self._write({"encode": string, "special": add_special_tokens is not False})
        return list(self._read()["ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a conversation by the checkpoint's own template."""
        self._write({"chat": chat_history, "opens": add_generation_prompt})
        return str(self._read()["text"])

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return log likelihood of each continuation, and whether it is the greedy one."""
        lines = [{"context": context, "score": scored} for _, context, scored in requests]
        answers = self._all(lines, "scoring", disable_tqdm)
        return [(each["log_prob"], each["is_greedy"]) for each in answers]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log likelihood of each whole text, in windows of the context."""
        windows: list[tuple[int, Any]] = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            found = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1)
            windows += [(i, make_disjoint_window(pair)) for pair in found]
        lines = [{"context": context, "score": scored} for _, (context, scored) in windows]
        sums = [0.0] * len(requests)
        answers = self._all(lines, "scoring", disable_tqdm)
        for (i, _), answer in zip(windows, answers, strict=True):
            sums[i] += answer["log_prob"]
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return greedy texts, each up to one of its ends."""
        lines = []
        for request in requests:
            context, options = request.args
            unknown = sorted(set(options) - set(_GENERATION))
            if unknown or options.get("do_sample") or options.get("temperature", 0) not in (0, 0.0):
                raise ValueError(f"generation is greedy here: {unknown or options} is not served")
            ends = options.get("until") or []
            ends = [ends] if isinstance(ends, str) else ends
            lines.append({"text": context, "until": ends, "most": options.get("max_gen_toks", 256)})
        return [each["text"] for each in self._all(lines, "generating", disable_tqdm)]

    def _all(self, lines: list[dict[str, Any]], what: str, is_quiet: bool) -> list[dict[str, Any]]:
        """Send all lines, some at a time, and return their answers."""
        found: list[dict[str, Any]] = []
        with tqdm(total=len(lines), desc=what, disable=is_quiet) as bar:
            for first in range(0, len(lines), _AT_ONCE):
                chosen = lines[first : first + _AT_ONCE]
                self._write({"batch": chosen})
                answers: list[Any] = [None] * len(chosen)
                for _ in chosen:
                    answer = self._read()
                    answers[answer["number"]] = answer
                    bar.update()
                found += answers
        return found

    def _write(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "it has a pipe"
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it has a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(self._process.wait() or 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SystemExit(f"slipstream eval: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the scorer."""
        assert self._process.stdin is not None, "it has a pipe"
        self._process.stdin.close()
        self._process.wait()


def _kept(results: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples", "samples")
    yield from ((name, results[name]) for name in names if name in results)


def main() -> None:
    """Evaluate."""
    given = json.loads(sys.stdin.read())
    tasks = TaskManager(include_path=given["include_path"])
    model = Slipstream(given["scorer"], given["config"])
    results = simple_evaluate(
        model,
        tasks=given["tasks"],
        task_manager=tasks,
        limit=given["limit"],
        num_fewshot=given["num_fewshot"],
        apply_chat_template=given["apply_chat_template"],
        log_samples=given["log_samples"],
    )
    model.close()
    print(make_table(results))
    engine = json.loads(given["config"])
    kept = {"model": given["model"], "engine": engine, **dict(_kept(results))}
    text = json.dumps(kept, indent=1, default=str, ensure_ascii=False) + "\n"
    Path(given["output"]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
