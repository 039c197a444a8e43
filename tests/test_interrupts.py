"""An exception at any bytecode, as from the handler of a signal: what comes next is right, and no memory is misread.

Each table entry is a sweep: the functions under test, and the operation in which they run. After the exception the
script goes on, and a twin that nothing interrupted shows what is right. Ranks that meet: tests/ranks/.
"""

import copy
import gc
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as torchs_steps

from legacy_ddp import Checks, GradientError, LegacyDistributedDataParallel, SyncRecord
from legacy_ddp import _torch as internals
from legacy_ddp._call.all_reduce import all_reduce
from legacy_ddp._call.check_list import EvaluationHint
from legacy_ddp._call.state import Synchronizer, are_forwards_private, private_forwards
from legacy_ddp._interrupts import OwnedLock, undone_by
from legacy_ddp._memory import segment
from legacy_ddp._memory.flat_buffer import SlotViews, _made
from legacy_ddp._memory.plan import BackwardCopy, ParameterWalk, Planner
from legacy_ddp._memory.segment import Segment
from legacy_ddp._ranks import private_groups
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Flag
from legacy_ddp._replicas import rotation
from legacy_ddp._replicas.history import ReplicaDigests, StepHistory
from legacy_ddp._replicas.rotation import PeriodicDigests, RotatingDigests
from legacy_ddp._replicas.state import SharedBuffers, add_memory
from legacy_ddp._reproducible import LeafSums, Leaves, PartialSums
from legacy_ddp._steps import guard, step_counter
from legacy_ddp._steps.backward_counter import BackwardCounter, BackwardHook, remove_hooks
from legacy_ddp._steps.policy import StepPolicy
from legacy_ddp._torch import tensors
from legacy_ddp._torch.device import Reader
from tests.helpers import logged_warnings
from tests.helpers.comm_hooks import at_once
from tests.helpers.interrupts import sweep
from tests.helpers.ranks import run_ranks

_ITEMS = torch.arange(256.0).reshape(2, 128) / 256


class Training:
    """A training on one rank. The first layer is large enough for gradients that move in backward."""

    def __init__(self, net: nn.Module | None = None, *, steps: int = 2, **arguments: Any) -> None:
        self.net = net or nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.Linear(128, 2))
        self.arguments = arguments
        self.model = LegacyDistributedDataParallel(self.net, **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        for _ in range(steps):
            self.step()

    @property
    def micro_batches(self) -> int:
        return 2 if self.arguments.get("reproducible") else 1

    def forward(self) -> None:
        self.model(_ITEMS)

    def reduce(self) -> SyncRecord:
        """A step up to the call."""
        self.model.zero_grad()
        if self.micro_batches == 1:
            self.model(_ITEMS).sum().backward()
            return self.model.all_reduce()
        with self.model.no_sync():
            self.model(_ITEMS).sum().backward()
        self.model(_ITEMS).sum().backward()
        return self.model.all_reduce(sample_size=2)

    def step(self) -> SyncRecord:
        record = self.reduce()
        self.optimizer.step()
        return record

    def expected(self) -> list[torch.Tensor | None]:
        """The gradients of the next step, by torch alone."""
        net = copy.deepcopy(self.net)
        net.zero_grad()
        net(_ITEMS).sum().backward()
        return [parameter.grad for parameter in net.parameters()]

    def check(self) -> None:
        """Go on: three steps are those of a twin that nothing interrupted."""
        assert torch.is_grad_enabled()
        twin = Training(copy.deepcopy(self.net), steps=0, **self.arguments)
        for number in range(3):
            expected, (record, other) = self.expected(), (self.step(), twin.step())
            assert record.synchronized
            assert record.rows[0].micro_batches == self.micro_batches
            for parameter, grad in zip(self.net.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, grad)
            for own, right in zip(self.net.parameters(), twin.net.parameters(), strict=True):
                assert torch.equal(own, right)
            own_digests, right_digests = self.model._synchronizer.digests, twin.model._synchronizer.digests
            if type(own_digests) is RotatingDigests:
                assert own_digests._digest_all_parts() == right_digests._digest_all_parts()
            elif number and record._headers.flags[0] & other._headers.flags[0] & Flag.SIGNED:  # both know a call before
                assert record._headers.column("replica") == other._headers.column("replica")
        for parameter in self.net.parameters():
            counting = [type(hook) is BackwardHook for hook in internals.accumulate_hooks([parameter])[0].values()]
            assert sum(counting) == parameter.requires_grad


class Case(NamedTuple):
    """A sweep, as :func:`sweep` takes it. ``stride``: the usual one; the thorough tests try every bytecode."""

    functions: Sequence[object]
    prepare: Callable[[], Any] = Training
    operate: Callable[[Any], object] = Training.step
    judge: Callable[[Any], object] = Training.check
    stride: int = 53


def _frozen() -> Training:
    """The next call makes a new plan."""
    training = Training()
    training.net[2].bias.requires_grad_(False)
    return training


def _check_hooks(training: Training) -> None:
    """The next backward may run before all hooks are there again, and is then not counted."""
    training.reduce()
    training.check()


def _with_replaced_memory() -> Training:
    """The next call rebuilds two views, because the script has put other memory under the gradients."""
    training = Training()
    for parameter in (training.net[0].bias, training.net[2].weight):
        parameter.grad.data = parameter.grad.data.clone()
    return training


def _check_blocks(training: Training) -> None:
    assert training.model._synchronizer.policy.sync_enabled
    training.check()


def _block(training: Training) -> None:
    with training.model.no_sync():
        training.model(_ITEMS).sum().backward()


def _check_sums(training: Training) -> None:
    """A micro-batch that was interrupted is told once, if the script does not begin the step again."""
    try:
        training.reduce()
    except GradientError as error:
        assert "gradients are missing" in str(error)  # noqa: PT017
    training.check()


def _call_back(training: Training) -> None:
    training.model.on_sync(lambda _: None)
    training.step()


def _check_lock(training: Training) -> None:
    training.check()
    assert not private_groups.groups_of(training.model.process_group, None).busy.locked()


def _replaced_tensor() -> Training:
    training = Training(checks="detail")
    training.net[2].bias = nn.Parameter(training.net[2].bias.detach().clone())
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)
    return training


def _use_hook(training: Training) -> None:
    training.model.register_comm_hook(None, lambda _, bucket: at_once(bucket.buffer()))
    training.step()


def _check_hook(training: Training) -> None:
    """The hook is in use everywhere, or nowhere, and then the script can register it."""
    if training.model._settings.comm_hook is None:
        _use_hook(training)
    assert training.model._synchronizer.planner.settings.comm_hook is training.model._settings.comm_hook
    training.step()


def _on_new_group() -> Training:
    training = Training()
    training.model.process_group = dist.new_group([0])
    return training


def _before_training_forward() -> Training:
    training = Training()
    training.model._synchronizer.note_new_buffers()
    return training


def _check_hint(training: Training) -> None:
    """The first evaluation after training is told of, as on rank 1 of two."""
    hint = next(check for check in training.model._synchronizer.checks.all if isinstance(check, EvaluationHint))
    training.forward()
    hint._has_reduced = hint._is_speaker = True
    training.model.eval()
    training.forward()
    (told,) = logged_warnings.take()
    assert "evaluation after training" in told


def _run_private(_: Training) -> None:
    with private_forwards():
        pass


def _check_private(_: Training) -> None:
    assert not are_forwards_private()


def _run_without_hooks(training: Training) -> None:
    with internals.without_accumulate_hooks(training.net.parameters()):
        pass


def _unregistered() -> list[str]:
    """A process in which no wrapper has registered hooks on steps yet; the list is for what the hooks note."""
    for registration in (guard.guard_steps, step_counter.watch_steps):
        registration.cache_clear()
    for registered in (tensors._pre_hooks, tensors._post_hooks):
        registered.clear()
    torchs_steps._global_optimizer_pre_hooks.clear()
    torchs_steps._global_optimizer_post_hooks.clear()
    return []


class _Noting:
    """Hooks on steps, equal for equal lists: a script registers a function twice."""

    def __init__(self, steps: list[str], text: str) -> None:
        self.steps, self.text = steps, text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Noting) and (self.steps is other.steps and self.text == other.text)

    def __hash__(self) -> int:
        return hash(self.text)

    def __call__(self, *_: object) -> None:
        self.steps.append(self.text)


def _register(steps: list[str]) -> None:
    internals.before_every_step(_Noting(steps, "before"))
    internals.after_every_step(_Noting(steps, "after"))
    for registration in (guard.guard_steps, step_counter.watch_steps):
        registration()


def _check_registered(steps: list[str]) -> None:
    _register(steps)
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    assert steps == ["before", "after"]
    assert (len(tensors._pre_hooks), len(tensors._post_hooks)) == (3, 2)
    assert len(torchs_steps._global_optimizer_pre_hooks) == len(torchs_steps._global_optimizer_post_hooks) == 1


class _Shared(NamedTuple):
    """A segment, and a gradient that the script keeps of it."""

    segments: list[Segment]
    kept: list[torch.Tensor]
    folder: Path


def _segment(folder: Path) -> _Shared:
    segment = Segment(4096)
    segment.memory.fill_(7)
    return _Shared([segment], [segment.memory], folder)


def _make_segment(shared: _Shared) -> None:
    segment = Segment(4096)
    shared.segments.append(segment)
    segment.memory.fill_(7)
    shared.kept.append(segment.memory)


def _check_children(shared: _Shared) -> None:
    """A forked child reads the kept gradients, and no other file, though another file may have the old number."""
    shared.segments.clear()
    gc.collect()
    others = [os.open(shared.folder / str(number), os.O_RDWR | os.O_CREAT) for number in range(3)]
    for other in others:
        os.write(other, b"A" * 4096)
    child = os.fork()
    if not child:
        os._exit(not all(bool((kept == 7).all()) for kept in shared.kept))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for other in others:
        os.close(other)
    assert status == 0
    assert all(bool((kept == 7).all()) for kept in shared.kept)
    numbers = [mapping.descriptor for mapping in segment._mappings.values()]
    assert all("memfd:legacy_ddp" in os.readlink(f"/proc/self/fd/{number}") for number in numbers if number >= 0)


_FIRST, _DETAIL = partial(Training, steps=0), partial(Training, checks="detail")
_REPRODUCIBLE = partial(Training, steps=1, reproducible=True)
_DETAIL_FIRST = partial(Training, steps=0, checks="detail")
_FILES = (segment.Mapping.make_private, segment.Mapping._map_private, segment.OpenFile.close)
_CALL = (Call.__enter__, Call.__exit__, Call._take_over, Call._end_call, OwnedLock.take)
_CASES = {
    "parts of the replica": Case(
        (RotatingDigests._find_parts, RotatingDigests._digest, rotation.divide, rotation._tensors_of), _FIRST
    ),
    "digest of a part": Case((RotatingDigests.begin, RotatingDigests._read, ReplicaDigests.begin_forward, add_memory)),
    "marks of buffers": Case((SharedBuffers.begin_forward, SharedBuffers.named, SharedBuffers.saved), _FIRST),
    "parameters of a step": Case((StepHistory._find_parameters, StepHistory._digest), _DETAIL_FIRST),
    "replaced parameters of a step": Case(
        (StepHistory._find_parameters, StepHistory.digest_of), _replaced_tensor, Training.reduce
    ),
    "record of a step": Case(
        (StepHistory.begin_step, StepHistory.end_step, StepHistory._note_step, Reader.add, Reader.read), _DETAIL
    ),
    "record of a call": Case(
        (StepHistory.digest_of, StepHistory._update, StepHistory.end_call, StepHistory._begin), _DETAIL
    ),
    "digest of every second call": Case(
        (PeriodicDigests.digest_of, PeriodicDigests.end_call),
        partial(Training, steps=0, checks=Checks("detail", every=2)),
    ),
    "new plan": Case((Planner.plan, Planner._replan, ParameterWalk.columns), _frozen),
    "hooks of a plan": Case(
        (BackwardCounter.attach, BackwardCopy.attach, remove_hooks, internals.add_accumulate_hook),
        _frozen,
        Training.step,
        _check_hooks,
    ),
    "rebuilt views": Case(
        (SlotViews._rebuild, SlotViews.match_views, SlotViews.has_external_refs, _made), _with_replaced_memory
    ),
    "hook of the script": Case(
        (LegacyDistributedDataParallel.register_comm_hook, Synchronizer.use, Planner.change_settings),
        Training,
        _use_hook,
        _check_hook,
        stride=3,
    ),
    "first call on a group": Case(
        (Synchronizer.call, private_groups.groups_of, private_groups.Groups.build, private_groups._close_at_exit),
        _on_new_group,
    ),
    "call lock": Case(_CALL, Training, Training.step, _check_lock),
    "autograd off": Case((all_reduce, internals.keeps_grad_mode, torch.set_grad_enabled.__enter__)),
    "callbacks": Case((Synchronizer.end_call, undone_by), Training, _call_back),
    "no_sync()": Case(
        (LegacyDistributedDataParallel.no_sync, StepPolicy.open_block, StepPolicy.close_block, undone_by),
        Training,
        _block,
        _check_blocks,
        stride=3,
    ),
    "sums of micro-batches": Case(
        (LeafSums.fits, LeafSums.hold, LeafSums.clear, PartialSums.clear, PartialSums._memory_of_total, LeafSums.total),
        _REPRODUCIBLE,
        Training.step,
        _check_sums,
    ),
    "added micro-batches": Case(
        (LeafSums.add_waiting, PartialSums.add, Leaves.collect_last, Leaves.drop, Leaves._add_waiting),
        _REPRODUCIBLE,
        Training.step,
        _check_sums,
    ),
    "evaluation hint": Case(
        (EvaluationHint.begin_forward, EvaluationHint._layers), _before_training_forward, Training.forward, _check_hint
    ),
    "private forwards": Case((private_forwards, undone_by), Training, _run_private, _check_private, stride=2),
    "hooks set aside": Case((internals.without_accumulate_hooks, undone_by), Training, _run_without_hooks),
    "hooks on steps": Case(
        (
            *(internals.before_every_step, internals.after_every_step, internals.add_step_pre_hook),
            *(guard.guard_steps, step_counter.watch_steps),
        ),
        *(_unregistered, _register, _check_registered),
        stride=2,
    ),
    "end of a segment": Case(
        _FILES, partial(_segment, Path()), lambda shared: shared.segments.clear(), _check_children, stride=9
    ),
    "new segment": Case(
        (*_FILES, Segment.__init__, segment.map_shared),
        partial(_Shared, [], [], Path()),
        _make_segment,
        _check_children,
        stride=23,
    ),
}


def _sweeps(_: int, *, every: bool) -> dict[str, int]:
    tried = {}
    sys.unraisablehook = lambda _: None  # Python tells of an exception in a finalizer there
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    for name, (functions, prepare, operate, judge, stride) in _CASES.items():
        try:
            tried[name] = sweep(functions, prepare, operate, judge, stride=1 if every else stride)
        except Exception as error:
            error.add_note(f"in {name!r}")
            raise
        gc.collect()
    return tried


@pytest.mark.slow
@pytest.mark.cpu("the caches are on the host")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_after_an_exception_at_any_bytecode_the_script_goes_on_as_if_there_was_none(
    every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    (tried,) = run_ranks(partial(_sweeps, every=every), 1, fresh=True, timeout_seconds=3000.0)

    assert all(tried.values())
