"""The benchmarks' clock and their CUDA graphs: with stand-ins for CUDA where there is none."""

import contextlib
from collections.abc import Iterator

import kernel_limits
import pytest
import torch
from kernel_cases import Result
from kernel_limits import copy_gb_per_s, read_gb_per_s
from kernel_peers import Unavailable, captured

CPU = torch.device("cpu")


def test_a_cuda_round_flushes_by_reading_and_sleeps_before_its_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1

        def record(self) -> None:
            self.at = len(seen)
            seen.append("event")

        def elapsed_time(self, stop: "Event") -> float:
            return float(stop.at - self.at)

    flush, total = torch.full((5,), 3.0), torch.zeros(())
    monkeypatch.setattr(kernel_limits, "_flush_buffer", lambda device: (flush, total))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append(f"{float(total):g} read, sleep {cycles}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("synchronize"))
    times = kernel_limits._cuda_rounds(lambda: seen.append("call"), 2, CPU)
    assert times == [2.0, 2.0] and torch.equal(flush, torch.full((5,), 3.0))
    assert seen == 2 * ["15 read, sleep 2000000", "event", "call", "event"] + ["synchronize"]


class FakeCuda:
    """The parts of torch.cuda that a capture takes, all in one object, and what state they are in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode, self.capturing, self.replays, self.streams = "default", False, 0, ["current"]
        for name in ("CUDAGraph", "Stream", "current_stream", "stream", "graph", "set_sync_debug_mode"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def CUDAGraph(self) -> "FakeCuda":
        return self

    def replay(self) -> None:
        self.replays += 1

    def Stream(self, device: torch.device) -> "FakeCuda":
        return self

    def current_stream(self, device: torch.device) -> str:
        return self.streams[-1]

    def wait_stream(self, stream: str) -> None:
        assert stream == "current"

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode

    @contextlib.contextmanager
    def stream(self, stream: "FakeCuda") -> Iterator[None]:
        self.streams.append("side")
        try:
            yield
        finally:
            self.streams.pop()

    @contextlib.contextmanager
    def graph(self, graph: "FakeCuda", stream: "FakeCuda") -> Iterator[None]:
        assert self.mode == "default"
        self.capturing = True
        try:
            yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904, as torch does
        finally:
            self.capturing = False


def test_a_capture_runs_the_call_once_more_and_a_replay_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, calls = FakeCuda(monkeypatch), list[tuple[str, bool, str]]()

    def call() -> Result:
        calls.append((cuda.mode, cuda.capturing, cuda.streams[-1]))
        return Result(loss=torch.tensor(float(len(calls))))

    replay = captured(call, CPU)
    assert calls == [("default", False, "side"), ("error", False, "side"), ("default", True, "side")]
    result = replay()
    assert result.loss == 3.0 and replay() is result and cuda.replays == 2 and len(calls) == 3
    assert cuda.streams == ["current"]


@pytest.mark.parametrize("when", ["waits", "captures"])
def test_what_cannot_be_captured_says_why(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    cuda = FakeCuda(monkeypatch)

    def call() -> Result:
        if cuda.capturing or (when == "waits" and cuda.mode == "error"):
            raise RuntimeError(f"no good: {cuda.mode}")
        return Result()

    mode = {"waits": "error", "captures": "default"}[when]
    with pytest.raises(Unavailable, match=f"^cannot be captured: no good: {mode}$"):
        captured(call, CPU)
    assert (cuda.mode, cuda.capturing, cuda.streams) == ("default", False, ["current"])


def test_a_read_counts_its_bytes_once_and_a_copy_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_limits, "_large", lambda device, most_bytes: torch.ones(1000))
    monkeypatch.setattr(kernel_limits, "milliseconds", lambda call, device, least: [2.0])
    assert read_gb_per_s.__wrapped__(CPU) == pytest.approx(4000 / 2e-3 / 1e9)
    assert copy_gb_per_s.__wrapped__(CPU) == pytest.approx(8000 / 2e-3 / 1e9)


@pytest.mark.cuda
def test_a_call_that_waits_for_the_device_spoils_no_later_capture() -> None:
    x = torch.ones(8, device="cuda")
    stream = torch.cuda.current_stream()
    with pytest.raises(Unavailable, match="cannot be captured: "):
        captured(lambda: Result(loss=x[: int(x.sum())]), x.device)
    assert torch.cuda.current_stream() == stream
    replay = captured(lambda: Result(loss=torch.rand(8, device="cuda") + x), x.device)
    draws = [loss.clone() for loss in (replay().loss, replay().loss) if loss is not None]
    assert not torch.equal(*draws) and all(bool((draw >= 1).all()) for draw in draws)
