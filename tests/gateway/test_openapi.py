"""The OpenAPI file and the table of the documents are those of the code."""

import json
import re

from fixtures.gateway.served import ROOT, Gateway
from slipstream_gateway import fields, openapi
from slipstream_gateway.app import GENERATE


def test_the_file_is_made_from_the_tables():
    assert openapi.FILE.read_bytes() == openapi.file_bytes(), "make fields"


def test_the_table_of_the_page_is_the_code():
    assert fields.markdown() in (ROOT / "docs" / "openai.md").read_text(), "make fields"


def test_every_reference_leads_somewhere():
    document = json.loads(openapi.FILE.read_bytes())
    names = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', openapi.FILE.read_text())
    assert names
    assert set(names) <= document["components"]["schemas"].keys()
    assert "$defs" not in openapi.FILE.read_text()


def test_every_endpoint_is_served_and_described(gateway: Gateway):
    document = gateway.get("/openapi.json").json
    assert document == json.loads(openapi.FILE.read_bytes())
    assert document["paths"].keys() >= GENERATE.keys()
    for path, methods in document["paths"].items():
        for method in methods:
            found = gateway.request(method.upper(), path.replace("{model}", "ensemble"), {})
            assert found.status not in (404, 405, 500), (path, found.data)
