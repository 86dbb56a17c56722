"""AutoAWQ: 4 bits by groups with zeros, in the packing of its GEMM or of its GEMV kernels."""

import torch

from slipstream.models.formats.format import (
    Format,
    Names,
    Row,
    listed,
    listed_by_turns,
    spellings,
)
from slipstream.models.formats.module import FLOATS, Module, num_words, unpack, without
from slipstream.models.reader import Reader, words
from slipstream.quant.matrix import Kind, QuantMatrix, halves

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds column i of eight
_BITS = 4
VERSIONS = ("gemm", "gemv")
_VERSION_KEYS = ("version", "format", "checkpoint_format")


class Awq(Format):
    """`W[n, k] = (q - z) * s`; norms and rows before a matrix have AWQ's scales already."""

    methods = ("awq",)
    title = "AutoAWQ"
    rows = (
        Row("gemm", "`qweight` i32 `[K, N/8]`, interleaved columns; groups, zeros", "W4"),
        Row("gemv", "`qweight` i32 `[N, K/8]`; padded groups, zeros", "W4"),
    )
    keys = words(
        "bits w_bit group_size q_group_size zero_point version backend modules_to_not_convert "
        "do_fuse fuse_max_seq_len modules_to_fuse exllama_config format checkpoint_format "
        # as for GPTQ: transformers 5 and GPTQModel have one class for both
        "act_group_aware batch_size block_name_to_quantize cache_block_outputs damp_percent "
        "dataset desc_act lm_head max_input_length meta model_seqlen "
        "module_name_preceding_first_block modules_in_block_to_quantize pack_dtype pad_token_id "
        "sym tokenizer true_sequential"
    )

    def __init__(self, config: Reader) -> None:
        super().__init__(config)
        bits = "bits" if config.has("bits") else "w_bit"
        if config.whole(bits, _BITS) != _BITS:
            raise config.refusal(bits, "is not 4")
        said = [key for key in _VERSION_KEYS if config.has(key)]
        for key in said:
            if str(config.get(key)).lower() not in VERSIONS:
                raise config.refusal(key, f"is not one of {', '.join(VERSIONS)}")
        self._version = str(config.get(said[0])).lower() if said else "gemm"
        self.named_blocks = Names(listed_by_turns(config, "modules_in_block_to_quantize"))
        self._group_key = "group_size" if config.has("group_size") else "q_group_size"
        value = config.get(self._group_key)
        self._group = 0 if value == -1 else config.whole(self._group_key, 128)
        self._has_zeros = config.flag("zero_point", default=True)
        self._excluded = listed(config, "modules_to_not_convert")

    def excludes(self, name: str) -> str:
        """Return `modules_to_not_convert` where a name in it is part of the module's."""
        is_out = any(each in own for each in self._excluded for own in spellings(name))
        return "modules_to_not_convert" if is_out else ""

    def holds(self, module: Module) -> bool:
        """Whether there are packed weights."""
        return module.has("qweight")

    def units(self, module: Module, outputs: int, inputs: int) -> tuple[int, int]:
        """Return words of columns, and groups; of rows in their order, words of groups."""
        group = self._group or inputs
        return (_BITS * 2, group) if self._version == "gemm" else (1, group * 8 * _multiple(group))

    def load(self, module: Module, outputs: int, inputs: int) -> QuantMatrix:
        """Read it; a group that does not divide the inputs has no place in this format."""
        group = self._group or inputs
        if inputs % group:
            raise self.config.refusal(self._group_key, f"does not divide {inputs} inputs")
        module.drop("g_idx", "not used: AWQ keeps the order of inputs")
        if self._version == "gemv":
            return self._gemv(module, outputs, inputs, group)
        groups = inputs // group
        words_ = module.take("qweight", ("I32",), (inputs, num_words(outputs, _BITS)))
        codes = _columns(words_, outputs).T
        scales = module.take("scales", FLOATS, (groups, outputs)).T.contiguous()
        zeros = None
        if module.has("qzeros") or self._has_zeros:
            packed = module.take("qzeros", ("I32",), (groups, num_words(outputs, _BITS)))
            zeros = without(_columns(packed, outputs).T.contiguous(), 8)
        return QuantMatrix(Kind.W4, halves(codes), scales, group, inputs, zeros=zeros)

    def _gemv(self, module: Module, outputs: int, inputs: int, group: int) -> QuantMatrix:
        """Read rows in natural order; groups are padded to whole words."""
        groups = inputs // group
        multiple = _multiple(group)
        width = -(-num_words(groups, _BITS) // multiple) * multiple
        words_ = module.take("qweight", ("I32",), (outputs, num_words(inputs, _BITS)))
        codes = unpack(words_, _BITS, inputs)
        scales = module.take("scales", FLOATS, (outputs, width * 8))[:, :groups].contiguous()
        zeros = None
        if module.has("qzeros") or self._has_zeros:
            packed = module.take("qzeros", ("I32",), (outputs, width))
            zeros = without(unpack(packed, _BITS, groups).contiguous(), 8)
        return QuantMatrix(Kind.W4, halves(codes), scales, group, inputs, zeros=zeros)


def _multiple(group: int) -> int:
    """Return how many words of zeros a row has a multiple of."""
    return {64: 2, 32: 4}.get(group, 1)


def _columns(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack `[n, words]` into `[n, count]` columns in their order."""
    values = unpack(packed, _BITS, packed.shape[-1] * 8)
    return values.view(len(values), -1, 8)[..., list(_ORDER)].flatten(1)[:, :count]
