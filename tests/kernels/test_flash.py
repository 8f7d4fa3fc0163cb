"""flash-attn 2, 3, 4 and PyTorch's varlen attention: what is found, what it is asked, what it can do; no GPU needed.

The stand-ins' signatures are recorded in data/flash_signatures.json; the slow test reads the source distributions (it
parses them and runs nothing) and compares.
"""

import ast
import hashlib
import inspect
import io
import os
import re
import ssl
import subprocess
import sys
import tarfile
import types
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_flash import FUNCTIONS, KINDS, attend, flash_stand_in, recorded, to_signature
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rhotrain.kernels import flash, flash_calls
from rhotrain.kernels.attention import attention_backend, varlen_attention
from rhotrain.kernels.flash import LIBRARIES, SOURCES, Call, Library, Package, package, why_not
from rhotrain.kernels.paged_attention import PagedBatch, paged_attention, paged_decode

# ---- the signatures -------------------------------------------------------------------------------------------------


def parsed(source: str, name: str) -> str:
    """The parameters of a function as text, without annotations."""
    found = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    for argument in (*found.args.args, *found.args.kwonlyargs):
        argument.annotation = None
    return f"({ast.unparse(found.args)})"


def test_installed_pytorch_has_a_recorded_signature() -> None:
    here = parsed(Path(inspect.getfile(varlen_attn)).read_text(), "varlen_attn")
    kinds = [kind for kind in recorded() if kind.startswith("torch_varlen")]
    assert here in [recorded()[kind]["functions"]["varlen_attn"] for kind in kinds]
    found = package("torch_varlen")
    assert isinstance(found, Package) and found.varlen is varlen_attn
    assert torch.__version__.startswith(found.version)


def test_every_stand_in_has_a_recorded_signature_that_our_calls_need() -> None:
    assert recorded().keys() == FUNCTIONS.keys() == set(KINDS)
    for kind, entry in recorded().items():
        assert entry["functions"].keys() == FUNCTIONS[kind].keys()
        source = SOURCES[kind.split()[0]]  # type: ignore[index]
        for wanted in (source.varlen, source.kvcache):
            if wanted is not None:
                assert wanted[1] <= to_signature(entry["functions"][wanted[0]]).parameters.keys()


def download(name: str, filename: str) -> bytes:
    """A file of a distribution, from the package index that pip uses. Nothing of it is run."""
    configured = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings = dict(re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", configured, re.MULTILINE))
    index = os.environ.get("PIP_INDEX_URL") or settings.get("index-url", "https://pypi.org/simple")
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or settings.get("cert"))

    def read(url: str) -> bytes:
        request = urllib.request.Request(url, headers={"Accept": "text/html"})
        with urllib.request.urlopen(request, timeout=180, context=context) as answer:
            return answer.read()

    page = f"{index.rstrip('/')}/{name}/"
    links = re.findall(r'href="([^"]+)"', read(page).decode())
    link = next(link for link in links if urllib.parse.urlsplit(link).path.endswith(f"/{filename}"))
    url, digest = urllib.parse.urldefrag(urllib.parse.urljoin(page, link))
    content = read(url)
    assert f"sha256={hashlib.sha256(content).hexdigest()}" == digest
    return content


def member(archive: bytes, filename: str, path: str) -> str:
    if filename.endswith(".whl"):
        return zipfile.ZipFile(io.BytesIO(archive)).read(path).decode()
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as files:
        found = files.extractfile(f"{filename.removesuffix('.tar.gz')}/{path}")
        assert found is not None
        return found.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flash_attn", "flash_attn3", "flash_attn4"])
def test_recorded_signatures_are_those_of_the_distributions(kind: str) -> None:
    entry = recorded()[kind]
    archive = download(entry["distribution"], entry["archive"])
    assert hashlib.sha256(archive).hexdigest() == entry["sha256"]
    source = member(archive, entry["archive"], entry["file"])
    assert {name: parsed(source, name) for name in entry["functions"]} == entry["functions"]


# ---- what is found --------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a module under a name: functions by keyword, or an error that its import raises."""
    package.cache_clear()

    def put(name: str, error: Exception | None = None, **functions: Any) -> None:
        def load(wanted: str, before: Any = flash.importlib.import_module) -> Any:
            if wanted != name:
                return before(wanted)
            if error is not None:
                raise error
            return types.SimpleNamespace(**functions)

        monkeypatch.setattr(flash.importlib, "import_module", load)

    yield put
    package.cache_clear()


def takes(*names: str) -> Any:
    def function(*args: Any, **kwargs: Any) -> None: ...

    kind = inspect.Parameter.KEYWORD_ONLY
    function.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    return function


def test_finding_a_package(modules: Any) -> None:
    varlen, kvcache = takes("softcap", "block_table", "dropout_p"), takes("softcap", "block_table", "num_splits")
    modules("flash_attn", flash_attn_varlen_func=varlen, flash_attn_with_kvcache=kvcache)
    found = package("flash_attn")
    assert isinstance(found, Package) and (found.varlen, found.kvcache) == (varlen, kvcache)


@pytest.mark.parametrize(
    ("name", "error", "functions", "said"),
    [
        ("flash_attn", ModuleNotFoundError("no", name="flash_attn"), {}, "flash-attn 2 is not installed"),
        ("flash_attn4", ModuleNotFoundError("no", name="flash_attn"), {}, "flash-attn 4 is not installed"),
        ("flash_attn4", ModuleNotFoundError("No module named 'cutlass'", name="cutlass"), {}, "imported: .*cutlass"),
        ("flash_attn", ImportError("undefined symbol: _ZN3c104"), {}, "cannot be imported: undefined symbol"),
        ("flash_attn3", RuntimeError("operator exists\ntrace"), {}, "cannot be imported: operator exists$"),
        # flash-attn 4 alone makes flash_attn a namespace without functions.
        ("flash_attn", None, {}, "flash-attn 2 is not installed"),
        ("flash_attn", None, {"flash_attn_varlen_func": takes("block_table", "dropout_p")}, "too old.*has no softcap"),
        # What flash-attn 2.8 carries as flash_attn/cute.
        ("flash_attn4", None, {"flash_attn_varlen_func": takes("page_table", "seqused_k")}, "no learnable_sink, max_s"),
    ],
)
def test_what_cannot_be_used_is_said(
    modules: Any, name: Library, error: Exception | None, functions: dict[str, Any], said: str
) -> None:
    modules(SOURCES[name].module, error, **functions)
    found = package(name)
    assert isinstance(found, str) and re.search(said, found)


# ---- what a library can do ------------------------------------------------------------------------------------------


def call(**changes: Any) -> Call:
    return Call(**{"device": torch.device("cpu"), "dtype": torch.bfloat16, **changes})


def runs(name: str, capability: tuple[int, int] = (9, 0), **changes: Any) -> bool:
    with flash_stand_in(name, capability=capability, half_only=True):
        return why_not(name.split()[0], call(**changes)) is None  # type: ignore[arg-type]


def test_gpus() -> None:
    can = {name: [m for m in range(7, 14) if runs(name, (m, 0))] for name in LIBRARIES}
    assert can["flash_attn3"] == [9] and can["flash_attn4"] == [9, 10, 11, 12]
    assert can["flash_attn"] == can["torch_varlen"] == [8, 9, 10, 11, 12, 13]
    assert why_not("flash_attn", call()) == "it needs CUDA, and the tensors are on cpu"


def test_head_dimensions_and_types() -> None:
    for name in LIBRARIES:
        assert runs(name, dtype=torch.float16) and not runs(name, dtype=torch.float32)
        for dim, fits in ((8, True), (80, True), (256, True), (60, False), (264, False)):
            assert runs(name, key_dim=dim, value_dim=dim) == fits
        assert not runs(name, key_dim=192, value_dim=128)
    assert runs("flash_attn4", (10, 0), key_dim=128, value_dim=128)
    assert not runs("flash_attn4", (10, 0), key_dim=256, value_dim=256)


def test_options() -> None:
    assert [runs(name, softcap=True) for name in LIBRARIES] == [True, True, True, False]
    assert [runs(name, sinks=True) for name in LIBRARIES] == [False, True, False, False]
    assert not runs("flash_attn4", (12, 0), sinks=True) and runs("flash_attn4", (10, 0), sinks=True)
    assert [runs(name, dropout=True) for name in LIBRARIES] == [False, False, True, False]
    assert not runs("flash_attn", dropout=True, softcap=True)


def test_pages() -> None:
    sizes = (1, 16, 128, 256, 384, 512)
    for name, fits in (("flash_attn3", sizes), ("flash_attn", (256, 512)), ("torch_varlen", (256, 512))):
        assert tuple(n for n in sizes if runs(name, page_size=n)) == fits
        assert tuple(n for n in sizes if runs(name, page_size=n, decode=True)) == fits
    assert runs("flash_attn4", page_size=16) and not runs("flash_attn4", page_size=256, decode=True)
    assert not runs("flash_attn4", (12, 0), page_size=16)
    with flash_stand_in("torch_varlen 2.11"):
        assert why_not("torch_varlen", call(page_size=256)) == "PyTorch 2.11 has no block tables; 2.12 has"


def test_every_reason_names_the_value() -> None:
    with flash_stand_in("flash_attn", half_only=True, capability=(8, 6)):
        assert why_not("flash_attn", call(dtype=torch.float32)) == "float32; it takes float16 and bfloat16"
        assert why_not("flash_attn3", call()) == "compute capability 8.6; flash-attn 3 runs on 9.x"
        assert why_not("flash_attn4", call()) == "compute capability 8.6; flash-attn 4 runs on 9.x to 12.x"
        assert why_not("flash_attn", call(key_dim=60, value_dim=60)) == (
            "head dimension 60; it takes multiples of 8 up to 256"
        )
        assert why_not("flash_attn", call(page_size=16)) == "pages of 16 tokens; it reads multiples of 256"


def test_waiting_is_seen() -> None:
    """A library whose paged path reads a length back is not taken for decode by itself, and has no place in a graph."""
    for waits in (False, True):
        with flash_stand_in("flash_attn", waits=waits) as library:
            assert flash_calls.graph_safe("flash_attn", "cpu") is not waits
            assert not library.calls
            wanted = call(page_size=256, decode=True)
            assert flash_calls.first_fitting(wanted) == (None if waits else "flash_attn")
            assert flash_calls.first_fitting(call(page_size=256)) == "flash_attn"
    assert flash_calls.graph_safe("triton") and flash_calls.graph_safe("sdpa")


def test_other_errors_of_the_trial_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image is available")

    with flash_stand_in("flash_attn3"), monkeypatch.context() as patch:
        patch.setattr(flash, "package", lambda name: Package(broken, broken, "0"))
        with pytest.raises(RuntimeError, match="no kernel image"):
            flash_calls.graph_safe("flash_attn3", "cpu")


# ---- the stand-ins themselves ---------------------------------------------------------------------------------------


def test_the_documented_masks() -> None:
    """The two pictures in flash_attn_with_kvcache's docstring: bottom-right aligned, empty rows 0."""
    values = torch.eye(5, dtype=torch.float64)[:, None]
    out = attend(torch.zeros(2, 1, 5).double(), torch.zeros(5, 1, 5).double(), values, scale=1.0, left=-1, right=0)
    assert (out[:, 0] > 0).tolist() == [[True] * 4 + [False], [True] * 5]
    out = attend(torch.zeros(5, 1, 5).double(), torch.zeros(2, 1, 5).double(), values[:2], scale=1.0, left=-1, right=0)
    assert (out[:, 0, :2] > 0).tolist() == [[False, False]] * 3 + [[True, False], [True, True]]


@pytest.mark.parametrize(("kind", "key"), [("flash_attn", "block_table"), ("flash_attn3", "page_table")])
def test_append_in_place(kind: str, key: str) -> None:
    """New keys go to position cache_seqlens of their pages, and are attended to; we do not use this ourselves."""
    g = torch.Generator().manual_seed(0)
    pools = [torch.randn(3, 256, 2, 8, generator=g) for _ in range(2)]
    new = [torch.randn(2, 1, 2, 8, generator=g) for _ in range(2)]
    q, table = torch.randn(2, 1, 4, 8, generator=g), torch.tensor([[2], [0]], dtype=torch.int32)
    lens = torch.tensor([255, 3], dtype=torch.int32)
    before = [pool.clone() for pool in pools]
    with flash_stand_in(kind):
        found = package_of(kind)
        assert found.kvcache is not None
        options: dict[str, Any] = {"cache_seqlens": lens, key: table, "causal": True, "softmax_scale": 0.5}
        out = found.kvcache(q, *pools, *new, **options)
        after = found.kvcache(q, *pools, **{**options, "cache_seqlens": lens + 1})
    for pool, old, added in zip(pools, before, new):
        old[2, 255], old[0, 3] = added[0, 0], added[1, 0]
        assert torch.equal(pool, old)
    assert torch.equal(out, after)


def package_of(kind: str) -> Package:
    found = flash.package(kind.split()[0])  # type: ignore[arg-type]
    assert isinstance(found, Package)
    return found


def qkv(dtype: torch.dtype = torch.bfloat16, dim: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four tokens of one segment, two heads; and the segment's offsets."""
    q, k, v = torch.zeros(3, 4, 2, dim, dtype=dtype)
    return q, k, v, torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_stand_ins_refuse_what_the_real_ones_refuse(kind: str) -> None:
    with flash_stand_in(kind, half_only=True):
        function = package_of(kind).varlen
        names = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
        if not kind.startswith("torch"):
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

        def ask(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, most: int = 4, **options: Any) -> None:
            function(q, k, v, **dict(zip(names, (cu, cu, most, most))), **options)

        ask(*qkv())
        with pytest.raises(TypeError, match="no_such_option"):
            ask(*qkv(), no_such_option=1)
        for wrong in (qkv(torch.float32), qkv(dim=12), qkv(dim=264), (*qkv()[:3], torch.tensor([0, 4]))):
            with pytest.raises(RuntimeError):
                ask(*wrong)
        q, k, v, cu = qkv()
        with pytest.raises(RuntimeError, match="contiguous"):
            ask(torch.zeros(4, 2, 16, dtype=q.dtype)[..., ::2], k, v, cu)
        with pytest.raises(AssertionError, match="longer than the stated 3"):
            ask(q, k, v, cu, most=3)


@pytest.mark.parametrize("kind", ["flash_attn", "torch_varlen"])
def test_stand_ins_refuse_small_pages(kind: Any) -> None:
    pool, q, lens = torch.zeros(2, 128, 2, 8), torch.zeros(1, 2, 8), torch.ones(1, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with flash_stand_in(kind), pytest.raises(RuntimeError, match="divisible by 256"):
        flash_calls.decode(kind, q, pool, pool, table, lens, scale=1.0, window=None, softcap=None)


# ---- a library by name ----------------------------------------------------------------------------------------------


def test_a_named_library_is_taken_or_refused_with_the_reason() -> None:
    q, k, v, cu = qkv()
    for kind in KINDS:
        with flash_stand_in(kind, half_only=True) as library:
            name: Any = kind.split()[0]
            assert attention_backend("cpu", torch.bfloat16, backend=name) == name
            options: dict[str, Any] = {"cu_q": cu, "cu_k": cu, "max_q": 4, "max_k": 4, "scale": 1.0}
            varlen_attention(q, k, v, **options, backend=name)
            assert sum(library.calls.values()) == 1
            for other in ("sdpa", "reference"):
                varlen_attention(q, k, v, **options, backend=other)
            assert sum(library.calls.values()) == 1
            with pytest.raises(ValueError, match=f"backend: '{name}' cannot run here: float32; it takes .*='auto'"):
                varlen_attention(q.float(), k.float(), v.float(), **options, backend=name)
    with pytest.raises(ValueError, match="'flash_attn3' cannot run here: it needs CUDA"):
        attention_backend("cpu", torch.bfloat16, backend="flash_attn3")
    with pytest.raises(ValueError, match="backend: 'flash_attn5' is not one of auto, triton"):
        attention_backend("cpu", torch.bfloat16, backend="flash_attn5")  # type: ignore[arg-type]


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """Three sequences over shuffled pages, in bf16 on the GPU, and the truth in float64 on the CPU."""

    page_size: int

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        width = 512 // self.page_size
        self.pools = [torch.randn(3 * width, self.page_size, 2, 64, generator=g).bfloat16() for _ in range(2)]
        self.tables = torch.randperm(3 * width, generator=g).view(3, width).int()
        self.q = torch.randn(9, 8, 64, generator=g).bfloat16()

    def error(self, out: Tensor, lens_q: tuple[int, ...], lens_k: list[int]) -> float:
        batch = PagedBatch.make(self.tables[: len(lens_q)], lens_q, lens_k, self.page_size)
        k_pool, v_pool = (pool.double() for pool in self.pools)
        truth = paged_attention(self.q[: batch.tokens].double(), k_pool, v_pool, batch, scale=0.125)
        return float((out.cpu().double() - truth).abs().max())


def skip_unless_it_runs(name: Library, wanted: Call) -> None:
    why = why_not(name, wanted)
    if why is not None:
        pytest.skip(f"{name}: {why}")


@pytest.mark.cuda
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("name", LIBRARIES)
def test_cuda_prompts_over_pages(name: Library, page_size: int) -> None:
    skip_unless_it_runs(name, call(device=torch.device("cuda"), page_size=page_size))
    problem, lens_q, lens_k = Problem(page_size), (4, 5), [260, 33]
    batch = PagedBatch.make(problem.tables[:2].cuda(), lens_q, lens_k, page_size)
    k_pool, v_pool = (pool.cuda() for pool in problem.pools)
    out = paged_attention(problem.q.cuda(), k_pool, v_pool, batch, scale=0.125, backend=name)
    assert problem.error(out, lens_q, lens_k) < 0.02


@pytest.mark.cuda
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("name", LIBRARIES)
def test_cuda_decode_over_pages(name: Library, page_size: int) -> None:
    """Where it does not wait for the device, also from a graph, whose replay reads new lengths."""
    skip_unless_it_runs(name, call(device=torch.device("cuda"), page_size=page_size, decode=True))
    problem = Problem(page_size)
    lens = torch.tensor([5, 17, 300], dtype=torch.int32, device="cuda")
    q, tables, (k_pool, v_pool) = problem.q[:3].cuda(), problem.tables.cuda(), (p.cuda() for p in problem.pools)
    decode = partial(paged_decode, q, k_pool, v_pool, tables, lens, scale=0.125, backend=name)
    assert problem.error(decode(), (1, 1, 1), [5, 17, 300]) < 0.02
    if not flash_calls.graph_safe(name):
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    lens.copy_(torch.tensor([31, 257, 64], dtype=torch.int32))
    graph.replay()
    assert torch.equal(out, decode()) and problem.error(out, (1, 1, 1), [31, 257, 64]) < 0.02
