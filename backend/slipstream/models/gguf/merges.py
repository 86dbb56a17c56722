"""Rebuild the merges of a SentencePiece BPE model, of which files keep only the tokens' scores."""

from collections.abc import Mapping, Sequence


def merges_of(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, in the order in which they are merged.

    SentencePiece merges the pair whose result has the best score. Pairs of one result, or of equal
    scores, follow transformers' order: longer left halves first, then lower ids.
    """
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for text, token_id in vocabulary.items():
        pairs = (
            (text[:at], text[at:])
            for at in range(1, len(text))
            if text[:at] in vocabulary and text[at:] in vocabulary
        )
        ordered = sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(-scores[token_id], -len(pair[0]), -len(pair[1]), pair) for pair in ordered]
    found.sort(key=lambda merge: merge[:3])
    return [pair for *_, pair in found]
