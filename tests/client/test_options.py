"""The options of the commands that sample are those of the table of fields."""

import argparse

from slipstream_client.commands.common import add_sampling, sampling_of
from slipstream_contract.sampling import FIELDS


def test_each_option_has_the_type_and_the_help_of_its_field() -> None:
    parser = argparse.ArgumentParser()
    add_sampling(parser, 128)
    page = " ".join(parser.format_help().split())
    names = [name for name, entry in FIELDS.items() if entry.field.is_option]
    assert {"max_tokens", "temperature", "top_p", "seed"} <= set(names)
    for name in names:
        assert FIELDS[name].field.help in page, name
    assert "so much of the probability together; above 0 and at most 1" in page
    given = parser.parse_args(["--top-k", "5", "--frequency-penalty", "0.5"])
    assert sampling_of(given) == {"max_tokens": 128, "top_k": 5, "frequency_penalty": 0.5}
