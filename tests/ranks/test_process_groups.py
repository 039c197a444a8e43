"""Choice of the process group, and independence of several wrappers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import Said, error_of, step, wrap


def _use_sub_group(rank: int, how: str) -> tuple[float | None, float, Said]:
    if how == "new_group":
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        mine, other = groups[rank // 2], groups[1 - rank // 2]
        outside = error_of(wrap, process_group=other)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "data"))
        mine, outside = mesh["data"], error_of(wrap, process_group=mesh)
    torch.manual_seed(rank)
    model = wrap(process_group=mine)
    weight = float(sum(parameter.detach().sum() for parameter in model.parameters()))
    return step(model, rank), weight, outside


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


@on_ranks(2, [[0.5, 1.5, float(rank), rank + 1.0, *[0.5, 1.5] * 3] for rank in range(2)])
def test_the_process_group_can_be_reassigned_between_steps(rank: int) -> list[float | None]:
    """And come back: each group knows other segments."""
    model, seen = wrap(), []
    single, mesh = [dist.new_group([only]) for only in range(2)][rank], init_device_mesh("cpu", (2,))
    for group in (None, single, mesh, None, mesh):
        model.process_group = group
        seen += [step(model, rank), step(model, rank + 1.0)]
    return seen


def _outlive_groups(rank: int, directory: Path) -> list[Any]:
    own = dist.new_group([0, 1])
    model, owner, meshed = wrap(), wrap(process_group=own), wrap(process_group=init_device_mesh("cpu", (2,)))
    step(model, rank), step(owner, rank)
    dist.destroy_process_group(own)
    seen: list[Any] = [error_of(owner.all_reduce), step(model, rank)]
    dist.destroy_process_group()
    seen += [error_of(meshed.all_reduce), error_of(model.all_reduce), error_of(wrap)]
    for again in range(2):
        store = FileStore(str(directory / f"store-{again}"), 2)  # torch itself cannot meet twice on one
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        seen += [step(model, rank), step(wrap(), rank + again)]
        if again == 0:
            dist.barrier()
            dist.destroy_process_group()
    return seen


@pytest.mark.usefixtures("transport")
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


@on_ranks(2, [[0.5, 2.5, 4.5, 6.5, 8.5]] * 2)
def test_wrappers_in_one_process_do_not_disturb_each_other(rank: int) -> list[float | None]:
    first, second = wrap(), wrap()
    shared = LegacyDistributedDataParallel(first.module)
    return [step(model, rank + 2 * index) for index, model in enumerate([first, second, second, shared, first])]


@on_ranks(2, [([0.5, 5.0, 1.5], 3), ([0.5, 1.5], 3)])
def test_a_visit_to_another_group_on_one_rank_keeps_the_wrapper_id(rank: int) -> tuple[list[float | None], int]:
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    model = wrap()
    seen = [step(model, rank)]
    if rank == 0:
        model.process_group = alone
        seen.append(step(model, 5.0))
        model.process_group = None
    seen.append(step(model, rank + 1.0))
    return seen, model.all_reduce(skip=True).call


@on_ranks(2, [0.5, 0.5])
def test_the_default_device_is_the_user_s_and_not_the_header_s(rank: int) -> float | None:
    model = wrap()
    with torch.device("meta"):
        mean = step(model, rank)
        model.all_reduce(skip=rank == 0)
    return mean


@on_ranks(2, [0.5, 0.5])
def test_cpu_gradients_need_no_cpu_backend_of_the_user_s_group(rank: int) -> float | None:
    return step(wrap(process_group=dist.new_group([0, 1], backend="cuda:gloo")), rank)


def test_the_error_without_a_group_names_the_line_for_plain_python_that_the_pages_show() -> None:
    said = error_of(wrap)

    assert said is not None
    found = re.search(r"for a single rank: (torch\.distributed\.init_process_group\(.*\))", said[1])
    assert found is not None
    for page in ("README.md", "docs/reference.md"):  # test_readme.py runs the line
        assert found[1] in (ROOT / page).read_text(encoding="utf-8")


SCRIPT = """
import gc, weakref
import torch, torch.distributed as dist
from legacy_ddp import LegacyDistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
model = LegacyDistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 1)).sum().backward()
model.all_reduce()
optimizer.step()
dist.destroy_process_group()
gc.collect()
assert group() is None, gc.get_referrers(group())
"""


def test_nothing_keeps_a_destroyed_group_alive_into_the_interpreter_s_exit() -> None:
    run = run_script("-c", SCRIPT)

    assert (run.returncode, run.stderr) == (0, "")
