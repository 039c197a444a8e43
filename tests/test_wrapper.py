"""Does the wrapper behave like a module, and does it say what it did and what it cannot do?"""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import (
    Checks,
    DesyncError,
    LegacyDistributedDataParallel,
    SyncRecord,
    all_reduce_gradients,
)
from tests.ranks import run_ranks

Said = tuple[str, str] | None


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this one process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _wrap(**arguments: Any) -> LegacyDistributedDataParallel:
    return LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False), **arguments)


def _backward(model: nn.Module, value: float) -> None:
    """Add ``value`` to every element of every trainable parameter's gradient."""
    torch.stack([(p * value).sum() for p in model.parameters() if p.requires_grad]).sum().backward()


def _grads(model: nn.Module) -> dict[str, float | None]:
    """The value that fills each gradient."""
    found: dict[str, float | None] = {}
    for name, parameter in model.named_parameters():
        values = set() if parameter.grad is None else set(parameter.grad.flatten().tolist())
        assert len(values) <= 1
        found[name.removeprefix("module.")] = values.pop() if values else None
    return found


def _step(model: LegacyDistributedDataParallel, value: float) -> float | None:
    """One step on fresh gradients of ``value``; what the first of them is afterwards."""
    model.zero_grad()
    _backward(model, value)
    model.all_reduce()
    return next(iter(_grads(model).values()))


def _said(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Said:
    """Type and text of what ``function`` raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test looks at its type
        return type(error).__name__, str(error)
    return None


# --- forward and no_sync


def _evaluate_on_rank_0(rank: int) -> tuple[int, float | None]:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = LegacyDistributedDataParallel(module)
    if rank == 0:
        for training in (True, False):
            model.train(training)(torch.ones(3, 2))
    _backward(model, rank)
    return model.all_reduce().call, _grads(model)["0.weight"]


def test_forward_never_communicates_so_one_rank_may_evaluate_alone() -> None:
    assert run_ranks(_evaluate_on_rank_0, 2) == [(1, 0.5)] * 2


def _sync_around_blocks(rank: int) -> list[float | None]:
    model = _wrap()
    seen = []
    with model.no_sync():
        _backward(model, rank)
        with model.no_sync():
            _backward(model, rank)
        record = model.all_reduce()  # still inside the outer block
        assert (record.synchronized, record.call, record.rows, record.payload_bytes) == (False, 0, (), 0)
        seen.append(_grads(model)["weight"])
    assert model.all_reduce().synchronized
    return [*seen, _grads(model)["weight"]]


def test_all_reduce_inside_nested_no_sync_blocks_does_nothing_and_says_so() -> None:
    assert run_ranks(_sync_around_blocks, 2) == [[0.0, 1.0], [2.0, 1.0]]


def _fail_inside_no_sync(rank: int) -> float | None:
    model = _wrap()
    for _ in range(rank):  # on one rank only, twice nested
        with suppress(ZeroDivisionError), model.no_sync(), model.no_sync():
            raise ZeroDivisionError
    return _step(model, rank)


def test_an_exception_inside_no_sync_does_not_leave_synchronisation_off() -> None:
    assert run_ranks(_fail_inside_no_sync, 2) == [0.5, 0.5]


# --- state dict, copies, repr


@pytest.mark.usefixtures("alone")
def test_state_dicts_have_the_keys_of_torch_ddp_and_load_both_ways() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))

    ours, ddp = LegacyDistributedDataParallel(build()), DistributedDataParallel(build())

    assert list(ours.state_dict()) == list(ddp.state_dict())
    for source, target in [(ours, ddp), (DistributedDataParallel(build()), ours)]:
        target.load_state_dict(source.state_dict())
        for name, tensor in source.state_dict().items():
            assert torch.equal(target.state_dict()[name], tensor), name


def _through_pickle(model: LegacyDistributedDataParallel) -> LegacyDistributedDataParallel:
    return pickle.loads(pickle.dumps(model))


def _through_torch_save(model: LegacyDistributedDataParallel) -> LegacyDistributedDataParallel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


_COPIES: dict[str, Callable[[LegacyDistributedDataParallel], LegacyDistributedDataParallel]] = {
    "deepcopy": copy.deepcopy,
    "pickle": _through_pickle,
    "torch.save": _through_torch_save,
}


def _step_original_and_copy(rank: int, how: str) -> list[Any]:
    model = _wrap(buffer_size=5, checks=Checks(uneven="raise"))
    first = _step(model, rank)
    with model.no_sync():
        other = _COPIES[how](model)
    seen: list[Any] = [first, _grads(other)["weight"], other.module.weight is model.module.weight, other.extra_repr()]
    for value, target in [(1, other), (2, model), (3, other)]:
        target.zero_grad()
        _backward(target, value + rank)
        record = target.all_reduce()
        seen.append((record.call, record.rows[0].micro_batches, _grads(target)["weight"]))
    return seen


@pytest.mark.parametrize("how", _COPIES)
def test_a_copy_synchronises_by_itself_from_its_first_call(how: str) -> None:
    settings = "buffer_size=5, checks=Checks(level='info', uneven='raise')"

    assert (
        run_ranks(_step_original_and_copy, 2, how)
        == [[0.5, None, False, settings, (1, 1, 1.5), (2, 1, 2.5), (2, 1, 3.5)]] * 2
    )


@pytest.mark.usefixtures("alone")
def test_a_pickle_carries_parameters_but_neither_gradients_nor_flat_buffers() -> None:
    model = LegacyDistributedDataParallel(nn.Linear(100, 100, bias=False))
    _backward(model, 1)
    model.all_reduce()

    assert len(pickle.dumps(model)) < 1.2 * 100 * 100 * 4


def _copy_with_own_group(rank: int) -> tuple[bool, Said, Said, float | None]:
    group = dist.new_group([0, 1])
    model = _wrap(process_group=group)
    shared = copy.deepcopy(model)
    assert _step(shared, rank) == 0.5
    loaded = _through_pickle(_through_pickle(model))
    problems = _said(loaded.all_reduce), _said(lambda: loaded.process_group)
    loaded.process_group = group
    return shared.process_group is group, *problems, _step(loaded, rank)


def test_deepcopy_shares_a_group_of_its_own_and_pickle_says_that_it_lost_it() -> None:
    lost = (
        "ValueError",
        "process_group was not carried by the pickle, expected a live one; assign .process_group after loading",
    )

    assert run_ranks(_copy_with_own_group, 2) == [(True, lost, lost, 0.5)] * 2


@pytest.mark.usefixtures("alone")
def test_repr_shows_the_settings_that_differ_from_the_defaults() -> None:
    model = _wrap(reduce_dtype=torch.bfloat16, ignore=["weight"], checks="off")

    assert "reduce_dtype=torch.bfloat16" in repr(model)
    assert "ignore=frozenset({'weight'}), checks=Checks(level='off', uneven='warn')" in repr(model)
    assert "buffer_size" not in repr(model)
    assert _wrap().extra_repr() == ""


# --- parameters that change after wrapping


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(4, 4)
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)


def _add_lora(net: Any) -> None:
    net.head.requires_grad_(False)
    net.head.down, net.head.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)


def _replace_parameter(net: Any) -> None:
    net.head.bias = nn.Parameter(torch.ones(4, dtype=torch.float64))


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": id,
    "freeze": lambda net: net.conv.requires_grad_(False),
    "unfreeze": lambda net: net.frozen.requires_grad_(True),
    "add": _add_lora,
    "replace-layer": lambda net: setattr(net, "head", nn.Linear(4, 4)),
    "replace-parameter": _replace_parameter,
    "remove": lambda net: delattr(net, "head"),
    "rename": lambda net: setattr(net, "aa", net._modules.pop("head")),
    "tie": lambda net: setattr(net, "tied", net.head),
    "double": lambda net: net.double(),
    "bfloat16": lambda net: net.bfloat16(),
    "memory-format": lambda net: net.to(memory_format=torch.channels_last),
    "data": lambda net: setattr(net.head.weight, "data", torch.zeros(4, 4).T.contiguous().T),
    "freeze-all": lambda net: net.requires_grad_(False),
}


def _change_between_steps(rank: int, how: str) -> list[Any]:
    net = _Net()
    model = LegacyDistributedDataParallel(net)
    _step(model, rank)
    _CHANGES[how](net)
    seen = []
    for value in (2, 3):
        model.zero_grad()
        if any(parameter.requires_grad for parameter in net.parameters()):
            _backward(model, value + rank)
        record = model.all_reduce()
        for parameter in net.parameters():
            assert parameter.grad is None or parameter.grad.stride() == parameter.stride()
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
        trainable = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
        seen.append(({name: grad for name, grad in _grads(net).items() if name in trainable}, trainable))
        assert [row.micro_batches for row in record.rows] == [int(bool(trainable))] * 2
    return seen


@pytest.mark.parametrize("how", _CHANGES)
def test_the_next_call_follows_whatever_changed_after_wrapping(how: str) -> None:
    for seen in run_ranks(_change_between_steps, 2, how):
        for mean, (grads, trainable) in zip([2.5, 3.5], seen, strict=True):
            assert grads == dict.fromkeys(trainable, mean)


@pytest.mark.usefixtures("alone")
def test_parameters_that_were_all_replaced_are_counted_from_the_second_call_on() -> None:
    model = _wrap()
    model.module.weight = nn.Parameter(torch.ones(1, 2))

    counts = []
    for _ in range(2):
        _backward(model, 1)
        counts.append(model.all_reduce().rows[0].micro_batches)

    assert counts == [0, 1]  # nobody saw the new one before the first call


# --- process groups


def _use_sub_group(rank: int, how: str) -> tuple[float | None, float, Said]:
    if how == "new_group":
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        mine, other = groups[rank // 2], groups[1 - rank // 2]
        outside = _said(_wrap, process_group=other)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "data"))
        mine, outside = mesh["data"], _said(_wrap, process_group=mesh)
    torch.manual_seed(rank)
    model = _wrap(process_group=mine)
    weight = float(sum(parameter.detach().sum() for parameter in model.parameters()))
    return _step(model, rank), weight, outside


@pytest.mark.parametrize(
    "how, error, text", [("new_group", "TypeError", "on ranks outside it"), ("mesh", "ValueError", "of 2 dimensions")]
)
def test_ranks_meet_inside_the_group_that_was_given(how: str, error: str, text: str) -> None:
    results = run_ranks(_use_sub_group, 4, how)

    assert [mean for mean, *_ in results] == [0.5, 0.5, 2.5, 2.5]
    weights = [weight for _, weight, _ in results]
    assert weights[0] == weights[1] != weights[2] == weights[3]
    for *_, outside in results:
        assert outside is not None
        assert outside[0] == error
        assert text in outside[1]


def _reassign_group(rank: int) -> list[float | None]:
    singles = [dist.new_group([only]) for only in range(2)]
    model = _wrap()
    seen = [_step(model, rank)]
    model.process_group = singles[rank]
    seen.append(_step(model, rank))
    model.process_group = init_device_mesh("cpu", (2,))
    seen.append(_step(model, rank))
    model.process_group = None
    return [*seen, _step(model, rank)]


def test_the_process_group_can_be_reassigned_between_steps() -> None:
    assert run_ranks(_reassign_group, 2) == [[0.5, float(rank), 0.5, 0.5] for rank in range(2)]


def _outlive_groups(rank: int, directory: Path) -> list[Any]:
    own = dist.new_group([0, 1])
    model, owner, meshed = _wrap(), _wrap(process_group=own), _wrap(process_group=init_device_mesh("cpu", (2,)))
    _step(model, rank), _step(owner, rank)
    dist.destroy_process_group(own)
    seen: list[Any] = [_said(owner.all_reduce), _step(model, rank)]
    dist.destroy_process_group()
    seen += [_said(meshed.all_reduce), _said(model.all_reduce), _said(_wrap)]
    for again in range(2):
        store = FileStore(str(directory / f"store-{again}"), 2)  # torch itself cannot meet twice on one
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        seen += [_step(model, rank), _step(_wrap(), rank + again)]
        if again == 0:
            dist.barrier()
            dist.destroy_process_group()
    return seen


def test_destroyed_groups_are_named_and_a_new_default_group_is_taken_up(tmp_path: Path) -> None:
    for seen in run_ranks(_outlive_groups, 2, tmp_path):
        destroyed, works, mesh_destroyed, *missing = seen[:5]
        for said in (destroyed, mesh_destroyed):
            assert said == ("ValueError", "process_group was destroyed; assign a live one to .process_group")
        assert works == 0.5
        for said in missing:
            assert said[0] == "ValueError"
            assert said[1].startswith("no default process group: ")
            assert "torch.distributed.init_process_group()" in said[1]
        assert seen[5:] == [0.5, 0.5, 0.5, 1.5]


def _two_wrappers(rank: int) -> list[float | None]:
    first, second = _wrap(), _wrap()
    shared = LegacyDistributedDataParallel(first.module)
    return [_step(model, rank + 2 * index) for index, model in enumerate([first, second, second, shared, first])]


def test_wrappers_in_one_process_do_not_disturb_each_other() -> None:
    assert run_ranks(_two_wrappers, 2) == [[0.5, 2.5, 4.5, 6.5, 8.5]] * 2


def _train_gan(rank: int, world_size: int) -> list[torch.Tensor]:
    """Alternating steps; the generator's backward also leaves gradients in the discriminator."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
    wrapped = [LegacyDistributedDataParallel(net) if world_size > 1 else net for net in (generator, critic)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic)]
    noises = torch.randn(5, 8, 2, dtype=torch.float64).chunk(world_size, dim=1)
    for noise in noises[rank]:
        for index, sign in [(1, 1.0), (0, -1.0)]:
            (sign * wrapped[1](wrapped[0](noise).tanh()).square().mean()).backward()
            if isinstance(target := wrapped[index], LegacyDistributedDataParallel):
                target.all_reduce()
            optimizers[index].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return [parameter.detach() for net in (generator, critic) for parameter in net.parameters()]


def test_a_gan_of_two_wrappers_trains_like_one_process() -> None:
    expected = _train_gan(0, 1)

    for parameters in run_ranks(_train_gan, 2, 2):
        torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-12)


# --- refused at construction


@pytest.mark.usefixtures("alone")
def test_a_wrapper_inside_the_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^module contains a LegacyDistributedDataParallel; wrap the outermost"):
        LegacyDistributedDataParallel(nn.Sequential(nn.Linear(1, 1), _wrap()))


def _expect_world_size(rank: int, *expected: int) -> tuple[Said, float | None]:
    return _said(_wrap, world_size=expected[rank]), _step(_wrap(world_size=2), rank)


def test_a_world_size_that_does_not_match_is_a_value_error_on_all_ranks_or_named_as_one_rank_s_mistake() -> None:
    own = "world_size does not match the process group: got 3, expected 2; leave it out, or pass the group of that size"

    assert run_ranks(_expect_world_size, 2, 3, 3) == [(("ValueError", own), 0.5)] * 2
    for said, mean in run_ranks(_expect_world_size, 2, 2, 3):
        assert said is not None
        assert said[0] == "PeerError"
        assert "construction call 1: rank 1 failed before the exchange" in said[1]
        assert f"rank 1: ValueError: {own}" in said[1]
        assert mean == 0.5


def _ignore(rank: int, how: str) -> tuple[dict[str, float | None], bool, int]:
    torch.manual_seed(rank)
    net: Any = _Net()
    net.head.register_buffer("local", torch.full((1,), float(rank)))
    names = ["head.weight", "head.local"]
    if how == "attribute":
        net._ddp_params_and_buffers_to_ignore = [*names, "no.such.name"]
    model = LegacyDistributedDataParallel(net, ignore=names if how == "argument" else ())
    _backward(model, rank)
    record = model.all_reduce()
    totals = torch.stack([net.head.weight.detach().sum(), net.conv.weight.detach().sum()])
    same = [len(set(column)) == 1 for column in zip(*_gathered(totals), strict=True)]
    assert net.head.local.item() == rank
    return _grads(net), same == [False, True], record.payload_bytes


def _gathered(row: torch.Tensor) -> list[list[float]]:
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [row.tolist() for row in rows]


@pytest.mark.parametrize("how", ["argument", "attribute"])
def test_ignored_parameters_and_buffers_stay_local(how: str) -> None:
    for rank, (grads, only_the_others_are_equal, payload_bytes) in enumerate(run_ranks(_ignore, 2, how)):
        assert grads == {
            "conv.weight": 0.5,
            "conv.bias": 0.5,
            "head.weight": float(rank),
            "head.bias": 0.5,
            "frozen.weight": None,
        }
        assert only_the_others_are_equal
        assert payload_bytes == 4 * (3 * 4 * 4 + 4 + 4)


_SPARSE = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "build, text",
    [
        (lambda: nn.LazyLinear(2), "parameter 'bias' is not initialised yet (lazy module), expected"),
        (lambda: nn.Linear(2, 2, device="meta"), "parameter 'bias' is on the meta device, expected"),
        (
            lambda: nn.ParameterList([torch.eye(2).to_sparse()]).requires_grad_(False),
            "parameter '0' has layout torch.sparse_coo, expected",
        ),
    ],
)
def test_parameters_without_values_are_refused_by_name(build: Callable[[], nn.Module], text: str) -> None:
    said = _said(LegacyDistributedDataParallel, build())

    assert said is not None
    assert said[0] == "ValueError"
    assert said[1].startswith(text)


# --- refused at the call


def _reduce_inside_backward(rank: int, guilty: list[int]) -> tuple[Said, dict[str, float | None], float | None]:
    model = _wrap()
    said: list[Said] = []
    _backward(model, rank)
    if rank in guilty:
        handle = next(model.parameters()).register_post_accumulate_grad_hook(
            lambda _: said.append(_said(model.all_reduce))
        )
        _backward(model, 0)
        handle.remove()
    else:
        said.append(_said(model.all_reduce))
    grads = _grads(model)
    with torch.no_grad():  # even out the number of micro-batches, as a loop would by its next zero_grad()
        model.all_reduce(skip=True)
    return said[0], grads, _step(model, rank)


@pytest.mark.parametrize("guilty", [[0, 1], [1]])
def test_a_call_from_inside_backward_is_refused_on_every_rank(guilty: list[int]) -> None:
    for rank, (said, grads, next_mean) in enumerate(run_ranks(_reduce_inside_backward, 2, guilty)):
        assert said is not None
        assert said[0] == ("PeerError" if guilty == [1] else "LegacyDDPError")
        assert "all_reduce() was called from inside backward, expected after it; move it behind" in said[1]
        assert grads == {"weight": float(rank)}
        assert next_mean == 0.5


def _reduce_in_two_threads(rank: int, directory: Path) -> list[Said]:
    model = _wrap()
    _backward(model, rank)
    store = FileStore(str(directory / "store"), 2)
    said: list[Said] = []

    def reduce() -> None:
        said.append(_said(model.all_reduce))
        store.set("one is back", "1")

    if rank == 0:
        threads = [threading.Thread(target=reduce) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        store.wait(["one is back"])  # until then rank 0 waits for this rank
        reduce()
    assert _grads(model) == {"weight": 0.5}
    assert _step(model, rank) == 0.5
    return said


def test_a_call_from_a_second_thread_is_refused_while_the_first_one_waits(tmp_path: Path) -> None:
    first, second = run_ranks(_reduce_in_two_threads, 2, tmp_path)

    refused, done = first
    assert refused[0] == "LegacyDDPError"
    assert refused[1].startswith("all_reduce(): another call on this process group is under way in this process")
    assert done is None
    assert second == [None]


# --- what a call says about itself


def _records(rank: int) -> tuple[list[SyncRecord], list[float | None]]:
    model = _wrap(checks=Checks(uneven="allow"))
    records, grads = [], []
    for arguments in ({}, {"sample_size": 3 * rank}, {"skip": rank == 2}, {"skip": True}):
        model.zero_grad()
        for _ in range(rank + 1):
            _backward(model, rank + 1)
        records.append(model.all_reduce(**arguments))
        grads.append(_grads(model)["weight"])
        model.broadcast_parameters()  # has a count of its own
    return records, grads


def test_the_record_says_what_the_call_did() -> None:
    for records, grads in run_ranks(_records, 3):
        # rank r brings (r+1)²; rank 0 is left out of the second call, rank 2 of the third
        assert grads == [pytest.approx(14 / 3), pytest.approx(13 / 9), 2.5, None]
        plain, weighted, without_rank_2, _ = records
        facts = [(r.call, r.synchronized, r.skipped, r.sample_size, r.divisor, r.skipped_ranks) for r in records]
        assert facts == [
            (1, True, False, None, 3, ()),
            (2, True, False, 9, 9, (0,)),
            (3, True, False, None, 2, (2,)),
            (4, True, True, None, 0, (0, 1, 2)),
        ]
        assert [record.payload_bytes for record in records] == [8, 8, 8, 0]
        for record in records:
            phases = {"plan", "pack", "agree"} | ({"payload", "alias"} if not record.skipped else {"alias"})
            assert record.seconds.keys() == phases
            assert all(0 <= seconds < 60 for seconds in record.seconds.values())
            assert [row.rank for row in record.rows] == [0, 1, 2]
            assert all(row.seconds_waited >= 0 for row in record.rows)
        assert [row.took_part for row in weighted.rows] == [False, True, True]
        assert [row.took_part for row in without_rank_2.rows] == [True, True, False]
        assert [row.sample_size for row in weighted.rows] == [0, 3, 6]
        assert [row.sample_size for row in plain.rows] == [None] * 3
        assert [row.micro_batches for row in plain.rows] == [1, 2, 3]
        # rank r adds r+1 to both elements r+1 times
        norms = [(rank + 1) ** 2 * 2**0.5 for rank in range(3)]
        assert [row.local_norm for row in plain.rows] == pytest.approx(norms, rel=1e-6)
        assert all(row.finite for row in plain.rows)


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.half_ = nn.Parameter(torch.ones(5, dtype=torch.float16))
        self.single_ = nn.Parameter(torch.ones(3))
        self.double_ = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.complex_ = nn.Parameter(torch.ones(1, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.ones(100, dtype=torch.complex128))
        self.unused_last = nn.Parameter(torch.ones(100))


def _mixed_bytes(rank: int, reduce_dtype: torch.dtype | None) -> tuple[int, float | None, float]:
    model = LegacyDistributedDataParallel(_Mixed(), reduce_dtype=reduce_dtype)
    for index, parameter in enumerate(model.parameters()):
        if index < 4:
            parameter.grad = torch.full_like(parameter, (index + 1) * (3 + 4j if parameter.is_complex() else 2))
    norm = sum(float(p.grad.abs().double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    record = model.all_reduce()
    return record.payload_bytes, record.rows[rank].local_norm, norm


@pytest.mark.parametrize(
    "reduce_dtype, size_bytes",
    # fp16 travels as fp32 unless asked otherwise; complex numbers as they are; unused ones not at all
    [(None, 5 * 4 + 3 * 4 + 2 * 8 + 8), (torch.bfloat16, (5 + 3 + 2) * 2 + 8), (torch.float64, (5 + 3 + 2) * 8 + 8)],
)
def test_payload_bytes_and_norm_are_those_of_the_gradients_that_travel(
    reduce_dtype: torch.dtype | None, size_bytes: int
) -> None:
    for payload_bytes, local_norm, expected in run_ranks(_mixed_bytes, 2, reduce_dtype):
        assert payload_bytes == size_bytes
        assert local_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "value, norm, finite", [(1e20, 2**0.5 * 1e20, True), (float("inf"), float("inf"), False), (3e38, 4.2426e38, True)]
)
def test_the_norm_of_large_gradients_does_not_overflow(value: float, norm: float, finite: bool) -> None:
    model = _wrap()
    _backward(model, value)

    (row,) = model.all_reduce().rows

    assert row.local_norm == pytest.approx(norm, rel=1e-4)
    assert row.finite is finite


def _non_finite(rank: int) -> list[bool | None]:
    model = _wrap()
    model.module.weight.grad = torch.tensor([[1.0, torch.nan if rank == 1 else 2.0]])
    rows = model.all_reduce().rows
    assert rows[1].local_norm is not None
    assert rows[1].local_norm != rows[1].local_norm
    return [row.finite for row in rows]


def test_the_record_names_the_rank_whose_gradient_is_not_finite() -> None:
    assert run_ranks(_non_finite, 3) == [[True, False, True]] * 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "environment, checks, looked",
    [
        (None, "info", True),
        (None, "off", False),
        ("off", "info", False),
        ("info", Checks(level="off"), True),
        ("", "off", False),
    ],
)
def test_checks_off_takes_no_values_and_the_environment_overrides(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, checks: str | Checks, looked: bool
) -> None:
    monkeypatch.delenv("LEGACY_DDP_CHECKS", raising=False)
    if environment is not None:
        monkeypatch.setenv("LEGACY_DDP_CHECKS", environment)
    model = _wrap(checks=checks)
    monkeypatch.delenv("LEGACY_DDP_CHECKS", raising=False)  # read at construction only
    _backward(model, 1)

    (row,) = model.all_reduce().rows

    assert (row.local_norm is not None, row.finite is not None) == (looked, looked)
    assert row.micro_batches == 1


# --- uneven work


def _uneven(rank: int, uneven: str) -> tuple[list[tuple[str, str, str]], list[Said], list[float | None]]:
    model = _wrap(checks=Checks(uneven=uneven))
    said, grads = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for _ in range(1 + (rank == 2)):
                _backward(model, rank)
            said.append(_said(model.all_reduce))
            grads.append(_grads(model)["weight"])
            model.zero_grad()
    return [(w.category.__name__, str(w.message), w.filename) for w in caught], said, grads


def test_uneven_work_is_averaged_silently_if_allowed() -> None:
    for caught, said, grads in run_ranks(_uneven, 3, "allow"):
        assert (caught, said) == ([], [None] * 3)
        assert grads == pytest.approx([(0 + 1 + 2 + 2) / 3] * 3)


def test_uneven_work_is_warned_of_once_and_on_rank_0_naming_ranks_and_counts() -> None:
    results = run_ranks(_uneven, 3, "warn")

    (category, text, _), *more = results[0][0]
    assert (category, more) == ("UserWarning", [])
    assert text.startswith("all_reduce() call 1: ranks bring uneven work (said once")
    assert "micro-batches since the last call: rank 2 has 2; ranks 0-1 have 1" in text
    assert [caught for caught, *_ in results[1:]] == [[], []]
    for _, said, grads in results:
        assert said == [None] * 3
        assert grads == pytest.approx([(0 + 1 + 2 + 2) / 3] * 3)


def _uneven_filename(rank: int, how: str) -> list[str]:
    model = _wrap()
    function = model.all_reduce if how == "method" else partial(all_reduce_gradients, model.module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for micro_batches in (1, 1 + rank):
            for _ in range(micro_batches):
                _backward(model, rank)
            function()
    return [warning.filename for warning in caught]


@pytest.mark.parametrize("how", ["method", "function"])
def test_the_warning_of_uneven_work_points_at_the_caller(how: str) -> None:
    assert run_ranks(_uneven_filename, 2, how) == [[__file__], []]


def _uneven_with_warnings_as_errors(rank: int) -> tuple[Said, float | None, float | None]:
    model = _wrap()
    for _ in range(1 + rank):
        _backward(model, rank)
    return _said(model.all_reduce), _grads(model)["weight"], _step(model, rank)


def test_a_warning_that_became_an_error_leaves_the_ranks_in_step() -> None:
    (said, *grads), second = run_ranks(_uneven_with_warnings_as_errors, 2)

    assert said[0] == "UserWarning"
    assert grads == [1.0, 0.5]
    assert second == (None, 1.0, 0.5)


def _uneven_then_even(rank: int) -> tuple[tuple[int, ...], int | None, float | None, float | None]:
    model = _wrap(checks=Checks(uneven="raise"))
    for _ in range(1 + (rank == 2)):
        _backward(model, rank)
    with pytest.raises(DesyncError) as caught:
        model.all_reduce()
    left = _grads(model)["weight"]
    if rank != 2:
        _backward(model, rank)
    model.all_reduce()
    return caught.value.ranks, caught.value.call, left, _grads(model)["weight"]


def test_uneven_work_raises_on_all_ranks_if_asked_and_the_call_works_once_it_is_even() -> None:
    assert run_ranks(_uneven_then_even, 3) == [((2,), 1, left, 2.0) for left in (0.0, 1.0, 4.0)]
    results = run_ranks(_uneven, 3, "raise")
    assert all(said == results[0][1] for _, said, _ in results)


# --- what it leaves behind


@pytest.mark.usefixtures("alone")
def test_hooks_go_with_the_wrapper() -> None:
    module = nn.Linear(2, 1)

    def hooks() -> list[int]:
        return [len(parameter._post_accumulate_grad_hooks or ()) for parameter in module.parameters()]

    for _ in range(50):
        model = LegacyDistributedDataParallel(module)
        assert _step(model, 1) == 1.0
    gc.collect()
    assert hooks() == [1, 1]
    del model
    gc.collect()
    assert hooks() == [0, 0]
    _backward(module, 1)


@pytest.mark.usefixtures("alone")
def test_a_dropped_wrapper_frees_its_flat_buffers() -> None:
    module = nn.Linear(2, 1, bias=False)
    model = LegacyDistributedDataParallel(module)
    _step(model, 1)
    assert module.weight.grad is not None
    flat = module.weight.grad.untyped_storage()
    del model
    module.zero_grad()
    gc.collect()

    assert torch._C._storage_Use_Count(flat._cdata) == 1  # nobody but this name


_IMPORT = """
import logging, os, sys, threading, warnings
import torch, torch.distributed.device_mesh
before, environment = set(sys.modules), dict(os.environ)
filters, threads = list(warnings.filters), threading.active_count()
import legacy_ddp
heavy = [name for name in set(sys.modules) - before if name.startswith(("numpy", "sympy", "torch._dynamo"))]
assert not heavy, sorted(heavy)
assert logging.getLogger().handlers == [] and not logging.getLogger("legacy_ddp").handlers
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert dict(os.environ) == environment and warnings.filters == filters and threading.active_count() == threads
"""


def test_importing_the_package_does_nothing() -> None:
    environment = {**os.environ, "LEGACY_DDP_CHECKS": "read at construction only"}

    subprocess.run([sys.executable, "-c", _IMPORT], check=True, timeout=120, env=environment)
