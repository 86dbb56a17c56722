"""pyproject.toml names every package: for pip, and for the import rules."""

import tomllib
from itertools import chain
from pathlib import Path

from slipstream_serve.server import repository_root

ROOT = repository_root()
TOOL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
FOLDERS = {
    name: ROOT / folder for name, folder in TOOL["setuptools"]["package-dir"].items() if name
}


def packages(name: str) -> set[str]:
    """A package and those in it, at any depth."""
    return {
        ".".join([name, *path.parent.relative_to(FOLDERS[name]).parts])
        for path in FOLDERS[name].rglob("__init__.py")
    }


def test_pip_installs_every_package() -> None:
    expected = set(chain.from_iterable(map(packages, FOLDERS)))
    assert sorted(TOOL["setuptools"]["packages"]) == sorted(expected)


def test_every_package_of_ours_has_a_folder_in_the_layers() -> None:
    tops = {
        path.parent.name
        for path in chain(*(ROOT.glob(f"{area}/*/__init__.py") for area in areas()))
    }
    rules = TOOL["importlinter"]
    assert tops == set(FOLDERS) == set(rules["root_packages"])
    layers = " | ".join(rules["contracts"][0]["layers"]).split(" | ")
    assert tops == set(layers)
    [circles] = [one for one in rules["contracts"] if one["type"] == "acyclic_siblings"]
    assert tops == set(circles["ancestors"])


def areas() -> set[str]:
    """The folders at the top that hold packages."""
    return {folder.parent.name for folder in FOLDERS.values()} | {"gateway"}


def test_pip_installs_what_packages_hold_beside_python() -> None:
    patterns = TOOL["setuptools"]["package-data"]
    for name, folder in FOLDERS.items():
        for path in folder.rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc"):
                continue
            home = next(one for one in path.parents if (one / "__init__.py").is_file())
            package = ".".join([name, *home.relative_to(folder).parts])
            allowed = [*patterns.get("*", []), *patterns.get(package, [])]
            inside = path.relative_to(home)
            assert any(
                inside.match(pattern) and len(inside.parts) == len(Path(pattern).parts)
                for pattern in allowed
            ), path
