"""The benchmark for devices: how it reads profiles, the bytes that it moves, and where it can run."""

import json
from pathlib import Path

import _device_calls
import bench_gpu
import pytest
import torch
from torch import nn

from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_ranks, run_script
from tests.helpers.torch_versions import needs_simulation

SCRIPT = ROOT / "benchmarks" / "bench_gpu.py"
SHORT = ("--models", "transformer", "--repeats", "1", "--rounds", "2", "--warm-up", "1")
Event = _device_calls.Event
PROFILE = [
    Event("cudaStreamSynchronize", (0, 1), on_device=False),  # before the call
    Event(_device_calls.CALL, (10, 20), on_device=False),
    Event("aten::copy_", (11, 15), on_device=False),
    Event("cudaLaunchKernel", (12, 13), on_device=False),
    Event("cudaMemcpyAsync", (13, 14), on_device=False),
    Event("cudaLaunchKernel", (16, 17), on_device=False),
    Event("cudaStreamSynchronize", (17, 18), on_device=False),
    Event(_device_calls.CALL, (12, 30), on_device=True),
    Event("void at::native::multi_tensor_apply_kernel<...>", (14, 25), on_device=True),
    Event("void at::native::reduce_kernel<512, 1>", (25, 26), on_device=True),
    Event("Memcpy DtoH (Device -> Pageable)", (26, 27), on_device=True),
    Event("Memcpy DtoH (Device -> Pinned)", (27, 28), on_device=True),
    Event("something else", (28, 29), on_device=True),
    Event("cudaDeviceSynchronize", (21, 30), on_device=False),  # after the call
]


def test_waits_and_launches_are_those_inside_the_call_and_kernels_are_told_by_kind_wherever_they_end() -> None:
    names = _device_calls.during_call(PROFILE)

    assert _device_calls.waits(names) == {"cudaStreamSynchronize": 1}
    assert _device_calls.launches(names) == {"cudaLaunchKernel": 2, "cudaMemcpyAsync": 1}
    assert _device_calls.kernels(PROFILE) == {
        "many tensors at once": 1,
        "reduction": 1,
        "copy to the host": 2,
        "other": 1,
    }


def test_pack_and_unpack_move_every_byte_each_time() -> None:
    module = nn.Linear(3, 2)
    variants = {variant.name: variant for variant in bench_gpu.copies(module)}
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    buffer = variants["pack"].run.args[0]

    for value in (5.0, 7.0):
        for gradient in gradients.values():
            gradient.fill_(value)
        variants["pack"].run()
        assert buffer.flat.tolist() == [value] * 8
        buffer.flat.fill_(value + 1)
        variants["unpack"].run()
        assert [gradient.tolist() for gradient in gradients.values()] == [[[value + 1] * 3] * 2, [value + 1] * 2]
    assert all(parameter.grad is gradients[name] for name, parameter in module.named_parameters())
    assert variants["copy_ of the same bytes"].run().nbytes == sum(p.nbytes for p in module.parameters())


def test_without_a_device_it_says_so_and_ends_with_status_1() -> None:
    run = run_script(str(SCRIPT), environment={"CUDA_VISIBLE_DEVICES": ""})

    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "no device 'cuda': torch sees none, and nothing here can be measured without one\n"


_SIMULATED = """
import sys
from tests.helpers.simulated_group import register

register()
sys.path.append("benchmarks")
import bench_gpu

bench_gpu.main([*sys.argv[1:], "--device", "sim", "--without-ddp"])
"""


@needs_simulation
def test_on_the_simulated_device_all_questions_but_those_to_the_profiler_are_answered(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"

    run = fork_ranks(2, "-c", _SIMULATED, *SHORT, "--json", str(path))

    assert run.returncode == 0, run.stderr
    assert "transformer, step, zero_grad(set_to_none=True)" in run.stdout
    results = json.loads(path.read_text())["results"]
    assert results["transformer"]["calls"]["verdict"].startswith("not measured")
    assert list(results["transformer"]["copies"]["variants"]) == ["copy_ of the same bytes", "pack", "unpack", "digest"]
    steps = results["transformer"]["step"]["zero_grad(set_to_none=True)"]
    assert all(row["median_ms"] > 0 for row in steps.values())
    assert list(steps) == ["ours, off", "ours, info", "local compute alone"]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_a_device_all_questions_are_answered(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "gpu.json"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))

    run = run_script(*launch, str(SCRIPT), *SHORT, "--json", str(path))

    assert run.returncode == 0, run.stderr
    results = json.loads(path.read_text())["results"]
    assert torch.cuda.get_device_name(0) in results["device"]
    assert list(results["transformer"]) == ["copies", "calls", "step"]
    assert {"off, views", "info, to pack", "verdict"} <= results["transformer"]["calls"].keys()
    assert results["transformer"]["calls"]["info, to pack"]["launches_per_call"]
