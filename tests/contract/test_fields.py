"""The table of fields: a made-up parameter in it is read, checked and shown like the others."""

from typing import Annotated, Any

import msgspec
import pytest
from slipstream_contract.errors import ContractError
from slipstream_contract.fields import (
    BOTH,
    Asked,
    Bounds,
    Field,
    Row,
    check_fields,
    read_fields,
    rows,
    table,
)
from slipstream_contract.sampling import FIELDS, FILTERS, SamplingParams


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A struct with a line of each kind."""

    count: Annotated[int, Field("how many", Bounds(1, 9), trtllm=Asked("how_many"))]
    share: Annotated[
        float, Field("how much", Bounds(0, 1, is_open=True), vllm=Asked(bounds=Bounds(0.5, 1)))
    ] = 1.0
    seed: Annotated[int | None, Field("a seed", Bounds(0, 7), vllm=None)] = None
    is_loud: Annotated[bool, Field("a flag", trtllm=None)] = False
    words: Annotated[tuple[int, ...], Field("words", rows=(Row("`words`", 0, 3, BOTH),))] = ()
    other: int = 0


class Source(dict[str, Any]):
    """What a request says."""

    def label(self, name: str) -> str:
        return f"the {name}"

    def has(self, name: str) -> bool:
        return name in self

    def whole(self, name: str, default: int | None = None) -> int:
        if default is None and name not in self:
            raise ContractError(f"{name} is missing")
        return self.get(name, default)

    number = whole

    def flag(self, name: str, default: bool = False) -> bool:
        return self.get(name, default)


def test_a_schema_reads_what_it_has() -> None:
    read = read_fields(Made, "trtllm", Source(how_many=3, share=0.25))
    assert read == {"count": 3, "share": 0.25, "seed": None}
    read = read_fields(Made, "vllm", Source(number=3, is_loud=True), {"count": "number"})
    assert read == {"count": 3, "share": 1.0, "is_loud": True}
    with pytest.raises(ContractError, match="how_many is missing"):
        read_fields(Made, "trtllm", Source())


@pytest.mark.parametrize(
    ("schema", "given", "message"),
    [
        ("trtllm", {"how_many": 0}, "the how_many is 0, not a whole number from 1 to 9"),
        ("trtllm", {"share": 0.0}, "the share is 0, not a number above 0 and at most 1"),
        ("trtllm", {"share": float("nan")}, "the share is nan, not a number above 0"),
        ("trtllm", {"seed": 8}, "the seed is 8, not a whole number from 0 to 7"),
        ("vllm", {"share": 0.25}, "the share is 0.25, not a finite number from 0.5 to 1"),
    ],
)
def test_a_value_out_of_the_schemas_bounds_is_refused(
    schema: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        read_fields(Made, schema, Source({"how_many": 1, "count": 1} | given))


def test_the_engine_has_its_own_bounds() -> None:
    check_fields(Made(count=1, share=0.25, seed=7))
    for wrong in ({"count": 10}, {"share": 0.0}, {"seed": -1}):
        with pytest.raises(ContractError, match=f"{next(iter(wrong))} is .*, not a number"):
            check_fields(Made(**{"count": 1} | wrong))


def test_the_page_shows_each_bound_once() -> None:
    assert list(rows(Made)) == [
        Row("`how_many`, `count`", 1, 9, BOTH),
        Row("`share`", "above 0", 1, BOTH),
        Row("`share` of `vllm_model`", 0.5, 1, BOTH),
        Row("`seed`", 0, 7, BOTH),
        Row("`words`", 0, 3, BOTH),
    ]


def test_a_default_of_the_table_is_within_its_bounds() -> None:
    for name, entry in FIELDS.items():
        for schema in ("trtllm", "vllm"):
            asked = entry.asked(schema)
            if asked is not None and asked.bounds is not None and asked.default is not None:
                assert asked.bounds.has(asked.default), name
        if entry.field.bounds is not None and entry.default is not None:
            assert entry.field.bounds.has(entry.default), name


def test_every_number_of_the_sampling_parameters_is_in_the_table() -> None:
    # Checkpoints have end ids, and the schemas' own rules choose; others have tables of their own.
    own = {"end_ids", "beams", "drafts"}
    assert table(SamplingParams).keys() == set(SamplingParams.__struct_fields__) - own
    assert {"top_k", "top_p", "min_p"} <= set(FILTERS)
