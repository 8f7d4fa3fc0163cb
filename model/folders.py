"""The cache folder, and folders that are whole or absent."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """$RHOTRAIN_CACHE, else ~/.cache/rhotrain. Not created here."""
    return Path(os.environ.get("RHOTRAIN_CACHE") or Path.home() / ".cache" / "rhotrain")


def write_folder(target: Path, write: Callable[[Path], None], keep: Callable[[], bool] = lambda: False) -> None:
    """Run `write` on a temporary folder beside `target`, then rename it there; an earlier `target` is
    replaced as a whole, unless `keep` says after the writing that it shall stay.

    When anything fails, `target` is what it was before.
    """
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    previous = target.parent / f".{target.name}.{os.getpid()}.old"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        if keep():
            return
        if target.exists():
            os.replace(target, previous)
        os.replace(temporary, target)
    except BaseException:
        if previous.exists() and not target.exists():
            os.replace(previous, target)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)


def cached_folder(name: str, write: Callable[[Path], None]) -> Path:
    """Folder `name` of the cache; made by `write` when it is not there. Of two processes that race, both make it
    and the first one's stays: the other may be reading it already."""
    target = cache_dir() / name
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_folder(target, write, keep=lambda: (target / "config.json").exists())
    return target
