"""The package as others meet it: beside Hugging Face's `kernels`, without torch, without triton; pins; the wheel."""

import ast
import graphlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "model", "rollout", "train")  # imports point to the left
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TORCH_FREE = ("kernels.spec", "rollout.completion", "train.config", "train.presets", "train.cli")


def room_files() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def module_name(path: Path) -> str:
    return "rhotrain." + ".".join(path.relative_to(ROOT).with_suffix("").parts)


def run_python(*args: str, cwd: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in `cwd`, with `path` on PYTHONPATH: behind `cwd`, as site-packages is."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def script_module(name: str) -> ModuleType:
    """scripts/`name`.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- Hugging Face's `kernels` and our folder of that name

# transformers imports `kernels` in hub_kernels when it finds a version that it accepts.
IMPORT_TRANSFORMERS = """
import transformers
from transformers.integrations import hub_kernels
from transformers.utils.import_utils import is_kernels_available
print("available", is_kernels_available())
"""


@pytest.fixture
def hugging_face_kernels(tmp_path: Path) -> Path:
    """A folder for sys.path with a stand-in for the distribution `kernels`, of a version that transformers accepts."""
    from transformers.utils import import_utils

    version = import_utils.KERNELS_MIN_VERSION
    site = tmp_path / "site"
    package, info = site / "kernels", site / f"kernels-{version}.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    # Any name that transformers asks for is a class that also works as a decorator factory.
    (package / "__init__.py").write_text(
        textwrap.dedent("""
        MARK = "hugging face"

        def __getattr__(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__init__": lambda self, *a, **k: None, "__call__": lambda self, x: x})
        """)
    )
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    return site


def run_as(how: str, code: str, cwd: Path, site: Path | None, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` by `python -c` or `python -m`; in both the current folder comes first on sys.path."""
    if how == "-c":
        return run_python("-c", code, cwd=cwd, path=site)
    folder = site or tmp_path / "module"
    folder.mkdir(exist_ok=True)
    (folder / "imports_transformers.py").write_text(code)
    return run_python("-m", "imports_transformers", cwd=cwd, path=folder)


@pytest.mark.parametrize("how", ["-c", "-m"])
def test_transformers_imports_from_the_root_with_hugging_face_kernels(
    how: str, hugging_face_kernels: Path, tmp_path: Path
) -> None:
    code = IMPORT_TRANSFORMERS + "import kernels\nprint(kernels.MARK)\nimport rhotrain.kernels.spec"
    run = run_as(how, code, ROOT, hugging_face_kernels, tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:2] == ["available True", "hugging face"]


@pytest.mark.parametrize("how", ["-c", "-m"])
def test_transformers_imports_from_the_root_without_hugging_face_kernels(how: str, tmp_path: Path) -> None:
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        pytest.skip("Hugging Face's kernels is installed here; the test beside this one covers that case")
    run = run_as(how, IMPORT_TRANSFORMERS + "import rhotrain.kernels.spec", ROOT, None, tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "available False"


def test_an_init_file_in_kernels_would_crash_transformers(hugging_face_kernels: Path, tmp_path: Path) -> None:
    """The control of the tests above: what they guard against does happen, and they would see it."""
    clone = tmp_path / "clone"
    (clone / "kernels").mkdir(parents=True)
    (clone / "kernels" / "__init__.py").touch()
    run = run_as("-c", IMPORT_TRANSFORMERS, clone, hugging_face_kernels, tmp_path)
    assert run.returncode != 0 and "cannot import name" in run.stderr


def test_no_init_files_and_every_room_is_typed() -> None:
    assert [path for path in room_files() if path.name == "__init__.py"] == []
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert [room for room in ROOMS if not (ROOT / room / "py.typed").is_file()] == []


# --- who imports whom


def imported_modules(source: str) -> list[str]:
    """Every module that `source` imports, at any level and also for type checking only; `from a import b` gives a.b."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += ["." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def forbidden_imports(room: str, source: str) -> list[str]:
    """Imports that `source`, a module of `room`, may not have."""
    allowed = ROOMS[: ROOMS.index(room) + 1]
    found = []
    for name in imported_modules(source):
        top, _, rest = name.partition(".")
        if top == "rhotrain" and rest.split(".")[0] not in allowed:
            found.append(f"{name} (imports point one way: {' <- '.join(ROOMS)})")
        elif top in ("", *ROOMS, "tests", "benchmarks", "scripts"):
            found.append(f"{name} (write the absolute rhotrain.* name)")
    return found


def test_rooms_import_one_way() -> None:
    found = {path.name: forbidden_imports(path.parent.name, path.read_text()) for path in room_files()}
    assert {name: imports for name, imports in found.items() if imports} == {}


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("kernels", "from rhotrain.model.load import load_model"),
        ("model", "import rhotrain.train.config"),
        ("rollout", "def f():\n    from rhotrain import train"),
        ("rollout", "from .completion import Completion"),
        ("train", "from kernels.spec import Objective"),
        ("train", "import tests.helpers"),
    ],
)
def test_the_import_check_sees(room: str, line: str) -> None:
    assert forbidden_imports(room, line)
    assert not forbidden_imports("train", "import torch\nfrom rhotrain.kernels import spec")


def test_modules_import_no_circle() -> None:
    """Not even for type checking: a class would then exist twice for mypy and pyright, as kernels.x.A and as
    rhotrain.kernels.x.A, since they find a module under its path and under its installed name."""
    names = {module_name(path) for path in room_files()}
    graph = {
        module_name(path): {
            m for name in imported_modules(path.read_text()) for m in names if f"{name}.".startswith(f"{m}.")
        }
        for path in room_files()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_no_torch(module: str) -> None:
    code = f"import sys, rhotrain.{module}; print(*({{'torch', 'transformers', 'numpy'}} & sys.modules.keys()))"
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""


NO_TRITON = """
import importlib, sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
"""


def test_everything_imports_without_triton() -> None:
    modules = [module_name(path) for path in room_files()]
    code = f"""{NO_TRITON}
for name in {modules!r}:
    importlib.import_module(name)
assert "triton" not in sys.modules
from rhotrain.kernels.backend import HAS_TRITON
print("HAS_TRITON", HAS_TRITON)
"""
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("HAS_TRITON False")


def test_training_works_without_triton(tmp_path: Path) -> None:
    words = ["train", "--steps", "2", "--eval-size", "0", "--threads", "1", "--out", str(tmp_path / "run")]
    code = f"""{NO_TRITON}
from rhotrain.train.cli import main
assert main({words!r}) == 0
assert "triton" not in sys.modules
"""
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr
    assert "step  2/2" in run.stdout or "step 2/2" in run.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


# --- pins


def pins(name: str) -> dict[str, Requirement]:
    """A constraints file as {canonical name: requirement}."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def pinned_version(requirement: Requirement) -> Version:
    """The version of a pin; the lower bound of a range."""
    return next(Version(spec.version) for spec in requirement.specifier if spec.operator in ("==", ">="))


def declared(*extras: str) -> dict[str, Requirement]:
    """pyproject.toml's requirements, run time and `extras`."""
    lines = PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


def test_every_dependency_has_a_tested_version_that_it_allows() -> None:
    tested = pins("constraints.txt")
    for name, requirement in declared("tasks", "plot", "fused", "lora", "optim", "bench", "dev").items():
        assert name in tested, f"constraints.txt has no version of {name}"
        assert pinned_version(tested[name]) in requirement.specifier, f"{tested[name]} is outside of {requirement}"


def test_oldest_versions_are_the_lower_bounds() -> None:
    oldest = {name: pinned_version(pin) for name, pin in pins("constraints-oldest.txt").items()}
    bounds = {
        name: pinned_version(requirement)
        for name, requirement in declared("tasks", "plot", "fused", "lora", "optim").items()
    }
    assert oldest == bounds


# --- the wheel and the links


def small_clone(folder: Path) -> Path:
    """A clone in miniature, not a git repository: the real pyproject.toml, one module in each room."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        folder.joinpath(name).write_bytes((ROOT / name).read_bytes())
    for room in ROOMS:
        folder.joinpath(room).mkdir()
        folder.joinpath(room, "py.typed").touch()
        folder.joinpath(room, f"{room}_module.py").touch()
    return folder


def test_wheel_check_finds_a_forgotten_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_wheel = script_module("check_wheel")
    clone = small_clone(tmp_path)
    clone.joinpath("kernels", "deep").mkdir()
    clone.joinpath("kernels", "deep", "lost.py").touch()
    assert check_wheel.main(clone) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r" \(.*", "", line) for line in lines] == [
        "wheel: missing: rhotrain/kernels/deep/lost.py",
        "wheel from the sdist: missing: rhotrain/kernels/deep/lost.py",
    ]


def test_wheel_check_finds_an_untracked_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_wheel = script_module("check_wheel")
    clone = small_clone(tmp_path)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=clone, check=True)
    assert check_wheel.main(clone) == 0
    clone.joinpath("train", "new.py").touch()
    assert check_wheel.main(clone) == 1
    assert "wheel: too much: rhotrain/train/new.py" in capsys.readouterr().err


def test_links_resolve_every_package_and_replace_only_links(tmp_path: Path) -> None:
    link_editable = script_module("link_editable")
    for _ in range(2):
        links = link_editable.link_packages(ROOT, tmp_path)
    assert [link.relative_to(tmp_path).as_posix() for link in links] == [f"rhotrain/{room}" for room in ROOMS]
    assert [link.resolve() for link in links] == [ROOT / room for room in ROOMS]
    links[0].unlink()
    links[0].mkdir()
    with pytest.raises(FileExistsError, match="pip uninstall rhotrain"):
        link_editable.link_packages(ROOT, tmp_path)


def test_readme_lists_every_module_and_no_other() -> None:
    """Its file tree: the name of a room on a line `    room/ ...`, its modules on lines `      module.py ...` below."""
    listed, room = set(), ""
    for line in (ROOT / "README.md").read_text().splitlines():
        if entry := re.match(r"    (\w+)/ ", line):
            room = entry[1]
        elif entry := re.match(r"      (\w+\.py) +\S", line):
            listed.add(f"{room}/{entry[1]}")
    assert listed == {f"{path.parent.name}/{path.name}" for path in room_files()}
