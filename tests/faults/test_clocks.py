"""The wall clock, which may jump, decides nothing: it is only told."""

import ast
from pathlib import Path

from slipstream_serve.server import repository_root

FOLDERS = ("backend", "ensemble", "gateway", "preprocessing", "postprocessing")
WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "strftime"}
# The files that may read it, and why.
TOLD = {
    "backend/slipstream/bridge/metrics.py": "a gauge",
    "backend/slipstream/engine/kv_events.py": "when a batch was sent, as vLLM's events say it",
    "backend/slipstream/engine/loop.py": "StepOutputs.made_ns",
    "backend/slipstream/engine/reports.py": "lines of the request log",
    "backend/slipstream/engine/telemetry.py": "the start",
    "backend/slipstream/replicas/router.py": "the start",
    "ensemble/slipstream_serve/gateway.py": "lines of its output",
    "ensemble/slipstream_serve/supervise.py": "lines of its output",
    "gateway/slipstream_gateway/dialects/openai.py": "`created` of answers",
    "gateway/slipstream_gateway/dialects/responses_writer.py": "`created_at` of answers",
    "gateway/slipstream_gateway/metrics.py": "the time at which adapters were in use",
    "gateway/slipstream_gateway/models.py": "`created` of models",
    "preprocessing/slipstream_preprocessing/chat.py": "chat templates that ask for the date",
}


def asks_for_it(path: Path) -> bool:
    """Whether a module calls `time.time()` or the like, by whatever import."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in WALL & imported:
            return True
        if (
            isinstance(called, ast.Attribute)
            and called.attr in WALL
            and isinstance(called.value, ast.Name)
            and called.value.id in {"time", "datetime", "date", *imported}
        ):
            return True
    return False


def test_who_asks_for_the_wall_clock() -> None:
    root = repository_root()
    asking = {
        str(path.relative_to(root))
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
        if asks_for_it(path)
    }
    assert asking == TOLD.keys(), "does it decide anything? monotonic clocks do"
