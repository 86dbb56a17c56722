"""List the architectures that are served: those of the files in `families/`. No torch."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from slipstream.models import families
from slipstream.models.family import Family, refused, registered
from slipstream.models.wrapped import Whole, registered_wholes

# Ends of names of classes without a head, and of those with one; a text model has no tower.
_HEADS = {
    "TextModel": ("ForCausalLM", "LMHeadModel"),
    "Model": ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel"),
}


@cache
def _import_families() -> None:
    """Import all files of `families/`; each registers its family."""
    for module in iter_modules(families.__path__):
        import_module(f"{families.__name__}.{module.name}")


def supported() -> tuple[str, ...]:
    """Return the values of `architectures` in config.json that are served, sorted."""
    _import_families()
    return tuple(sorted(registered()))


def with_head(names: object) -> object:
    """Return the value of `architectures` for the class with a head, where it names one without.

    transformers calls `XModel`, or `XTextModel` for a text model beside a tower, what is below
    `XForCausalLM`; files of it are served where embeddings are tied.
    """
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return names
    name, known = names[0], {*supported(), *wholes()}
    end = next((end for end in _HEADS if name.endswith(end) and name not in known), None)
    found = [] if end is None else [name.removesuffix(end) + head for head in _HEADS[end]]
    return next(([each] for each in found if each in known), names)


def why_not(names: object) -> str:
    """Return why what `architectures` names is not served, where a file says so; else nothing."""
    _import_families()
    return refused().get(str(names[0]), "") if isinstance(names, list) and len(names) == 1 else ""


def family_of(architecture: str) -> Family:
    """Return the family of a supported architecture."""
    _import_families()
    return registered()[architecture]


def wholes() -> tuple[str, ...]:
    """Return the values of `architectures` of which the text model is served alone, sorted."""
    _import_families()
    return tuple(sorted(registered_wholes()))


def whole_of(names: object) -> Whole | None:
    """Return what `architectures` names, if the text model of that is served alone."""
    _import_families()
    if not isinstance(names, list) or len(names) != 1:
        return None
    return registered_wholes().get(str(names[0]))
