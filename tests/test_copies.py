"""Contents of state dicts, deep copies and pickles of a wrapper, and the use of the copies."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import Said, add_gradients, error_of, gradient_values, step, wrap

pytestmark = pytest.mark.usefixtures("alone")


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
    model = wrap(buffer_size=5, checks=Checks(uneven="raise"))
    first = step(model, rank)
    with model.no_sync():
        other = _COPIES[how](model)
    seen: list[Any] = [
        first,
        gradient_values(other)["weight"],
        other.module.weight is model.module.weight,
        other.extra_repr().splitlines()[-1],
    ]
    for value, target in [(1, other), (2, model), (3, other)]:
        target.zero_grad()
        add_gradients(target, value + rank)
        record = target.all_reduce()
        seen.append((record.call, record.rows[0].micro_batches, gradient_values(target)["weight"]))
    return seen


def test_a_copy_synchronises_by_itself_from_its_first_call() -> None:
    settings = "buffer_size=5, checks=Checks(uneven='raise')"
    expected = [0.5, None, False, settings, (1, 1, 1.5), (2, 1, 2.5), (2, 1, 3.5)]

    found = run_cases(_step_original_and_copy, 2, {how: (how,) for how in _COPIES})
    assert found == dict.fromkeys(_COPIES, [expected] * 2)


def test_a_pickle_carries_parameters_but_neither_gradients_nor_flat_buffers() -> None:
    model = LegacyDistributedDataParallel(nn.Linear(100, 100, bias=False))
    add_gradients(model, 1)
    model.all_reduce()

    assert len(pickle.dumps(model)) < 1.2 * 100 * 100 * 4


def _copy_with_own_group(rank: int) -> tuple[bool, Said, Said, float | None]:
    group = dist.new_group([0, 1])
    model = wrap(process_group=group)
    shared = copy.deepcopy(model)
    assert step(shared, rank) == 0.5
    loaded = _through_pickle(_through_pickle(model))
    problems = error_of(loaded.all_reduce), error_of(lambda: loaded.process_group)
    loaded.process_group = group
    return shared.process_group is group, *problems, step(loaded, rank)


def test_deepcopy_shares_a_group_of_its_own_and_pickle_says_that_it_lost_it() -> None:
    lost = (
        "ValueError",
        "process_group was not carried by the pickle, expected a live one; assign .process_group after loading",
    )

    assert run_ranks(_copy_with_own_group, 2) == [(True, lost, lost, 0.5)] * 2


@pytest.mark.parametrize("how", _COPIES)
def test_a_wrapper_made_with_its_type_parameter_is_copied_saved_and_compiled(how: str) -> None:
    kind = TypeVar("kind", bound=nn.Module)  # of this function: no module has the name, so it has no pickle
    model = LegacyDistributedDataParallel[kind](nn.Linear(2, 1))

    copied = _COPIES[how](model)

    assert type(model) is type(copied) is LegacyDistributedDataParallel
    assert type(copied.module) is nn.Linear
    inputs = torch.ones(1, 2)
    assert torch.equal(torch.compile(copied, backend="eager")(inputs), model.module(inputs))
