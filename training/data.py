"""The data set: the sources of Python's own standard library, a few modules kept aside.

    python data.py --pack data.tar.xz      collect this Python's library and pack it
    python data.py --report data.tar.xz    sizes, and how much of the held-out text was seen

Every document has a `split`: `train`; `validation`, which chooses between candidates and gives no
gradient; `heldout`, which is looked at once, for the figures in the card. The tests of a module
that is kept aside are kept aside too, as `heldout-tests` and `validation-tests`. The order is the
sorted path, so the archive is a function of the library alone.
"""

import argparse
import io
import sysconfig
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SPLITS = ("train", "validation", "validation-tests", "heldout", "heldout-tests")

HELDOUT = (
    "asyncio/queues.py",
    "calendar.py",
    "concurrent/futures/thread.py",
    "csv.py",
    "email/quoprimime.py",
    "fnmatch.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "html/parser.py",
    "idlelib/calltip.py",
    "json/encoder.py",
    "multiprocessing/pool.py",
    "netrc.py",
    "quopri.py",
    "sched.py",
    "shlex.py",
    "textwrap.py",
    "tkinter/simpledialog.py",
    "unittest/loader.py",
    "urllib/robotparser.py",
    "wsgiref/headers.py",
    "xml/dom/pulldom.py",
    "zipapp.py",
)
"""Modules that no weight has seen, spread over the library."""

VALIDATION = (
    "asyncio/locks.py",
    "email/header.py",
    "ftplib.py",
    "logging/config.py",
    "mimetypes.py",
    "sqlite3/dbapi2.py",
    "tkinter/filedialog.py",
    "xml/etree/ElementPath.py",
)
"""Modules that choose the best candidate."""

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "turtledemo"})
GENERATED_TABLE = "with gencodec.py"
"""Character maps in encodings/ say so in their first line; a table teaches nothing about Python."""


@dataclass(frozen=True)
class Document:
    """One source file: its path under the library, its text and the split that it belongs to."""

    path: str
    text: str
    split: str


def split_of(path: str) -> str:
    """The split of the file at `path`: by its own name, or by the module that it tests."""
    for split, modules in (("heldout", HELDOUT), ("validation", VALIDATION)):
        for module in modules:
            if path == module:
                return split
            if _is_test_of(path, module):
                return f"{split}-tests"
    return "train"


def _is_test_of(path: str, module: str) -> bool:
    """True for `test_<module>*.py` and for everything in a folder `test_<module>`."""
    stem = f"test_{PurePosixPath(module).stem}"
    return any(
        part == stem or part.startswith((f"{stem}.", f"{stem}_"))
        for part in PurePosixPath(path).parts
    )


def collect(library: Path) -> list[Document]:
    """Every readable source file of the library, in the order of its path."""
    documents = []
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library)
        if SKIPPED_FOLDERS.intersection(path.parts):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # the library keeps a few files in other encodings on purpose, for its tests
        if not text.strip() or GENERATED_TABLE in text[:400]:
            continue
        text = text.replace("\r\n", "\n")
        documents.append(Document(path.as_posix(), text, split_of(path.as_posix())))
    return documents


def pack(documents: list[Document], archive: Path) -> None:
    """Writes the documents as `<split>/<path>` into an .xz archive without times and owners."""
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for document in documents:
            content = document.text.encode()
            entry = tarfile.TarInfo(f"{document.split}/{document.path}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def unpack(archive: Path) -> list[Document]:
    """The documents of an archive that `pack` wrote, in their order."""
    documents = []
    with tarfile.open(archive, "r:xz") as tar:
        for entry in tar:
            content = tar.extractfile(entry)
            if content is None:
                raise ValueError(f"{archive}: {entry.name} is no file")
            split, path = entry.name.split("/", 1)
            documents.append(Document(path, content.read().decode(), split))
    return documents


def of_split(documents: list[Document], split: str) -> list[str]:
    """The texts of one split."""
    return [document.text for document in documents if document.split == split]


def _long_lines(texts: list[str]) -> Iterator[str]:
    for text in texts:
        for line in text.splitlines():
            if len(line.strip()) >= 40:
                yield line.strip()


def report(documents: list[Document]) -> str:
    """Sizes of the splits, and the share of their long lines that the training set holds too."""
    seen = set(_long_lines(of_split(documents, "train")))
    rows = []
    for split in SPLITS:
        texts = of_split(documents, split)
        count = Counter(line in seen for line in _long_lines(texts))
        share = count[True] / max(1, count.total())
        size = sum(len(text.encode()) for text in texts)
        rows.append(
            f"{split:16} {len(texts):5} files {size:9} bytes, "
            f"{share:5.1%} of the lines of 40 characters or more are in train"
        )
    return "\n".join(rows)


def main() -> None:
    """Packs, or reports."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pack", type=Path, help="archive to write")
    parser.add_argument("--report", type=Path, help="archive to report on")
    arguments = parser.parse_args()
    if arguments.pack:
        arguments.pack.parent.mkdir(parents=True, exist_ok=True)
        documents = collect(Path(sysconfig.get_path("stdlib")))
        pack(documents, arguments.pack)
        print(report(documents))
    if arguments.report:
        print(report(unpack(arguments.report)))


if __name__ == "__main__":
    main()
