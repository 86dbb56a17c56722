"""Adapters over HTTP: load, list, ask, unload; by the command too."""

from pathlib import Path

import pytest
import torch
from fixtures.gateway.served import MODEL, make_repository, serving
from fixtures.models.adapters import write_adapter
from slipstream_client import cli

pytestmark = pytest.mark.rest
HOSTILE: list[tuple[object, object]] = [
    *(("x", path) for path in ("..", "/etc", "\0", "one/../..", "a" * 10_000, "\ud800", "~")),
    *(("x", path) for path in (3, ["one"], {"a": 1}, True, "")),
    *((name, "one") for name in ("a" * 10_000, "a,b", "\n", "\ud800", 3, ["x"], None, "")),
]


def check_lists(url: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    for of_a_model in ([], ["--model", MODEL]):
        assert cli.main(["adapter", "list", *url, *of_a_model]) == 0
        assert line in capsys.readouterr().out
    assert cli.main(["adapter", "list", *url, "--model", "none"]) == 1
    assert f"--model none does not exist; there are {MODEL}" in capsys.readouterr().err


def test_an_adapter_is_a_model_while_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = torch.Generator().manual_seed(0)
    pairs = {
        f"model.layers.{i}.mlp.down_proj": (
            torch.randn(3, 560, generator=rng) / 24,
            torch.randn(256, 3, generator=rng),
        )
        for i in range(7)
    }
    write_adapter(tmp_path / "adapters" / "one", pairs, 3)
    repository = make_repository(tmp_path, adapter_root=str(tmp_path / "adapters"))
    asked = {"prompt": "def main(", "max_tokens": 12, "temperature": 0}
    with serving(repository, tmp_path / "log") as gateway:
        base = gateway.complete(**asked).json["choices"][0]["text"]
        assert gateway.complete(**asked, model="one").status == 404
        for body, field in (
            ({"lora_name": "one"}, "lora_path"),
            ({"lora_path": "one"}, "lora_name"),
            ({"lora_name": MODEL, "lora_path": "one"}, "lora_name"),
            ({"lora_name": "one", "lora_path": ".."}, None),
        ):
            answer = gateway.post("/v1/load_lora_adapter", body)
            assert (answer.status, answer.error["param"]) == (400, field)
        for name, path in HOSTILE:
            for way in ("load", "unload"):
                body = {"lora_name": name, "lora_path": path}
                answer = gateway.post(f"/v1/{way}_lora_adapter", body)
                assert answer.status in (400, 404, 422), (way, name, path)
                assert len(answer.error["message"]) < 2000
        body = {"lora_name": "one", "lora_path": "one"}
        assert gateway.post("/v1/load_lora_adapter", body).status == 200
        cards = {card["id"]: card for card in gateway.get("/v1/models").json["data"]}
        assert cards["one"]["parent"] == MODEL
        assert gateway.get("/v1/models/one").json["root"] == str(tmp_path / "adapters" / "one")
        other = gateway.complete(**asked, model="one")
        assert other.json["model"] == "one"
        text = other.json["choices"][0]["text"]
        assert text != base
        assert gateway.complete(**asked, lora_name="one").json["choices"][0]["text"] == text
        wrong = gateway.complete(**asked, model="one", lora_name="two")
        assert (wrong.status, wrong.error["param"]) == (400, "lora_name")
        assert "vllm:lora_requests_info{" in gateway.get("/metrics").data.decode()
        page = gateway.get("/metrics?adapters=true").data.decode()
        tokens = f'slipstream_adapter_output_tokens_total{{model="{MODEL}",lora_name="one"}} 24'
        assert tokens in page.splitlines()
        assert "slipstream_adapter" not in gateway.get("/metrics?adapters=false").data.decode()
        wrong = gateway.get("/metrics?adapters=1")
        assert (wrong.status, wrong.error["param"]) == (400, "adapters")
        url = ["--url", gateway.url]
        assert cli.main(["adapter", *url, "load", "two", "one"]) == 0
        check_lists(url, f"two  {MODEL}  {tmp_path}/adapters/one", capsys)
        assert cli.main(["adapter", *url, "unload", "two"]) == 0
        assert cli.main(["adapter", *url, "unload", "two"]) == 1
        assert "two" in capsys.readouterr().err
        assert gateway.post("/v1/unload_lora_adapter", {"lora_name": "one"}).status == 200
        assert gateway.complete(**asked, model="one").status == 404
        assert gateway.complete(**asked).json["choices"][0]["text"] == base
