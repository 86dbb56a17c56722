"""Find how files spell names of tensors: beginnings depend on the class that wrote them. No torch.

A family's names are those of its class with a head. Files of the class below lack the prefix of the
decoder. Text models beside a tower are `language_model.model...` in files of transformers before
4.52, and `model.language_model...` where something else than `save_pretrained` wrote them since.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

from slipstream.models.axes import TensorNames

HEAD = "lm_head"  # by the decoder's names


class Spelling(NamedTuple):
    """Beginnings of names as the family has them, with those of the files, the first that fits."""

    begins: tuple[tuple[str, str], ...] = ()

    def of(self, name: str) -> str:
        """Return the files' name of a tensor, by the family's."""
        return _begun(name, self.begins)

    def plain(self, name: str) -> str:
        """Return the family's name of a tensor, by the files'."""
        return _begun(name, [(theirs, own) for own, theirs in self.begins])


def spelling_of(tensors: TensorNames, names: Collection[str]) -> Spelling:
    """Return the spelling of files that have tensors of these names; nothing known: the family's.

    The decoder is where layers and an embedding are, and nowhere else is one of them.
    """
    own = f"{tensors.own['model']}." if "model" in tensors.own else tensors.prefix
    layers = f"{tensors.stored('model.layers').removeprefix(own)}."
    if any(name.startswith(own + layers) for name in names):
        return Spelling()
    embedding = tensors.stored("model.embed_tokens").removeprefix(own)
    found = [place for place in _places(embedding, names) if _has(names, place + layers)]
    if not found and _has(names, layers):  # the embedding is the head, by the head's name
        found = [""]
    if len(found) != 1:
        return Spelling()
    head = tensors.stored(HEAD)
    heads = _places(head.rpartition(".")[2], names)
    begins = [(own, found[0])]
    if len(heads) == 1 and not _has(names, f"{head}."):
        begins.insert(0, (f"{head}.", f"{heads[0]}{head.rpartition('.')[2]}."))
    return Spelling(tuple(begins))


def why_missing(name: str, head: str, names: Collection[str]) -> str:
    """Return what to say of a missing tensor, by the decoder's name; `head`: the files' name."""
    if name.rpartition(".")[0] != HEAD:
        return ""
    if _has(names, f"{head}."):
        return ": the head of this architecture has it"
    if name.endswith(".bias"):
        return ": there is no head, and the head of this architecture has a bias"
    return (
        ": there is no head, as in files of transformers' classes XModel, of embedding models too, "
        "and tie_word_embeddings is not true, said or by default, so the embedding is none either"
    )


def _places(module: str, names: Collection[str]) -> list[str]:
    """Return what names of a module's tensors have before its own, `a.b.`, sorted."""
    tensor = re.compile(rf"((?:.+\.)?){re.escape(module)}\.[^.]+")
    return sorted({found[1] for name in names if (found := tensor.fullmatch(name))})


def _has(names: Collection[str], begin: str) -> bool:
    return any(name.startswith(begin) for name in names)


def _begun(name: str, begins: Collection[tuple[str, str]]) -> str:
    """Return a name with another beginning, if it has one of these."""
    for old, new in begins:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
