"""What was measured is found again on the same kind of machine, and nowhere else."""

import json
import logging
from pathlib import Path

import msgspec
import pytest
import torch
from slipstream.kernels.gemm import tuning
from slipstream.kernels.gemm.cublaslt_api import GemmShape
from slipstream.kernels.gemm.tuning import Choice, Choices, Machine, Product

H200 = Machine(gpu="NVIDIA H200", num_sms=132, driver=13000, cublaslt=130100)
QKV = Product(inputs=4096, outputs=6144, dtype="bfloat16", out_dtype="bfloat16", adds=False)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def choice(rows: int, number: int = 7, product: Product = QKV) -> Choice:
    return Choice(product, rows, bytes([number] * 64).hex(), "64x32 swizzle 1", 10.5, 11.0)


def test_round_trip(tmp_path: Path) -> None:
    assert tuning.load(H200) == []
    measured = [choice(8), choice(64, 9)]
    tuning.save(H200, measured)
    assert tuning.load(H200) == measured
    (file,) = (tmp_path / "slipstream" / "tuning").glob("*.json")
    assert file == tuning.path(H200)
    assert file.name.startswith("nvidia-h200-")
    assert json.loads(file.read_bytes())["machine"]["cublaslt"] == 130100


def test_what_is_measured_again_takes_the_place_of_the_old() -> None:
    other = msgspec.structs.replace(QKV, outputs=4096)
    tuning.save(H200, [choice(8), choice(64)])
    tuning.save(H200, [choice(64, 9), choice(64, 5, other)])
    found = Choices(tuning.load(H200))
    assert found.find(QKV, 8) == bytes([7] * 64)
    assert found.find(QKV, 64) == bytes([9] * 64)
    assert found.find(other, 64) == bytes([5] * 64)


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA H100"}, {"num_sms": 66}, {"driver": 13010}])
def test_other_machines_have_other_files(change: dict[str, object]) -> None:
    tuning.save(H200, [choice(8)])
    assert tuning.load(msgspec.structs.replace(H200, **change)) == []
    newer = msgspec.structs.replace(H200, cublaslt=130200)
    assert tuning.path(newer) != tuning.path(H200)


def test_a_format_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.save(H200, [choice(8)])
    monkeypatch.setattr(tuning, "_FORMAT", 3)
    assert tuning.load(H200) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"rows"', '"lines"'),
        lambda text: text.replace("0707", "07"),
        lambda text: text.replace("0707", "zz07"),
        lambda text: text.replace("NVIDIA H200", "NVIDIA B200"),
        lambda text: text.replace('"format": 2', '"format": 3'),
    ],
)
def test_a_damaged_file_is_ignored(damage, caplog: pytest.LogCaptureFixture) -> None:
    tuning.save(H200, [choice(8)])
    file = tuning.path(H200)
    damaged = damage(file.read_text())
    assert damaged != file.read_text()
    file.write_text(damaged)
    with caplog.at_level(logging.WARNING):
        assert tuning.load(H200) == []
    assert f"{file} is ignored" in caplog.text
    tuning.save(H200, [choice(16)])  # and can be made anew
    assert tuning.load(H200) == [choice(16)]


def test_unreadable(caplog: pytest.LogCaptureFixture) -> None:
    tuning.path(H200).mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert tuning.load(H200) == []
    assert "is ignored" in caplog.text


def test_rows_are_rounded_up_but_not_far() -> None:
    found = Choices([choice(rows, rows % 251) for rows in (8, 16, 64, 256)])
    numbers = {1: 8, 5: 8, 8: 8, 9: 16, 16: 16, 48: 64, 64: 64, 228: 5, 256: 5}
    assert {rows: (found.find(QKV, rows) or b"?")[0] for rows in numbers} == numbers
    for rows in (17, 47, 65, 227, 257, 4096):
        assert found.find(QKV, rows) is None
    for change in ({"dtype": "float16"}, {"adds": True}):
        assert found.find(msgspec.structs.replace(QKV, **change), 8) is None
    assert Choices([]).find(QKV, 8) is None


def test_product_of_a_shape() -> None:
    types = (torch.float8_e4m3fn, torch.bfloat16)
    product = Product.of(GemmShape(5, 64, 32, *types, (64, 64, 32), 16, True))
    assert product == Product(64, 32, "float8_e4m3fn", "bfloat16", True)


@pytest.mark.parametrize(("saved", "said"), [(0, "`slipstream tune`"), (2, "2 GEMMs")])
def test_what_the_log_says_at_start(
    saved: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Machine, "of", staticmethod(lambda device: H200))
    tuning.save(H200, [choice(rows) for rows in (8, 16)[:saved]])
    tuning.choices.cache_clear()
    with caplog.at_level(logging.INFO):
        assert (tuning.choices(0).find(QKV, 8) is None) == (saved == 0)
        tuning.choices(0)
    assert caplog.text.count(said) == 1
    tuning.choices.cache_clear()
