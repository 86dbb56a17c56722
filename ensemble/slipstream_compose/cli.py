"""`slipstream compose`: write, or check, the model repository of a checkpoint."""

import argparse
import sys
from pathlib import Path

from slipstream.models.check import check_tensors
from slipstream_contract.errors import clip
from slipstream_contract.processes import num_cores
from slipstream_contract.vocab import TokenBytes
from slipstream_preprocessing.tokenizer import load_tokenizer

from slipstream_compose.compose import (
    BLOCK_SIZES,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    WIRINGS,
    ComposeError,
    Repository,
    compose,
    differences,
    write,
)
from slipstream_compose.convert import convert_tokenizer, needs_conversion

_OPTIONS = {
    "kv_cache_tokens": "tokens that the KV cache holds (default: what memory allows)",
    "max_num_seqs": "sequences that generate at the same time",
    "max_num_batched_tokens": "tokens of one step, prompts and generated ones together",
    "max_model_len": "tokens of prompt and output together (default: the checkpoint's context)",
    "attention_window": "tokens of a sequence that stay in the cache: it may then go on for ever "
    "(on a CPU only; default: all that it has)",
    "sink_tokens": "how many of these are the first of the sequence (default: 0; 4 is usual)",
    "max_waiting": "requests that may wait in the engine; more are refused (default: 4096)",
    "max_waiting_tokens": "tokens of their prompts, likewise (default: 2097152)",
    "long_prompt_tokens": "chunks of longer prompts about double a step of running streams "
    "(default: 1024)",
    "stuck_after_s": "seconds after which a step counts as hanging: the engine is killed and "
    "started again (default: 60)",
    "block_size": f"tokens in a block of the KV cache, one of {', '.join(map(str, BLOCK_SIZES))}",
}


def _gigabytes(text: str) -> int:
    """So many as bytes."""
    try:
        return round(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{clip(text)} is not a number of GB") from None


def _instances(text: str) -> tuple[str, int]:
    """A model, and its processes."""
    model, _, number = text.partition("=")
    if not (number.isdecimal() and number.isascii() and len(number) < 10):
        raise argparse.ArgumentTypeError(f"{clip(text)} is not MODEL=N")
    return model, int(number)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `slipstream compose`."""
    parser = subparsers.add_parser("compose", help="write a model repository for a checkpoint")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a Hugging Face directory"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="the model repository"
    )
    _add_precision(parser)
    _add_engine(parser)
    parser.add_argument("--model-name", metavar="NAME", help="what users are shown")
    parser.add_argument(
        "--wiring",
        choices=WIRINGS,
        default="composed",
        help="`ensemble` as Triton's ensemble of three models, or served by one (%(default)s)",
    )
    parser.add_argument(
        "--instances",
        type=_instances,
        action="append",
        default=[],
        metavar="MODEL=N",
        help="processes of preprocessing, postprocessing, tensorrt_llm_bls or vllm_model (default: "
        "2; 3 of postprocessing where this machine has 12 cores or more, 1 of the last two where "
        "it has one or two); more carry more streams where there are cores for them",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit code 1 if anything there differs, and say what",
    )


def _add_precision(parser: argparse.ArgumentParser) -> None:
    """In which numbers the model computes, and which bits of a token may vary."""
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of weights and activations (default: auto, the checkpoint's; float32 on a CPU)",
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="fp8: weights and activations in e4m3, made from the checkpoint at start (needs a GPU "
        "of compute capability 8.9 or newer to be fast; default: none)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        help="of the KV cache: in 8 bits 1.97 times as many tokens fit as in 16, in 4 bits 3.76 "
        "times (default: auto, that of the activations)",
    )
    parser.add_argument(
        "--deterministic",
        action="store_const",
        const=True,
        help="tokens of a request do not depend on other requests, bit for bit; slower",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Bounds, the cache, and what is told of requests."""
    parser.add_argument(
        "--no-kv-cache-reuse",
        action="store_const",
        const=False,
        dest="kv_cache_reuse",
        help="compute every prompt anew, even what the KV cache still has of it",
    )
    for name, text in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    parser.add_argument(
        "--kv-cache-host-gb",
        type=_gigabytes,
        dest="kv_cache_host_bytes",
        metavar="GB",
        help="host memory, page-locked, to which blocks of the KV cache move instead of being lost "
        "(10^9 bytes; default: 0)",
    )
    parser.add_argument(
        "--gpu-hour-price",
        type=float,
        metavar="PRICE",
        help="of an hour of one GPU, in any currency: metrics then tell the cost of requests",
    )
    parser.add_argument(
        "--request-log",
        metavar="FILE",
        help="a file, by its absolute path, that gets a line of JSON for every request taken",
    )


def run(args: argparse.Namespace) -> int:
    """Compose or check.

    Raises ComposeError, CheckpointError or UnsupportedTokenizerError: what cannot be served is
    refused here already.
    """
    if needs_conversion(args.checkpoint):
        if args.check:
            raise ComposeError(f"{args.checkpoint} has no tokenizer.json yet: compose makes it")
        print(f"wrote {convert_tokenizer(args.checkpoint)}")
    names = ("dtype", "quantization", "kv_cache_dtype", "kv_cache_reuse", "deterministic")
    others = ("kv_cache_host_bytes", "gpu_hour_price", "request_log", *_OPTIONS)
    options = {name: getattr(args, name) for name in (*names, *others)}
    options["model"] = args.model_name
    instances = dict(args.instances)
    cores = num_cores()
    repository = compose(args.checkpoint, args.output, options, args.wiring, instances, cores)
    check_tensors(args.checkpoint)
    if repository.info.has_tokenizer:
        load_tokenizer(args.checkpoint)
        TokenBytes.load(args.checkpoint)
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
    print(f"serve it: slipstream serve --model-repository {repository.root}")
    return 0
