"""Put four links into site-packages/rhotrain, so that mypy and language servers resolve `rhotrain.*`.

A default editable install maps the four folders through an import hook: static tools do not see it.
Setuptools' strict mode makes links too, but into `build/`: they die with `rm -rf build`, and new modules are missing.

    python scripts/link_editable.py          into this environment's site-packages (make setup does it)
    python scripts/link_editable.py FOLDER   into FOLDER: PYTHONPATH=FOLDER imports the clone without an install
"""

import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def package_folders(root: Path) -> dict[str, str]:
    """Package name -> folder below `root`, from pyproject.toml's package-dir map."""
    with open(root / "pyproject.toml", "rb") as file:
        return dict(tomllib.load(file)["tool"]["setuptools"]["package-dir"])


def link_packages(root: Path, site: Path) -> list[Path]:
    """Link every package of `root` below `site`, replacing links; return the links.

    Raises FileExistsError where a real folder stands in the way: that is a regular installation.
    """
    links = []
    for package, folder in package_folders(root).items():
        link = site.joinpath(*package.split("."))
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise FileExistsError(
                f"{link} is a folder of a regular installation, not a link; first: pip uninstall rhotrain"
            )
        link.symlink_to(root / folder, target_is_directory=True)
        links.append(link)
    return links


def main(args: list[str]) -> int:
    """Link into `args[0]` or into the running virtual environment. Returns the exit code."""
    if not args and sys.prefix == sys.base_prefix:
        print(f"{sys.executable} is no virtual environment; run the one of .venv, or name a folder", file=sys.stderr)
        return 2
    site = Path(args[0]).resolve() if args else Path(sysconfig.get_path("purelib"))
    try:
        links = link_packages(ROOT, site)
    except FileExistsError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"linked {len(links)} packages into {site}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
