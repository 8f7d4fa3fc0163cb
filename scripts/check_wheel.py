"""Check that the wheel holds exactly the tracked files of the four folders, built from the tree and from the sdist.

An editable install hides what this finds: a module in a sub-folder that pyproject.toml does not list imports fine from
the clone and is missing from the wheel; an untracked module is in the wheel and missing from everybody else's clone.
Builds in temporary folders and without isolation: offline, and an old build/ cannot leak into the result.

    python scripts/check_wheel.py            exit code 1 and one line per file that differs
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")


def package_folders(root: Path) -> dict[str, str]:
    """Folder below `root` -> its place in the wheel: {"kernels": "rhotrain/kernels", ...}."""
    with open(root / "pyproject.toml", "rb") as file:
        packages = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    return {folder: package.replace(".", "/") for package, folder in packages.items()}


def tracked_files(root: Path, folders: list[str]) -> list[str]:
    """What git tracks below `folders`, relative to `root`; the files on disk where `root` is not a git repository."""
    if (root / ".git").exists():
        listing = subprocess.run(["git", "ls-files", "-z", "--", *folders], cwd=root, check=True, capture_output=True)
        return [name for name in listing.stdout.decode().split("\0") if name]
    files = [path for folder in folders for path in (root / folder).rglob("*") if path.is_file()]
    return [path.relative_to(root).as_posix() for path in files if "__pycache__" not in path.parts]


def expected_names(root: Path) -> set[str]:
    """The wheel's files as they should be."""
    places = package_folders(root)
    names = set()
    for name in tracked_files(root, list(places)):
        folder, _, rest = name.partition("/")
        names.add(f"{places[folder]}/{rest}")
    return names


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a `wheel` or `sdist` of `source` into `out`; setuptools' own output is shown when it fails."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"building the {kind} failed:\n{run.stdout}{run.stderr}")
    return out / run.stdout.split()[-1]


def wheel_names(wheel: Path) -> set[str]:
    """The wheel's files without its metadata folder."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def built_names(root: Path) -> dict[str, set[str]]:
    """Files of the wheel built from a copy of `root`, and of the one built from that copy's sdist."""
    with tempfile.TemporaryDirectory() as folder:
        tree, out = Path(folder, "tree"), Path(folder, "out")
        tree.mkdir()
        for name in BUILT_FROM:
            shutil.copy(root / name, tree / name)
        for name in package_folders(root):
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        sdist = build("sdist", tree, out)
        shutil.unpack_archive(sdist, folder)
        unpacked = Path(folder, sdist.name.removesuffix(".tar.gz"))
        return {
            "wheel": wheel_names(build("wheel", tree, out / "tree")),
            "wheel from the sdist": wheel_names(build("wheel", unpacked, out / "sdist")),
        }


def differences(built: set[str], expected: set[str]) -> list[str]:
    """One line per file that is in one set only, with the likely fix."""
    missing = [
        f"missing: {name} (list its folder in pyproject.toml, or its kind in package-data)" for name in expected - built
    ]
    extra = [f"too much: {name} (git add it, or move it out of the folder)" for name in built - expected]
    return sorted(missing) + sorted(extra)


def main(root: Path = ROOT) -> int:
    """Print what differs, or one line that says how many files agree. Returns the exit code."""
    expected = expected_names(root)
    failed = False
    for kind, names in built_names(root).items():
        for line in differences(names, expected):
            print(f"{kind}: {line}", file=sys.stderr)
            failed = True
    if not failed:
        print(f"wheel: {len(expected)} files, exactly the tracked ones")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
