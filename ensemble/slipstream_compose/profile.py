"""`slipstream profile`: which precision, ranks, cache and tokens of a step serve a checkpoint best.

Nothing is loaded: shapes of the checkpoint and figures of the GPU say what each profile costs.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.profiles import (
    CARDS,
    CONTEXT,
    GOALS,
    ONE,
    Card,
    Profile,
    best_of_splits,
    cards_here,
    profiles,
    select,
)

AUTO = "auto"  # of `compose --profile`: throughput


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `slipstream profile`."""
    parser = subparsers.add_parser("profile", help="choose how to serve a checkpoint on a GPU")
    parser.add_argument("verb", choices=("list", "select"), help="print all, or choose one")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="PATH")
    add_gpus(parser)
    parser.add_argument("--goal", choices=GOALS, default="throughput", help="(%(default)s)")


def add_to_compose(parser: argparse.ArgumentParser) -> None:
    """Declare what `slipstream compose` takes of a profile."""
    goals = (AUTO, *GOALS)
    text = "choose precision, cache and tokens of a step by a goal, where no option says otherwise"
    parser.add_argument("--profile", choices=goals, help=f"{text}; auto: throughput")
    add_gpus(parser)


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """Declare the GPUs to choose for."""
    parser.add_argument(
        "--gpus",
        nargs="+",
        choices=CARDS,
        metavar="NAME",
        help=f"GPUs of a profile, of {', '.join(CARDS)} (default: those of this machine)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the profiles, or the best one and why. Raises ConfigError, CheckpointError."""
    card, count = card_of(args.gpus)
    config = EngineConfig(checkpoint=str(args.checkpoint))
    found = profiles(config, card)
    lines = table(found, card)
    divided = best_of_splits(config, card, count, args.goal) if count > 1 else []
    for line in [*lines, *split_table(divided, count, args.goal)]:
        print(line)
    if args.verb == "select":
        best = select(divided or found, args.goal)
        print(f"\n{args.goal}: {reason(best, found, args.goal)}")
        flags = [f"--{k.replace('_', '-')} {v}" for k, v in best.options(args.goal).items()]
        path = shlex.quote(str(args.checkpoint))
        print(f"  slipstream compose --checkpoint {path} {' '.join(flags)} --output DIR")
    return 0


def card_of(given: Sequence[str] | None) -> tuple[Card, int]:
    """Return the kind of the GPUs, and how many there are. Raises ConfigError."""
    names = list(given) if given else cards_here()
    if not names:
        raise ConfigError(f"gpus: none is here; name one with --gpus, of {', '.join(CARDS)}")
    if len(set(names)) > 1:
        raise ConfigError(f"gpus = {' '.join(names)}: they differ; choose a profile for each")
    return CARDS[names[0]], len(names)


def split_table(found: Sequence[Profile], count: int, goal: str) -> list[str]:
    """Return the ways to divide GPUs as lines: memory of the fullest rank, and times."""
    if not found:
        return []
    lines = [
        "",
        f"{count} GPUs, by {goal}; times of exchanges are published ones:",
        f"{'GPUs':34}{'weights':8}{'cache':7}{'GB a GPU':>9}{'1: ms':>8}{'most':>6}{'ms':>8}"
        f"{'tokens/s':>10}",
    ]
    for each in found:
        if each.refused:
            lines.append(f"{each.split!s:34}refused: {each.refused}")
            continue
        most = each.rows * each.split.replicas
        lines.append(
            f"{each.split!s:34}{each.quantization:8}{each.kv_cache_dtype:7}"
            f"{each.weight_bytes / 1e9:9.1f}{each.one_ms:8.2f}{most:6}{each.many_ms:8.2f}"
            f"{each.tokens_s:10,.0f}"
        )
    return lines


def table(found: Sequence[Profile], card: Card) -> list[str]:
    """Return the profiles as lines."""
    source = "measured" if card.is_measured else "nine tenths of what is published"
    lines = [
        f"{card.name}: {card.memory / 1e9:.0f} GB, {card.read / 1e12:.2f} TB/s ({source}); "
        f"modelled, within 15 % of recorded steps; sequences of {CONTEXT:,} tokens",
        f"{'weights':8}{'cache':7}{'GB':>7}{'cache tokens':>14}{'1: ms':>8}{'most':>6}{'ms':>8}"
        f"{'tokens/s':>10}",
    ]
    for each in found:
        start = f"{each.quantization:8}{each.kv_cache_dtype:7}"
        if each.refused:
            lines.append(f"{start} refused: {each.refused}")
            continue
        lines.append(
            f"{start}{each.weight_bytes / 1e9:7.1f}{each.cache_tokens:14,}{each.one_ms:8.2f}"
            f"{each.rows:6}{each.many_ms:8.2f}{each.tokens_s:10,.0f}"
            + f"  reckoned: no {card.name} has timed int8"
            * each.is_reckoned
        )
    return lines


def reason(best: Profile, found: Sequence[Profile], goal: str) -> str:
    """Return why a profile is the best, beside the checkpoint as it is."""
    what = f"weights {best.quantization}, cache {best.kv_cache_dtype}"
    if best.split != ONE:
        what += f", {best.split}"
    plain = next(e for e in found if (e.quantization, e.kv_cache_dtype) == ("auto", "auto"))
    if plain.refused:
        return f"{what}: as it is, the checkpoint cannot be served ({plain.refused})"
    if best == plain:
        return f"{what}: nothing that keeps accuracy is more than 3 % better"
    if goal == "latency":
        return f"{what}: {best.one_ms:.2f} ms a token in place of {plain.one_ms:.2f}"
    return f"{what}: {best.tokens_s:,.0f} tokens/s in place of {plain.tokens_s:,.0f}"


def fill(options: dict[str, Any], checkpoint: Path, goal: str, gpus: Sequence[str] | None) -> str:
    """Add a profile's options where an operator gave none; return what was chosen, in a line."""
    goal = "throughput" if goal == AUTO else goal
    card, count = card_of(gpus)
    config = EngineConfig(checkpoint=str(checkpoint))
    found = profiles(config, card)
    best = select(best_of_splits(config, card, count, goal) if count > 1 else found, goal)
    for name, value in best.options(goal).items():
        if options.get(name) is None:
            options[name] = value
    return f"profile for {goal} on {card.name}: {reason(best, found, goal)}"
