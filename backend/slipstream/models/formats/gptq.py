"""GPTQ as AutoGPTQ and GPTQModel store it, versions 1 and 2; also AutoRound's in that layout."""

import math
import re

import torch
from slipstream_contract.errors import clip

from slipstream.models.formats.format import (
    SIGNS,
    Format,
    Names,
    Row,
    compiled,
    listed_by_turns,
    parts_of,
    spellings,
)
from slipstream.models.formats.inputs import is_sorted, order_of
from slipstream.models.formats.module import (
    FLOATS,
    WORD,
    Module,
    num_groups,
    num_words,
    unpack,
    without,
)
from slipstream.models.reader import Reader, words
from slipstream.quant.matrix import Kind, QuantMatrix, halves

BITS = (2, 3, 4, 8)
VERSIONS = ("gptq", "gptq_v2")
_METHODS = ("gptq", "auto-round", "intel/auto-round")
_OF_V2 = ("gptq_v2", "auto_round:gptqmodel")  # zeros as they are
_PACKINGS = (
    *("auto_round:auto_gptq", "auto_round:gptq", "autoround:exllama", "auto_gptq"),
    "auto_round:gptqmodel",
)
_PLAIN_BITS = 16  # and more: not quantised


class Gptq(Format):
    """`W = s * (q - z)`; version 1 stores `z - 1`, whose place may be another by `g_idx`."""

    methods = _METHODS
    title = "GPTQ"
    rows = (
        Row("gptq (v1), gptq_v2", "`qweight` i32 `[K b/32, N]`, 2, 3, 4 bits; groups, zeros", "W4"),
        Row("the same", "8 bits", "W8"),
        Row("desc_act, static_groups", "`g_idx` i32: sorted once, inputs follow", "W4, W8"),
    )
    keys = words(
        "bits group_size desc_act sym checkpoint_format format static_groups true_sequential "
        "damp_percent damp_auto_increment lm_head dynamic meta pack_dtype model_name_or_path "
        "model_file_base_name is_marlin_format quantizer use_exllama exllama_config dataset "
        "tokenizer model_seqlen block_name_to_quantize module_name_preceding_first_block "
        "batch_size pad_token_id max_input_length cache_block_outputs modules_in_block_to_quantize "
        "use_cuda_fp16 disable_exllama backend packing_format data_type iters seqlen nsamples lr "
        "minmax_lr autoround_version enable_quanted_input enable_minmax_tuning amp "
        "low_gpu_mem_usage train_bs scale_dtype gradient_accumulate_steps act_group_aware "
        "extra_config act_bits act_data_type act_dynamic act_group_size act_sym "
        "enable_norm_bias_tuning model_free quant_block_list "
        "to_quant_block_names"
    )

    def __init__(self, config: Reader) -> None:
        super().__init__(config)
        key = "checkpoint_format" if config.has("checkpoint_format") else "format"
        stored = str(config.get(key) or "gptq")
        packing = config.get("packing_format")
        if packing is not None and packing not in _PACKINGS:
            raise config.refusal("packing_format", f"is not one of {', '.join(_PACKINGS)}")
        if stored not in (*VERSIONS, *_PACKINGS) or config.get("is_marlin_format"):
            wrong = "is_marlin_format" if config.get("is_marlin_format") else key
            raise config.refusal(wrong, f"is not implemented; {' or '.join(VERSIONS)} is")
        self._added = 0 if stored in _OF_V2 or packing in _OF_V2 else 1
        if config.has("act_bits") and config.whole("act_bits") < _PLAIN_BITS:
            raise config.refusal("act_bits", "is not implemented; 16 is")
        if not str(config.get("data_type") or "int").startswith("int"):
            raise config.refusal("data_type", "is not implemented; int is")
        if config.has("pack_dtype") and config.get("pack_dtype") != "int32":
            raise config.refusal("pack_dtype", "is not int32")
        self._desc_act = config.flag("desc_act", default=False)
        self._static = config.flag("static_groups", default=False)
        self._dynamic, self._extra = config.child("dynamic"), config.child("extra_config")
        self.named_blocks = Names(listed_by_turns(config, "modules_in_block_to_quantize"))
        self._rules = [self._compiled(each) for each in self._dynamic.data]
        self._extra_rules = [
            (compiled(self._extra, each, each), each)
            for each in self._extra.data
            if SIGNS & {*each}
        ]
        self._found: dict[str, tuple[str, Reader | None]] = {}  # of modules
        self._settings(config)

    @staticmethod
    def _settings(at: Reader, over: Reader | None = None) -> tuple[int, int]:
        """Return bits and inputs of a group (0: all), of the first object that has them."""

        def of(key: str) -> Reader:
            return over if over is not None and over.has(key) else at

        bits = of("bits").whole("bits", 4)
        if bits not in BITS:
            raise of("bits").refusal("bits", f"is not one of {', '.join(map(str, BITS))}")
        is_all = of("group_size").get("group_size") == -1
        return bits, 0 if is_all else of("group_size").whole("group_size", 128)

    def _compiled(self, rule: str) -> tuple[re.Pattern[str], str, bool]:
        """Return a rule of `dynamic` as an expression, and whether it leaves modules out."""
        is_out = rule.startswith("-:")
        pattern = rule[2:] if is_out else rule.removeprefix("+:")
        return compiled(self._dynamic, rule, pattern), rule, is_out

    def _rule(self, name: str) -> tuple[str, Reader | None]:
        """Return the key that leaves a module out, or empty and the object that overrides."""
        if name not in self._found:
            self._found[name] = self._dynamic_rule(name) or self._extra_rule(name) or ("", None)
        return self._found[name]

    def _dynamic_rule(self, name: str) -> tuple[str, Reader | None] | None:
        own = spellings(name)
        for expression, rule, is_out in self._rules:
            if any(expression.match(each) for each in own):
                return ("dynamic", None) if is_out else ("", self._dynamic.child(rule))
        return None

    def _extra_rule(self, name: str) -> tuple[str, Reader | None] | None:
        """Return AutoRound's: of the longest name that is part of the module's, else by pattern."""
        own = spellings(name)
        named = (each for each in parts_of(name) if each in self._extra.data)
        by_pattern = (
            rule for found, rule in self._extra_rules if any(found.match(each) for each in own)
        )
        rule = next(named, None) or next(by_pattern, None)
        if rule is None:
            return None
        settings = self._extra.child(rule)
        is_out = settings.has("bits") and settings.whole("bits") >= _PLAIN_BITS
        return ("extra_config", None) if is_out else ("", settings)

    def excludes(self, name: str) -> str:
        """Return `dynamic` or AutoRound's `extra_config`, whose rule leaves the module out."""
        return self._rule(name)[0]

    def holds(self, module: Module) -> bool:
        """Whether there are packed weights."""
        return module.has("qweight")

    def units(self, module: Module, outputs: int, inputs: int) -> tuple[int, int]:
        """Return words of zeros, and groups in whole words."""
        group = self._settings(self.config, self._rule(module.name)[1])[1] or inputs
        if is_sorted(module, "g_idx", inputs, group):
            group = 1
        return WORD, math.lcm(group, WORD)

    def load(self, module: Module, outputs: int, inputs: int) -> QuantMatrix:
        """Read it, and sort inputs by their groups if they are not."""
        rule = self._rule(module.name)[1]
        bits, group = self._settings(self.config, rule)
        group = group or inputs
        order = order_of(module, "g_idx", outputs, inputs, group)
        scaled = inputs if order is None else order.scaled
        groups, mask = num_groups(scaled, group), (1 << bits) - 1
        words_ = module.take("qweight", ("I32",), (num_words(inputs, bits), outputs))
        codes = unpack(words_.T, bits, inputs)
        scales = module.take("scales", FLOATS, (groups, outputs)).T.contiguous()
        packed = module.take("qzeros", ("I32",), (groups, num_words(outputs, bits)))
        zeros = (unpack(packed, bits, outputs).T.int() + self._added) & mask
        if self._added and not zeros.is_meta and not bool(zeros.all()):
            made = self.config.child("meta").get("quantizer") or "an unknown producer"
            module.note(f"zeros of GPTQ version 1 wrap to 0, as {clip(made)} may not have meant")
        self._check_zeros(module, zeros, bits, rule)
        if self._desc_act and groups > 1 and not module.has("g_idx"):
            raise module.refusal("g_idx", "is missing, but desc_act = true")
        if order is not None and not (self._desc_act or self._static):
            raise self.config.refusal("desc_act", f"is not true, but {module.name}.g_idx sorts")
        if module.has("bias") and module.is_zero("bias"):  # AutoGPTQ's, of models that have none
            module.drop("bias", "of zeros: not needed")
        if bits == 8:
            kept = without((zeros - 128).to(torch.int8).contiguous(), 0)
            eight = (codes.int() - 128).to(torch.int8).contiguous()
            found = QuantMatrix(Kind.W8, eight, scales, group, inputs, zeros=kept)
        else:
            kept = without(zeros.to(torch.uint8).contiguous(), 8)
            found = QuantMatrix(Kind.W4, halves(codes), scales, group, inputs, zeros=kept)
        return found if order is None else order.sort(found)

    def _check_zeros(
        self, module: Module, zeros: torch.Tensor, bits: int, rule: Reader | None
    ) -> None:
        """Raise `CheckpointError` if symmetric codes have the zeros of the other version."""
        says = rule if rule is not None and rule.has("sym") else self.config
        wrong = (1 << (bits - 1)) + (1 if self._added else -1)
        if says.get("sym") is True and not zeros.is_meta and bool((zeros == wrong).all()):
            other = VERSIONS[self._added]
            raise says.refusal(
                "sym", f"is not what {module.name}.qzeros are, unless checkpoint_format is {other}"
            )
