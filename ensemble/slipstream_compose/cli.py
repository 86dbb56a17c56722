"""`slipstream compose`: write, or check, the model repository of a checkpoint."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from slipstream import quant
from slipstream.config import (
    BACKEND_MODELS,
    DTYPES,
    KV_CACHE_DTYPES,
    ON_OFF,
    SPECULATIONS,
    help_of,
)
from slipstream_contract.deployment import DEFAULT
from slipstream_contract.errors import clip
from slipstream_contract.log_probs import MODES
from slipstream_runtime.processes import num_cores

from slipstream_compose import profile
from slipstream_compose.chat_templates import TEMPLATES, put_template
from slipstream_compose.compose import (
    CONTRACT_HELP,
    INSTANCES_HELP,
    WIRINGS,
    ComposeError,
    Repository,
    compose,
)
from slipstream_compose.convert import convert_tokenizer, needs_conversion
from slipstream_compose.writing import differences, write

_COUNTS = (
    "kv_cache_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_draft_tokens",
    "suffix_tokens",
    "max_model_len",
    "attention_window",
    "sink_tokens",
    "max_waiting",
    "max_waiting_tokens",
    "long_prompt_tokens",
    "stuck_after_s",
    "block_size",
    "max_logits_bytes",
    "adapter_memory",
    "lora_task_bytes",
    "tensor_parallel",
    "pipeline_parallel",
    "replicas",
)

_DRAFTS = ("draft_checkpoint", "medusa_choices", "eagle_choices", "synthetic_acceptance")


def _given(text: str) -> str:
    """Return a text; an empty one, as of a variable that is not set, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _path(text: str) -> Path:
    """Return a path; an empty one would be the working directory."""
    return Path(_given(text))


def _absolute_each(text: str) -> str:
    """Make the directories of `NAME=DIR[,NAME=DIR]` absolute; those of a file of JSON, too."""
    if _given(text).endswith(".json"):
        return _of_json(Path(text))
    pairs = [entry.partition("=") for entry in text.split(",")]
    return ",".join(f"{name}={Path(path).absolute()}" if path else name for name, _, path in pairs)


def _of_json(path: Path) -> str:
    """Read `{NAME: DIR}`, as `multi_lora.json` of vLLM's backend; directories from the file's."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None
    pairs: list[tuple[Any, Any]] = list(found.items()) if isinstance(found, dict) else [("", None)]
    for name, directory in pairs:
        if not isinstance(directory, str) or {*"=,"} & {*name, *directory} or not directory:
            wrong = f"{name!r:.64}: {directory!r:.64}"
            raise argparse.ArgumentTypeError(f"{path} has {wrong}, not a name and its directory")
    folder = path.absolute().parent
    return ",".join(f"{name}={folder / directory}" for name, directory in pairs)


def _absolute(text: str) -> str:
    """Return an absolute path."""
    return str(_path(text).absolute())


def _gigabytes(text: str) -> int:
    """Parse a number of GB (10^9 bytes) to bytes."""
    try:
        return round(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{clip(text)} is not a number of GB") from None


def _instances(text: str) -> tuple[str, int]:
    """Parse MODEL=N to a model and its number of processes."""
    model, _, number = text.partition("=")
    if not (number.isdecimal() and number.isascii() and len(number) < 10):
        raise argparse.ArgumentTypeError(f"{clip(text)} is not MODEL=N")
    return model, int(number)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `slipstream compose`."""
    parser = subparsers.add_parser("compose", help="write a model repository for a checkpoint")
    parser.add_argument(
        "--checkpoint",
        type=_path,
        required=True,
        metavar="PATH",
        help="a Hugging Face directory, or a GGUF file",
    )
    parser.add_argument(
        "--output", type=_path, required=True, metavar="DIR", help="the model repository"
    )
    parser.add_argument(
        "--name",
        default=DEFAULT,
        help="call the models NAME, NAME_preprocessing, NAME_tensorrt_llm and so on; a repository "
        "may have any number of such deployments, each with an engine of its own (%(default)s, "
        "whose other models have no name before theirs)",
    )
    _add_precision(parser)
    _add_engine(parser)
    profile.add_to_compose(parser)
    parser.add_argument("--model-name", type=_given, metavar="NAME", help=help_of("model"))
    parser.add_argument(
        "--chat-template",
        choices=TEMPLATES,
        help="write the chat template of these models into the checkpoint, whose files have none",
    )
    parser.add_argument(
        "--wiring",
        choices=WIRINGS,
        default="composed",
        help="serve `ensemble` as Triton's ensemble of three models, or by one model (%(default)s)",
    )
    parser.add_argument(
        "--instances",
        type=_instances,
        action="append",
        default=[],
        metavar="MODEL=N",
        help=INSTANCES_HELP,
    )
    parser.add_argument(
        "--contract",
        action="append",
        default=[],
        metavar="llmapi[=MODEL][,decoupled]",
        help=CONTRACT_HELP,
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; print what differs from the output, exit code 1 if anything does",
    )


def _add_precision(parser: argparse.ArgumentParser) -> None:
    """Declare the dtypes, and whether results must be deterministic."""
    for name, choices in (
        ("dtype", DTYPES),
        ("backend_model", BACKEND_MODELS),
        ("idle_tuning", ON_OFF),
        ("prompt_unpacking", ON_OFF),
        ("quantization", quant.names()),
        ("speculation", SPECULATIONS),
        ("kv_cache_dtype", KV_CACHE_DTYPES),
        ("logprobs_mode", MODES),
    ):
        parser.add_argument(_flag(name), choices=choices, help=help_of(name))
    parser.add_argument(
        "--deterministic", action="store_const", const=True, help=help_of("deterministic")
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Declare the limits, the cache, and the records of requests."""
    parser.add_argument(
        "--no-kv-cache-reuse",
        action="store_const",
        const=False,
        dest="kv_cache_reuse",
        help="compute every prompt in full, ignoring cached prefixes",
    )
    for name in _DRAFTS:
        parser.add_argument(
            _flag(name),
            type=_absolute if name == "draft_checkpoint" else _given,
            metavar="DIR|FILE" if name == "draft_checkpoint" else "LIST",
            help=help_of(name),
        )
    for name in _COUNTS:
        parser.add_argument(_flag(name), type=int, metavar="N", help=help_of(name))
    parser.add_argument(
        "--kv-cache-host-gb",
        type=_gigabytes,
        dest="kv_cache_host_bytes",
        metavar="GB",
        help=f"10^9 bytes of {help_of('kv_cache_host_bytes')}",
    )
    name = "guide_in_thinking"
    parser.add_argument(_flag(name), action="store_const", const=True, help=help_of(name))
    for name, kind, metavar in (
        ("memory_share", float, "SHARE"),
        ("gpu_hour_price", float, "PRICE"),
        ("target_itl", float, "MS"),
        ("request_log", _given, "FILE"),
        ("kv_events", _given, "PORTS"),
        ("kv_events_topic", _given, "TOPIC"),
        ("thinking_end", _given, "TEXT"),
        ("logits_processors", _given, "LIST"),
        ("adapters", _absolute_each, "LIST"),
        ("adapter_root", _absolute, "DIR"),
        ("adapter_dir", _absolute, "DIR"),
    ):
        parser.add_argument(_flag(name), type=kind, metavar=metavar, help=help_of(name))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(args: argparse.Namespace) -> int:
    """Compose or check.

    Raises ComposeError, ConfigError, CheckpointError or UnsupportedTokenizerError: a checkpoint
    that cannot be served is refused here.
    """
    if needs_conversion(args.checkpoint):
        if args.check:
            raise ComposeError(
                f"{args.checkpoint} has no tokenizer.json yet: compose without --check writes it"
            )
        named = TEMPLATES.get(args.chat_template)
        for path in convert_tokenizer(args.checkpoint, named.tokens if named else ()):
            print(f"wrote {path}")
    if args.chat_template is not None:
        for path in put_template(args.checkpoint, args.chat_template, args.check):
            print(f"wrote {path}")
    names = ("dtype", "quantization", "kv_cache_dtype", "kv_cache_reuse", "deterministic")
    more = (
        "backend_model",
        "idle_tuning",
        "prompt_unpacking",
        "speculation",
        "logprobs_mode",
        *_DRAFTS,
    )
    edits = ("thinking_end", "guide_in_thinking", "logits_processors", "adapters", "adapter_root")
    others = (
        "kv_cache_host_bytes",
        "memory_share",
        "gpu_hour_price",
        "target_itl",
        "request_log",
        "kv_events",
        "kv_events_topic",
        "adapter_dir",
        *edits,
        *more,
        *_COUNTS,
    )
    options = {name: getattr(args, name) for name in (*names, *others)}
    options["model"] = args.model_name
    if args.gpus and not args.profile:
        raise ComposeError("--gpus chooses the GPUs of a profile: it needs --profile")
    if args.profile:
        print(profile.fill(options, args.checkpoint, args.profile, args.gpus))
    instances = dict(args.instances)
    if len(instances) < len(args.instances):
        raise ComposeError("--instances names a model twice")
    cores = num_cores()
    contracts, name = args.contract, args.name
    repository = compose(
        args.checkpoint, args.output, options, args.wiring, instances, cores, contracts, name
    )
    return _check(repository) if args.check else _write(repository)


def _check(repository: Repository) -> int:
    lines = list(differences(repository))
    for line in lines:
        print(line)
    if lines:
        number = f"{len(lines)} difference{'s' * (len(lines) > 1)}"
        print(f"{repository.root}: {number}; compose without --check writes it", file=sys.stderr)
        return 1
    print(f"{repository.root}: as composed, {len(repository.files)} files")
    return 0


def _write(repository: Repository) -> int:
    for line in [*repository.notes, *write(repository)]:
        print(line)
    info = repository.info
    print(
        f"{repository.root}: {info.architecture}, {info.dtype}, vocabulary of "
        f"{info.vocab_size:,}, context of {info.max_positions:,} tokens"
    )
    print(f"serve it: slipstream serve --model-repository {shlex.quote(str(repository.root))}")
    return 0
