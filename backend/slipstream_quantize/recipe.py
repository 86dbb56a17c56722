"""Schemes that `slipstream quantize` writes: numbers, groups, activations, methods. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.errors import ConfigError

GROUPS = (128, 64, 32, 16)  # of inputs that share a scale, the first that divides all matrices
BLOCK = 128  # rows and inputs of a block of Hugging Face's `fp8`
NVFP4_GROUP = 16
LENGTH = 512  # tokens of a piece of text
SAMPLES = {"cpu": 32, "cuda": 256}  # pieces to calibrate with
MEASURED = 16  # pieces to measure on
ROW_TEXT = {"cpu": (2, 256), "cuda": (8, LENGTH)}  # pieces and tokens by which rows are chosen
ROWS_NONE, ROWS_AUTO = "none", "auto"  # of --rows16


@dataclass(frozen=True, slots=True)
class Recipe:
    """A scheme.

    Attributes:
        kind: numbers of the weights: "int", "e4m3" or "e2m1".
        bits: of a weight.
        group: inputs that share a scale; 0: all of an output.
        symmetric: whether zero is the integer 0; else each group has its own.
        activations: what they are rounded to, a scale for each token: "", "int8" or "e4m3".
        smooth: how scales move from activations into weights: "", "activations" or "weights".
        gptq: whether a column's error goes into the columns that are not rounded yet.
        clips: whether ranges are searched; else a range is that of the weights.
        format: the writer's; see `formats.py`.
    """

    kind: str
    bits: int
    format: str
    group: int = 0
    symmetric: bool = True
    activations: str = ""
    smooth: str = ""
    gptq: bool = False
    clips: bool = False

    @property
    def needs_text(self) -> bool:
        """Whether activations of a text decide."""
        return self.gptq or bool(self.smooth)


_FP8 = Recipe("e4m3", 8, "float-quantized", activations="e4m3", clips=True)
_INT4 = Recipe("int", 4, "pack-quantized", GROUPS[0], symmetric=False, clips=True)
RECIPES = {
    "fp8": _FP8,
    "fp8-gptq": replace(_FP8, gptq=True),
    "fp8-block": Recipe("e4m3", 8, "fp8", BLOCK, activations="e4m3", clips=True),
    "int8": Recipe("int", 8, "pack-quantized"),
    "int8-sq": Recipe("int", 8, "int-quantized", activations="int8", smooth="activations"),
    "int4": _INT4,
    "awq": replace(_INT4, smooth="weights"),
    "gptq": replace(_INT4, gptq=True),
    "awq-gptq": replace(_INT4, smooth="weights", gptq=True),
    "w4a8": replace(_INT4, symmetric=True, activations="e4m3", smooth="weights", gptq=True),
    "nvfp4": Recipe("e2m1", 4, "nvfp4-pack-quantized", NVFP4_GROUP, clips=True),
}
SUMMARIES = {
    "fp8": "weights in e4m3, a scale for each output; activations too, a scale for each token",
    "fp8-gptq": "the same, errors corrected by the weights not yet rounded; needs text",
    "fp8-block": "fp8 with a scale for 128 x 128 weights: Hugging Face's `fp8`",
    "int8": "weights in 8 bits, a scale for each output; activations stay in 16",
    "int8-sq": "weights and activations in 8 bits, smoothed (SmoothQuant); needs text",
    "int4": "weights in 4 bits by groups, rounded to the nearest, ranges searched",
    "awq": "the same behind scales that protect what large activations meet; needs text",
    "gptq": "the same, errors corrected by the weights not yet rounded; needs text",
    "awq-gptq": "both: the most exact in 4 bits; needs text",
    "w4a8": "as awq-gptq without zeros, activations in e4m3; needs text",
    "nvfp4": "weights in e2m1, a scale in e4m3 for 16 of them",
}


def settled(name: str, group: int | None, symmetric: bool, inputs: Sequence[int]) -> Recipe:
    """Return a recipe with this group, or the first that divides all `inputs`.

    Raises `ConfigError` for an option that the scheme does not have, and for a group that divides
    not all of them: readers of these formats refuse it.
    """
    recipe = RECIPES[name]
    has_groups = recipe.kind == "int" and recipe.group > 0
    if (group is not None or symmetric) and not has_groups:
        option = "--symmetric" if group is None else f"--group-size {group}"
        raise ConfigError(f"{option}: --scheme {name} has no groups with zeros to choose")
    if recipe.kind == "e2m1" and any(size % recipe.group for size in inputs):
        wrong = next(size for size in inputs if size % recipe.group)
        raise ConfigError(f"--scheme {name} needs inputs in multiples of {recipe.group}: {wrong}")
    if not has_groups:
        return recipe
    fitting = [size for size in GROUPS if not any(width % size for width in inputs)]
    if group is None and not fitting:
        wide = next(width for width in inputs if width % GROUPS[-1])
        raise ConfigError(
            f"--scheme {name}: a matrix of {wide} inputs is no multiple of a group of "
            f"{GROUPS[-1]}; --group-size names another"
        )
    if group is not None and any(width % group for width in inputs):
        wide = next(width for width in inputs if width % group)
        raise ConfigError(f"--group-size {group} does not divide the {wide} inputs of a matrix")
    chosen = fitting[0] if group is None else group
    return replace(recipe, group=chosen, symmetric=recipe.symmetric or symmetric)
