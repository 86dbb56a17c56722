"""Measures cuBLASLt's kernels for the model's GEMMs while the engine has nothing to do.

It is the search of `slipstream tune`, over the model's own matrices, and what it finds is kept in
the same file: the next start has it at once. Kernels that are faster are taken between two steps,
which changes no token, as only those with the bits of cuBLASLt's guess are; then graphs that hold a
slower one are captured anew. Packed matrices are left to `slipstream tune`: their GEMMs of many
rows read a copy in 16 bits, which there is no room for.

Engines of one machine, such as replicas, share the work: a GEMM is measured by the one that has
claimed it, and the others take its choices from the file. An engine that is stopped, or always
busy, keeps its claim: after `_PATIENCE_S` an idle one measures that GEMM, too.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import msgspec
import torch
from slipstream_runtime.claims import Claims
from torch import Tensor

from slipstream.kernels.gemm import cublaslt, search, tuning
from slipstream.kernels.gemm.cublaslt_api import Problem
from slipstream.kernels.gemm.op import ALIGNED
from slipstream.kernels.gemm.trials import Found, Operands
from slipstream.kernels.gemm.tuning import Choice, Choices, Machine, Product
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import Target, target_of
from slipstream.layers.decoder import Decoder, StepDecoder
from slipstream.runner.graphs import Graphs, Prepare, PrepareAdapted
from slipstream.runner.matrices import Weight, tensors_of
from slipstream.runner.plan import Plan
from slipstream.runner.step_shape import StepShape
from slipstream.runner.tune import adds_in_product, choice_of, runs_by_cublaslt, usual_rows

_log = logging.getLogger(__name__)
_LONGEST_S = 2.4e-3  # of a product: a piece has two launches of it at least
_FEWEST_ROWS = 8
_WAIT_S = 1.0  # until an idle engine looks again whether others have measured
_PATIENCE_S = 60.0  # with others that have claimed all that is left, or that write the file
_HEAD = "head"  # the place that sees sampled rows alone


def chores(
    plan: Plan,
    model: StepDecoder,
    graphs: Graphs | None,
    prepare: Prepare,
    prepare_adapted: PrepareAdapted,
) -> Iterator[float | None]:
    """Return what is left to measure, a piece at a time; nothing where that is refused.

    Args:
        plan, model: of the engine.
        graphs: of its steps, if there are any.
        prepare, prepare_adapted: of graphs of steps without adapters, and with them.
    """
    reason = refusal(plan, model)
    if reason is not None:
        if plan.device.type == "cuda":
            _log.info("GEMMs are not measured in idle times: %s", reason)
        return iter(())
    assert isinstance(model, Decoder)
    tuned = IdleTuning(plan, tensors_of(model, plan.dtype))

    def recaptured(is_stale: Callable[[StepShape], bool]) -> Iterator[None]:
        if graphs is None:
            return iter(())
        return graphs.recaptured(prepare, prepare_adapted, is_stale)

    return tuned.pieces(recaptured)


def refusal(plan: Plan, model: StepDecoder) -> str | None:
    """Say why nothing is measured in idle times; None: it is."""
    config = plan.config
    reasons = {
        "idle_tuning is off": config.idle_tuning == "off",
        "there is no NVIDIA GPU": plan.device.type != "cuda",
        "the deterministic mode has the same kernels everywhere": config.deterministic,
        "the model has several ranks": config.num_ranks > 1,
        "other engines may run on the GPU (memory_share)": config.memory_share is not None,
        f"GEMMs of {plan.dtype} have no choice": plan.dtype not in cublaslt.DTYPES,
        "its matrices are transformers' own": not isinstance(model, Decoder),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def covering_rows(most: int) -> list[int]:
    """Numbers of rows such that for each up to `most` one is found (`Choices.find`)."""
    rows = [_FEWEST_ROWS]
    while rows[-1] < most:
        rows.append(tuning.reach(rows[-1] + 1) // 16 * 16)
    return rows


@dataclass(slots=True)
class Place:
    """A matrix of the model, and the numbers of rows that are left to measure."""

    matrix: Weight
    operands: Operands
    passes: list[list[int]] = field(default_factory=list)  # the usual rows first

    @property
    def product(self) -> Product:
        """What is kept on disk of it, for any rows."""
        return Product.of(self.operands.shape(1))

    @property
    def name(self) -> str:
        """The part of the file that one engine at a time measures."""
        return msgspec.json.encode(self.product).decode()


Job = tuple[Place, list[int]]  # a matrix, and numbers of rows to measure


class IdleTuning:
    """Which GEMMs are measured, one after another, and where the results go."""

    def __init__(self, plan: Plan, tensors: dict[Weight, list[Tensor | None]]) -> None:
        self._plan = plan
        self._tensors = tensors
        self._num_done = self._num_all = 0

    def pieces(
        self, recaptured: Callable[[Callable[[StepShape], bool]], Iterator[None]]
    ) -> Iterator[float | None]:
        """Measure all that is not on disk; each `next` is a piece of some milliseconds.

        It returns for how long another process is waited for, in s, or None.

        Args:
            recaptured: captures graphs whose shapes are stale anew, one by a `next`.
        """
        machine, target = Machine.of(torch.cuda.current_device()), target_of(self._plan.device)
        places = self._places(machine, target)
        self._num_all = sum(len(rows) for place in places for rows in place.passes)
        if not self._num_all:
            _log.info("idle times: all GEMMs of the model were measured before")
            return
        _log.info("idle times: %d GEMMs of the model are to be measured", self._num_all)
        yield None
        left = [(place, place.passes[number]) for number in range(2) for place in places]
        with closing(tuning.claims_of(machine)) as claims:
            while left:
                job = yield from _next_job(left, claims)
                left.remove(job)
                try:
                    found = yield from self._shared(machine, *job)
                finally:
                    claims.release(job[0].name)
                if gained := [one for one in found if one.microseconds < one.default_microseconds]:
                    cublaslt.discard_plans()
                    tuning.choices(torch.cuda.current_device())  # read now, not by a step
                    yield None
                    yield from recaptured(stale(gained))
        deadline_s = time.monotonic() + _PATIENCE_S
        while isinstance(error := tuning.keep(machine, []), TimeoutError):
            if time.monotonic() >= deadline_s:
                break
            yield _WAIT_S  # no later piece would save what is kept in memory
        where = tuning.path(machine) if error is None else "kept in memory"
        _log.info("idle times: all GEMMs of the model are measured: %s", where)

    def _places(self, machine: Machine, target: Target) -> list[Place]:
        known = {(choice.product, choice.rows) for choice in tuning.load(machine)}
        usual = usual_rows(self._plan)
        most = max(*usual, self._plan.max_num_batched_tokens)
        others = [rows for rows in covering_rows(most) if rows not in usual]
        places = []
        for matrix, tensors in self._tensors.items():
            weights = [each for each in tensors if each is not None and is_usable(each)]
            if matrix.packing is not None or not weights or len(weights) < len(tensors):
                continue
            place = Place(matrix, Operands.of(weights, adds_in_product(matrix)))
            limit = tuning.reach(self._plan.max_num_rows) if matrix.name == _HEAD else most
            place.passes = [
                [
                    count
                    for count in rows
                    if count <= limit
                    and (place.product, count) not in known
                    and runs_by_cublaslt(matrix, count, target)
                ]
                for rows in (usual, others)
            ]
            # Matrices of equal sizes are one product.
            known.update((place.product, count) for rows in place.passes for count in rows)
            places.append(place)
        return places

    def _shared(
        self, machine: Machine, place: Place, rows: Sequence[int]
    ) -> Generator[None, None, list[Choice]]:
        """Return choices for a GEMM that this engine has claimed: those on disk by now, and new."""
        stored = [choice for choice in tuning.load(machine) if choice.product == place.product]
        known = {choice.rows for choice in stored}
        wanted = set(rows)
        num_most = min((choice.rows for choice in stored if is_long(choice)), default=1 << 62)
        others = [choice for choice in stored if choice.rows in wanted]
        left = [count for count in rows if count not in known and count <= num_most]
        self._num_done += len(rows) - len(left)
        found = yield from self._measured(machine, place, left)
        self._report(place.matrix.name, found, len(others))
        return others + found

    def _measured(
        self, machine: Machine, place: Place, rows: Sequence[int]
    ) -> Generator[None, None, list[Choice]]:
        """Search for each number of rows; keep what is found, however it ends."""
        found: list[Choice] = []
        too_long = False
        try:
            for count in rows:
                self._num_done += 1
                if too_long:
                    continue  # with more rows it takes longer still
                choice = yield from self._search(place, count, found)
                if choice is not None:
                    found.append(choice)
                    too_long = is_long(choice)
        finally:
            if found:
                tuning.keep(machine, found)
        return found

    def _search(
        self, place: Place, rows: int, found: list[Choice]
    ) -> Generator[None, None, Choice | None]:
        operands = place.operands
        try:
            result = yield from search.searched(operands, rows, _LONGEST_S)
        except (KernelError, torch.OutOfMemoryError) as error:
            _log.warning(
                "idle times: %s of %d rows is left out: %s", place.matrix.name, rows, error
            )
            return None
        except Exception:  # the device has failed: no start should try it again
            guess = cublaslt.default(Problem(operands.shape(rows), torch.cuda.current_device()))
            found.append(choice_of(operands, rows, Found(guess, 0.0, 0.0)))
            raise
        return choice_of(operands, rows, result)

    def _report(self, name: str, found: Sequence[Choice], num_others: int) -> None:
        if num_others:
            _log.info(
                "idle times: %s measured by another engine at %d numbers of rows; %d of %d",
                *(name, num_others, self._num_done, self._num_all),
            )
        default = sum(choice.default_microseconds for choice in found)
        taken = sum(choice.microseconds for choice in found)
        if found:
            _log.info(
                "idle times: %s measured at %d numbers of rows, which take %.1f %% less; %d of %d",
                *(name, len(found), 100 * (1 - taken / default), self._num_done, self._num_all),
            )


def _next_job(left: Sequence[Job], claims: Claims) -> Generator[float, None, Job]:
    """Return the first job whose GEMM can be claimed; after `_PATIENCE_S` without one, any.

    What two engines then measure twice does no harm: the later choice takes the earlier's place.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while (job := next((each for each in left if claims.take(each[0].name)), None)) is None:
        if time.monotonic() >= deadline_s:
            _log.warning(
                "idle times: %s is claimed by an engine that has not measured it for %g s; it is "
                "measured here, too",
                *(left[0][0].matrix.name, _PATIENCE_S),
            )
            return left[0]
        yield _WAIT_S
    return job


def is_long(choice: Choice) -> bool:
    """Whether a GEMM takes too long to be measured with as many rows, or more."""
    return choice.default_microseconds > _LONGEST_S * 1e6


def is_usable(weights: Tensor) -> bool:
    """Whether a choice is taken for a matrix: rows of it and of its product are aligned."""
    outputs, inputs = weights.shape
    size = 2 if weights.itemsize == 1 else weights.itemsize
    is_aligned = inputs * weights.itemsize % ALIGNED == 0 == outputs * size % ALIGNED
    return is_aligned and weights.is_contiguous() and weights.data_ptr() % ALIGNED == 0


def stale(gained: Sequence[Choice]) -> Callable[[StepShape], bool]:
    """Return what says of a shape whether a GEMM of its steps has a faster kernel now."""
    choices, products = Choices(gained), {choice.product for choice in gained}

    def is_stale(shape: StepShape) -> bool:
        counts = {shape.num_tokens, shape.num_samples}
        return any(
            choices.find(product, cublaslt.rows_of(getattr(torch, product.dtype), rows))
            for product in products
            for rows in counts
        )

    return is_stale
