"""A checkpoint opened for changes: a plain decoder, each of whose linear layers is a `Probe`."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels.elementwise.activation import GATES
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.decoder import AnyBlock, Decoder, NormedBlock
from slipstream.layers.experts import Experts
from slipstream.layers.latent import LatentAttention
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd, NormLinear
from slipstream.layers.norm import LayerNorm, Norm
from slipstream.layers.residual import Residual
from slipstream.layers.skipping import Skipping
from slipstream.models.axes import TensorNames
from slipstream.models.cache_scheme import quantization_of
from slipstream.models.decoder import build_decoder
from slipstream.models.hf import weights_dtype
from slipstream.models.model_config import ModelConfig
from slipstream.models.registry import family_of
from slipstream.models.source import Weights
from slipstream.models.weights import FileSource
from slipstream.quant.matrix import QuantMatrix
from slipstream.runner.plan import Plan, settle_here
from torch import Tensor

from slipstream_quantize.experts import ProbedExperts
from slipstream_quantize.ignored import ignored
from slipstream_quantize.observe import Probe

BLOCK_SIZE = 32  # tokens of a block of the cache
TOKENS = 4096  # of a step, at least one piece
ROWS = 4096  # of an embedding that are rounded at once


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """A linear layer of a block, with what makes its inputs.

    Attributes:
        probe: the layer.
        norm: before it, whose factors may change with its columns; None: no norm, or not its own.
        rows: of the layer before whose results it reads one by one; None: none.
    """

    probe: Probe
    norm: Norm | LayerNorm | None
    rows: tuple[Probe, slice] | None


class Recording(FileSource):
    """Remembers each tensor that it reads, in the memory where the decoder has it."""

    def __init__(self, directory: Path, device: torch.device, plan: Plan) -> None:
        super().__init__(directory, device, plan.model.tensors)
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, float] = {}
        self._at: dict[int, str] = {}  # address -> name of what lies there

    def quantized(self, name: str, rows: int, inputs: int) -> QuantMatrix | None:
        """Return None: blocks of a GGUF file are read as the numbers that they stand for."""
        return None

    def mapped(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> None:
        """Return None: tensors are changed, and written again."""

    def stored_rows(self, name: str, rows: int, inputs: int, dtype: torch.dtype) -> None:
        """Return None likewise."""

    def fill(self, names: Sequence[str], outs: Sequence[Tensor]) -> None:
        """Read and remember."""
        super().fill(names, outs)
        self.tensors |= zip(names, outs, strict=True)
        self._at |= {out.data_ptr(): name for name, out in zip(names, outs, strict=True)}

    def at(self, values: Tensor) -> list[str]:
        """Return the names of what lies in a matrix, in the order of its rows."""
        found, row = [], 0
        while row < len(values):
            found.append(self._at[values[row].data_ptr()])
            row += len(self.tensors[found[-1]])
        return found

    def number(self, name: str) -> float:
        """Read a scale and remember it."""
        self.numbers[name] = super().number(name)
        return self.numbers[name]


class Opened:
    """A checkpoint in memory.

    Attributes:
        directory: its own.
        dtype: of the tensors that are written.
        plan: how the decoder runs.
        decoder: without fusion.
        source: its tensors and numbers by the decoder's names.
        names: under which tensors are written.
        blocks: the layers of each that are to be quantised.
        units: of each block those layers again, by GEMM or mixture.
        ignored: names under which the other matrices of blocks are written, as they are.

    Args:
        directory: of the checkpoint.
        device: `auto`, `cpu` or `cuda`.
        dtype: of the tensors that are written; `auto`: the checkpoint's.
        ignore: what `ignored` becomes, as `--ignore` has it.
    """

    def __init__(
        self,
        directory: Path,
        device: str = "auto",
        dtype: str = "auto",
        ignore: Sequence[str] = (),
    ) -> None:
        found = quantization_of(directory) if (directory / "config.json").is_file() else None
        if found is not None:
            raise CheckpointError(
                f"{directory}: quantization_config says {found[0]}: the weights are quantised "
                "already; quantise the original"
            )
        config = EngineConfig(checkpoint=str(directory), device=device, block_size=BLOCK_SIZE)
        plan = settle_here(config)
        if plan.model.is_text_alone:
            raise CheckpointError(
                f"{directory}: has a tower for images, which what is written would lack"
            )
        name = dtype if dtype != "auto" else plan.model.dtype or weights_dtype(directory)
        self.dtype: torch.dtype = getattr(torch, name)
        if plan.device.type == "cuda" and self.dtype == torch.float32:
            raise ConfigError("--dtype float32 on a GPU: attention needs float16 or bfloat16 there")
        if plan.device.type == "cuda":
            plan = settle_here(msgspec.structs.replace(config, dtype=name))
        self.plan, self.directory = plan, directory
        self.source = Recording(directory, plan.device, plan)
        weights = Weights(self.source, plan.device, plan.dtype, "none")
        build = family_of(plan.model.architecture).build or build_decoder
        self.decoder: Decoder = build(plan.model, weights, plan.max_model_len)
        weights.finish()
        self.names = _written(plan.model, list(self.source.tensors), directory)
        blocks = [self._places(block) for block in self.decoder.blocks]
        self.units = [
            list(self._units_of(block, places))
            for block, places in zip(self.decoder.blocks, blocks, strict=True)
        ]
        self.ignored = ignored(ignore, self.groups, list(self.unquantised))
        self.blocks = [self._left(places) for places in blocks]
        kept = {id(probe) for probe in self.probes}
        self.units = [[unit for unit in units if id(unit[0]) in kept] for units in self.units]
        self._round_others()

    @property
    def probes(self) -> Iterator[Probe]:
        """All layers, in order."""
        return (place.probe for block in self.blocks for place in block)

    @property
    def has_experts(self) -> bool:
        """Whether a block has a mixture."""
        return any(isinstance(block.mlp, ProbedExperts) for block in self.decoder.blocks)

    @property
    def unquantised(self) -> Iterator[str]:
        """The names of linear layers that no scheme changes: head, routers, their gates, and what
        makes keys and values of latents, which attention multiplies head by head.
        """
        yield self.names.stored("lm_head")
        for i, block in enumerate(self.decoder.blocks):
            if isinstance(block.attention, LatentAttention):
                yield self.names.stored(f"model.layers.{i}.self_attn.kv_b_proj")
            if isinstance(block.mlp, Experts):
                yield self.names.stored(f"model.layers.{i}.mlp.gate")
                if block.mlp.config.shared_gated:
                    yield self.names.stored(f"model.layers.{i}.mlp.shared_expert_gate")

    def _stored(self, probe: Probe) -> list[str]:
        return [self.names.stored(name) for name in probe.names]

    @property
    def groups(self) -> list[list[str]]:
        """The names under which the matrices of each of `units` are written."""
        every = [unit for units in self.units for unit in units]
        return [
            list(dict.fromkeys(name for probe in unit for name in self._stored(probe)))
            for unit in every
        ]

    def _units_of(self, block: AnyBlock, places: Sequence[ProbedLayer]) -> Iterator[list[Probe]]:
        """Yield the layers of each GEMM, of vLLM's if it has them together, and of each mixture."""
        own = [_joined(block.attention)]
        if isinstance(block.mlp, ProbedExperts):
            own.append([probe for pair in block.mlp.pairs for probe in pair])
        own += [[p.probe] for p in places if not any(p.probe in probes for probes in own)]
        yield from filter(None, own)

    def num_weights(self, names: Sequence[str]) -> int:
        """Return how many weights the layers of some matrices have, by the names of `groups`."""
        taken = {*names}
        own = (probe for probe in self.probes if taken & {*self._stored(probe)})
        return sum(probe.values.numel() for probe in own)

    def _left(self, places: Sequence[ProbedLayer]) -> list[ProbedLayer]:
        """Return the layers that are not ignored; no scales move into one that is."""
        taken = set(self.ignored)
        kept = [place for place in places if not taken & {*self._stored(place.probe)}]
        probes = [place.probe for place in kept]
        return [p if p.rows is None or p.rows[0] in probes else replace(p, rows=None) for p in kept]

    def _round_others(self) -> None:
        """Round to `dtype` what is written in it: all but the matrices of blocks.

        Raises `CheckpointError` for values that are beyond it.
        """
        matrices = {f"{name}.weight" for probe in self.probes for name in probe.names}
        for name, tensor in self.source.tensors.items():
            if name not in matrices:
                for rows in torch.split(tensor, ROWS) if tensor.ndim else [tensor]:
                    rows.copy_(rows.to(self.dtype))
                if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
                    raise self.too_large(name)
        norms = [(each.input_norm, each.mlp_norm) for each in self.decoder.blocks]
        for norm in (*itertools.chain(*norms), self.decoder.norm):
            if isinstance(norm, LayerNorm):
                norm.refresh()

    def too_large(self, name: str) -> CheckpointError:
        """Return the error of a tensor whose numbers, or scales, `dtype` cannot hold."""
        said = f"has values beyond {self.dtype}; --dtype bfloat16 holds larger ones"
        return CheckpointError(f"{self.directory}: tensor {self.names.stored(name)} {said}")

    def _places(self, block: AnyBlock) -> list[ProbedLayer]:
        """Put probes into a block; return its places in the order in which they run."""
        found: list[ProbedLayer] = []
        # Scales of a cache, and limits of values, are of these as they are: none move into
        # attention's output then.
        is_fixed = bool(self.source.numbers) or self.plan.model.axes.qkv_most is not None
        for layer, norm in ((block.attention, block.input_norm), (block.mlp, block.mlp_norm)):
            before: Probe | None = None
            # Factors move into a norm, if nothing else reads it.
            apart = norm if isinstance(norm, Norm | LayerNorm) and norm.weight is not None else None
            if block.input_norm is block.mlp_norm or isinstance(block, NormedBlock):
                apart = None
            if isinstance(layer, Experts):
                found += self._experts(block, layer)
                continue
            if isinstance(layer, LatentAttention):
                found += self._latent(layer)
            for place in list(vars(layer).values()):
                if isinstance(place, NormLinear | GatedLinear):
                    before = place.linear = self._probe(place.linear)
                    found.append(ProbedLayer(before, apart, None))
                    is_mlp = not isinstance(place, GatedLinear) and layer is block.mlp
                    if is_mlp or (isinstance(place, GatedLinear) and place.gate not in GATES):
                        before = None  # an activation of every column is no factor
                elif isinstance(place, LinearAdd):
                    probe = place.linear = self._probe(place.linear)
                    feeding = _feeding(before, probe)
                    is_kept = layer is block.attention and is_fixed
                    found.append(ProbedLayer(probe, None, None if is_kept else feeding))
        if not found:
            raise CheckpointError(
                f"{self.plan.model.architecture}: its blocks have no linear layers that are known"
            )
        return found

    def _latent(self, attention: LatentAttention) -> Iterator[ProbedLayer]:
        """Put probes into latent attention, but for its output."""
        norm: Norm | None = None
        if attention.query_down is not None:
            attention.query_down = self._probe(attention.query_down)
            yield ProbedLayer(attention.query_down, None, None)
            norm = attention.query_norm
        attention.query, attention.down = map(self._probe, (attention.query, attention.down))
        yield ProbedLayer(attention.query, norm, None)
        yield ProbedLayer(attention.down, None, None)

    def _experts(self, block: AnyBlock, experts: Experts) -> Iterator[ProbedLayer]:
        """Put probes into a mixture: factors move between the matrices of an expert alone.

        The router reads the norm, too, so none move into it.
        """
        if experts.config.is_fused:
            raise CheckpointError(
                f"{self.plan.model.architecture}: experts that are one tensor are not quantised"
            )
        probed = ProbedExperts(experts, self._probe)
        object.__setattr__(block, "mlp", probed)
        pairs = list(probed.pairs)
        if probed.shared is not None:
            shared = probed.shared
            shared.gate_up, shared.down = map(self._probe, (shared.gate_up, shared.down))
            pairs.append((shared.gate_up, shared.down))
        for gate_up, down in pairs:
            yield ProbedLayer(gate_up, None, None)
            yield ProbedLayer(down, None, _feeding(gate_up, down))

    def _probe(self, linear: Linear) -> Probe:
        matrix = linear.matrix
        if matrix is None or matrix.scales is not None:
            raise CheckpointError("the checkpoint has quantised weights: quantise the original")
        names = self.source.at(matrix.values)
        sizes = [self.source.tensors[name].shape[0] for name in names]
        return Probe(linear, [name.removesuffix(".weight") for name in names], sizes)


def _written(model: ModelConfig, tensors: Sequence[str], directory: Path) -> TensorNames:
    """Return the names of a Hugging Face directory; refuse GGUF files that need other changes."""
    if model.published is None:
        return model.tensors
    both = (model.published, model.tensors)
    changed = [name for name in tensors if any(names.change(name) for names in both)]
    if changed:
        raise CheckpointError(
            f"{directory}: {model.published.stored(changed[0])} has another layout in a Hugging "
            "Face directory than in a GGUF file: quantise the directory"
        )
    return model.published


def _joined(attention: object) -> list[Probe]:
    """Return what vLLM has as one GEMM of two here: it makes latents of queries and of keys."""
    if not isinstance(attention, LatentAttention) or attention.query_down is None:
        return []
    return [each for each in (attention.query_down, attention.down) if isinstance(each, Probe)]


def _feeding(before: Probe | None, probe: Probe) -> tuple[Probe, slice] | None:
    """Return the rows whose results are, times a factor, the inputs of `probe` one by one.

    They are the last matrix of the layer before: values (where every head has its own), or what a
    gate multiplies.
    """
    inputs = probe.values.shape[1]
    if before is None or before.sizes[-1] != inputs:
        return None
    last = before.values.shape[0]
    return before, slice(last - inputs, last)


class Running:
    """Runs an opened checkpoint over pieces of text, a block at a time or whole.

    Args:
        opened: the checkpoint.
        pieces: token ids `[s, length]`, s pieces of the same length.
        kv_cache_dtype: of the cache, as the engine's option.
    """

    def __init__(self, opened: Opened, pieces: Tensor, kv_cache_dtype: str = "auto") -> None:
        config = msgspec.structs.replace(opened.plan.config, kv_cache_dtype=kv_cache_dtype)
        self._opened = opened
        self._plan = settle_here(config)
        self._pieces = pieces.to(self._plan.device)
        length = pieces.shape[1]
        if length > self._plan.max_model_len:
            raise ConfigError(
                f"pieces of {length} tokens are longer than the context, {self._plan.max_model_len}"
            )
        model = self._plan.model
        if model.axes.chunked and length > (chunk := max(model.windows)):
            raise ConfigError(
                f"pieces of {length} tokens are longer than attention chunks of {chunk} tokens"
            )
        self._at_once = max(1, TOKENS // length)
        self._blocks = -(-length // BLOCK_SIZE)
        shape = self._plan.kv.layer_shape(self._blocks * min(self._at_once, len(pieces)))
        self._cache = torch.zeros(shape, dtype=self._plan.cache_dtype, device=self._plan.device)
        skips, attention = model.axes.skips, self._plan.attention
        self._skipping: Skipping | None = None
        self._skips = frozenset[int]()  # blocks whose heads skip tokens
        if skips is not None and attention.spec.skipped_tokens:
            self._skips = skips.layers
            self._skipping = Skipping(skips, attention, self._blocks, self._plan.device)

    def embedded(self) -> list[Tensor]:
        """Return the sums before the first block, of some pieces each: `[tokens, hidden]`."""
        return [
            self._opened.decoder.embedding(part.flatten(), self._positions(len(part)))
            for part in torch.split(self._pieces, self._at_once)
        ]

    def block(self, i: int, sums: Tensor) -> None:
        """Apply block `i` to the sums of some pieces, in place."""
        count = len(sums) // self._pieces.shape[1]
        inputs = self._inputs(count, self._plan.model.windows[i], i in self._skips)
        self._opened.decoder.blocks[i](Residual(sums), inputs, self._cache)

    def sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each piece's token ids, `[length]`, and its sums behind the last block."""
        parts = torch.split(self._pieces, self._at_once)
        for part, sums in zip(parts, self.embedded(), strict=True):
            for i in range(len(self._opened.decoder.blocks)):
                self.block(i, sums)
            yield from zip(part, torch.split(sums, part.shape[1]), strict=True)

    def _positions(self, count: int) -> Tensor:
        """Return the positions of the tokens of so many pieces."""
        length = self._pieces.shape[1]
        return torch.arange(length, device=self._plan.device).repeat(count)

    def _inputs(self, count: int, window: int, skips: bool) -> AttentionInputs:
        """Return the inputs of attention for so many pieces, each of them a chunk."""
        length, device = self._pieces.shape[1], self._plan.device
        tables = torch.arange(count * self._blocks, dtype=torch.int32, device=device)
        positions = self._positions(count)
        firsts = torch.arange(count, device=device) * self._blocks * BLOCK_SIZE
        rows = StepRows(
            positions=positions,
            slots=positions + firsts.repeat_interleave(length),
            block_tables=tables.view(count, -1),
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=device) * length,
            lengths=torch.full((count,), length, dtype=torch.int32, device=device),
            num_decodes=0,
            max_queries=length,
        )
        if skips and self._skipping is not None:
            return self._skipping.inputs(self._cache, rows, len(positions))
        return AttentionInputs.of(self._plan.attention, self._cache, rows, window)
