"""Compare the tokenizers of a model and of what drafts for it. No torch."""

from pathlib import Path

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError
from slipstream.models.files import read_json

_FILE = "tokenizer.json"


class _Vocabulary:
    """The tokens of a tokenizer.json, and which of them are special."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / _FILE
        data = read_json(self.path)
        model, added = data.get("model"), data.get("added_tokens", [])
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocab, list):  # Unigram: (text, score) by id
            vocab = {str(entry[0]): number for number, entry in enumerate(vocab)}
        if not isinstance(vocab, dict) or not isinstance(added, list):
            raise CheckpointError(f"{self.path}: has no model.vocab, or no list of added_tokens")
        self.ids: dict[str, object] = dict(vocab)
        self.special: set[str] = set()
        for token in added:
            if not isinstance(token, dict) or not isinstance(token.get("content"), str):
                raise CheckpointError(f"{self.path}: added_tokens has {clip(token)}")
            self.ids[token["content"]] = token.get("id")
            if token.get("special"):
                self.special.add(token["content"])


def check_same_tokens(target: Path, draft: Path) -> None:
    """Raise `CheckpointError` unless both checkpoints name the same tokens by the same ids.

    It names the first token that differs, or that is special in one of them alone. Merges and
    normalisation do not matter: drafts are made from ids. A target without a tokenizer is served
    by ids, and so is its draft.
    """
    if not (target / _FILE).is_file():
        return
    if not (draft / _FILE).is_file():
        raise CheckpointError(f"{draft / _FILE}: no such file to compare with the target's")
    own, other = _Vocabulary(target), _Vocabulary(draft)
    if own.ids != other.ids:
        for text in sorted(own.ids.keys() | other.ids.keys()):
            ours, theirs = own.ids.get(text), other.ids.get(text)
            if ours != theirs:
                raise CheckpointError(
                    f"{other.path}: token {clip(text)} is {clip(theirs)}, but {clip(ours)} in "
                    f"{own.path}: a draft needs the tokenizer of its target"
                )
    differing = sorted(own.special ^ other.special)
    if differing:
        raise CheckpointError(
            f"{other.path}: token {clip(differing[0])} is special in only one of it and {own.path}"
        )
