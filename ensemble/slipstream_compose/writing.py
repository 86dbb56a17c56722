"""Compare a composed repository with what is on disk, and write what differs."""

from collections.abc import Iterator
from pathlib import Path

from slipstream_contract.deployment import ENGINE, engine_model_of, name_of, split_name
from slipstream_contract.errors import clip

from slipstream_compose import made
from slipstream_compose.compose import CONFIG, SETTINGS, ComposeError, Repository
from slipstream_compose.pbtxt import MARK


def differences(repository: Repository) -> Iterator[str]:
    """Yield one line for each file that differs from what would be written."""
    for path, content in repository.files.items():
        there = _read(repository.root / path)
        if there is None:
            yield f"{path}: missing"
        elif there != content:
            yield f"{path}: {_first_difference(there, content)}"
    for path in _superfluous(repository):
        yield f"{path}: not part of this repository"


def _first_difference(there: str, content: str) -> str:
    """Describe the first line that differs."""
    old, new = there.splitlines(), content.splitlines()
    for number, (left, right) in enumerate(zip(old, new, strict=False), 1):
        if left != right:
            return f"line {number} is {clip(left.strip())}, not {clip(right.strip())}"
    return f"{len(old)} lines, not {len(new)}" if len(old) != len(new) else "its last line end"


def write(repository: Repository) -> list[str]:
    """Write the files that differ; remove our models that are no longer part of the repository.

    Returns what was done. Raises ComposeError, before anything is written, for a file that compose
    did not write.
    """
    root = repository.root
    superfluous = list(_superfluous(repository))
    for path, content in repository.files.items():
        there = _read(root / path)
        if there is not None and there != content and not _is_ours(root / path.parts[0]):
            raise ComposeError(
                f"{root / path} was not written by `slipstream compose`: move it away first"
            )
    done = []
    for path, content in repository.files.items():
        target = root / path
        if _read(target) != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace(target, content)
            done.append(f"wrote {path}")
    for path in superfluous:
        (root / path).unlink()
        done.append(f"removed {path}")
        for folder in (root / path).parents:
            if folder == root or not folder.is_dir() or any(folder.iterdir()):
                break
            folder.rmdir()
    return done


def _superfluous(repository: Repository) -> Iterator[Path]:
    """Yield the files of models that an earlier call of that name wrote and this one does not."""
    engine_model = name_of(repository.deployment, ENGINE)
    for folder in sorted(folder.parent for folder in repository.root.glob(f"*/{CONFIG}")):
        name = folder.name
        is_left = Path(name) / CONFIG not in repository.files and _is_ours(folder)
        if is_left and _engine_of(folder) == engine_model:
            paths = (Path(name) / "1" / SETTINGS, Path(name) / CONFIG)
            yield from (path for path in paths if (repository.root / path).is_file())
    for path in made.found(repository.root / engine_model / "1"):
        if path.relative_to(repository.root) not in repository.files:
            yield path.relative_to(repository.root)


def _engine_of(model: Path) -> str:
    """Return the engine of a model of ours; settings that cannot be read leave its name."""
    try:
        return engine_model_of(model)
    except ValueError:
        return name_of(split_name(model.name)[0], ENGINE)


def _is_ours(model: Path) -> bool:
    """Return whether config.pbtxt has our mark, or there is no file to overwrite."""
    text = _read(model / CONFIG)
    if text is None:
        return not (model / "1" / SETTINGS).exists()
    return text.startswith(MARK)


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def _replace(path: Path, content: str) -> None:
    """Write to a new file and rename it: a polling server never sees half a file.

    Raises ComposeError, with nothing half-written left, where there is no room or no permission.
    """
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(content, encoding="utf-8", newline="\n")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ComposeError(f"--output: {path} cannot be written: {error.strerror}") from None
