"""Errors of a dialect are in its own words for fields, of their entries too."""

from slipstream_gateway.dialects.events import renamed
from slipstream_gateway.errors import ApiError


def test_an_entry_of_a_renamed_field():
    error = renamed(ApiError(400, "stop[0] is empty"), {"stop": "stop_sequences"})
    assert (error.message, error.param) == ("stop_sequences[0] is empty", "stop_sequences")
    other = renamed(ApiError(400, "(stop) is wrong"), {"stop": "stop_sequences"})
    assert (other.message, other.param) == ("(stop) is wrong", None)
