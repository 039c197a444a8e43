"""A rank of bench_warm_call.py: one model, stepped on request, in a process without any other library's hooks.

    python _warm_call_worker.py ROOT MODEL STORE RANK

ROOT: the checkout whose legacy_ddp is measured. MODEL: ``ours``, ``torch DDP`` or ``local compute``. Reads a number of
steps per line from stdin; writes one line of JSON per request: the milliseconds of CPU of each.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

RANKS = 2
_LAYERS, _FEATURES, _ITEMS = 8, 64, 8  # 16 small parameters


class Calls:
    """The Python calls inside a package: the file of each, in order. For ``sys.setprofile``."""

    def __init__(self, package: str) -> None:
        self._package = package
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._package):
            self.files.append(frame.f_code.co_filename)

    def summary(self) -> dict[str, int]:
        """Numbers of frames, of files, and of changes from one file to another."""
        changes = sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))
        return {"frames": len(self.files), "files": len(set(self.files)), "changes of file": changes}


class Loop:
    """A training loop. ``call``: what synchronises behind backward, nothing for torch DDP."""

    def __init__(self, model: Any, inputs: Any, optimizer: Any, call: Callable[[], object]) -> None:
        self._model, self._inputs, self._optimizer, self._call = model, inputs, optimizer, call

    def step(self, profile: Any = None) -> dict[str, float]:
        """Milliseconds of CPU of a step and of its call, all threads of the process and this thread alone."""
        start = _clocks()
        self._optimizer.zero_grad()
        self._model(self._inputs).square().mean().backward()
        before = _clocks()
        if profile is not None:
            sys.setprofile(profile)
        try:
            self._call()
        finally:
            sys.setprofile(None)
        after = _clocks()
        self._optimizer.step()
        end = _clocks()
        names = "", ", this thread"
        times = {f"step{name}": 1e3 * (b - a) for name, a, b in zip(names, start, end, strict=True)}
        return times | {f"call{name}": 1e3 * (b - a) for name, a, b in zip(names, before, after, strict=True)}


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.thread_time()


def main() -> None:
    """Answer requests until the end of stdin."""
    root, kind, store, rank = sys.argv[1:]
    sys.path.insert(0, root)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=RANKS)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(_FEATURES, _FEATURES) for _ in range(_LAYERS)])
    inputs = torch.randn(_ITEMS, _FEATURES, generator=torch.Generator().manual_seed(int(rank)))
    model, call = _wrap(kind, net)
    loop = Loop(model, inputs, torch.optim.SGD(net.parameters(), lr=1e-3), call)
    answer = partial(print, flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            dist.barrier()
            times.append(loop.step())
        if not int(line):  # no step is timed: count the calls of one instead
            calls = Calls(f"{root}/legacy_ddp/")
            loop.step(calls)
            answer(json.dumps(calls.summary()))
        else:
            answer(json.dumps({name: [of_step[name] for of_step in times] for name in times[0]}))
    dist.barrier()
    dist.destroy_process_group()


def _wrap(kind: str, net: Any) -> tuple[Any, Callable[[], object]]:
    if kind == "ours":
        from legacy_ddp import LegacyDistributedDataParallel

        model = LegacyDistributedDataParallel(net, checks="info")
        return model, model.all_reduce
    if kind == "torch DDP":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(net), lambda: None
    return net, lambda: None


if __name__ == "__main__":
    main()
