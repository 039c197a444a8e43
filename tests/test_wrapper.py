"""The wrapper: promises of its docstring, refusals, and no leftovers."""

import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import FileStore

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import check_replicas
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import Net, Said, add_gradients, error_of, gradient_values, step, wrap

# Forward and no_sync


def _generators() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (kind, keys.tolist(), *rest)


@on_ranks(2, [[False, False]] * 2)
def test_the_library_draws_no_random_numbers(rank: int) -> list[bool]:
    """Whether the generators moved: in the constructor, in calls, in a check and in a broadcast."""
    module, moved = nn.Linear(2, 2), []
    for checks in ("info", "detail"):
        before = _generators()
        model = LegacyDistributedDataParallel(module, checks=checks)
        for _ in range(3):
            add_gradients(model, rank)
            model.all_reduce(metrics={"loss": float(rank)})
        check_replicas(model)
        model.broadcast_buffers()
        moved.append(_generators() != before)
    return moved


@on_ranks(2, [[0.0, 1.0], [2.0, 1.0]])
def test_all_reduce_inside_nested_no_sync_blocks_does_nothing_and_says_so(rank: int) -> list[float | None]:
    model = wrap()
    seen = []
    with model.no_sync():
        add_gradients(model, rank)
        with model.no_sync():
            add_gradients(model, rank)
        record = model.all_reduce()  # still inside the outer block
        assert (record.synchronized, record.call, record.rows, record.payload_bytes) == (False, 0, (), 0)
        seen.append(gradient_values(model)["weight"])
    assert model.all_reduce().synchronized
    return [*seen, gradient_values(model)["weight"]]


# Refused at construction


class _Agent(nn.Linear):
    def act(self) -> None:
        raise AssertionError("a look at the name does not call it")

    value = property(act)


@pytest.mark.usefixtures("alone")
def test_a_name_that_only_the_module_has_is_an_attribute_error_that_says_where_it_is() -> None:
    model = LegacyDistributedDataParallel(_Agent(1, 1))

    for name in ("act", "value", "weight", "in_features"):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=rf"the wrapped _Agent has: write model\.module\.{name};"):
            getattr(model, name)
    for name in ("missing", "__missing__"):
        with pytest.raises(AttributeError, match=rf"object has no attribute '{name}'$"):
            getattr(model, name)
    with pytest.raises(AttributeError, match=r"'act'$"):  # as in a copy that has no state yet
        getattr(object.__new__(LegacyDistributedDataParallel), "act")  # noqa: B009  # for the type checker


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("arguments, named", [((1,), {}), ((), {"world_size": 1})], ids=["second", "keyword"])
def test_a_world_size_is_told_to_be_deprecated(arguments: Any, named: Any) -> None:
    text = "^world_size is deprecated: it is only compared with the size of the process group; leave it out, and pass "
    with pytest.warns(DeprecationWarning, match=text) as told:
        LegacyDistributedDataParallel(nn.Linear(1, 1), *arguments, **named)

    assert [warning.filename for warning in told] == [__file__]


def _ignore(rank: int, how: str) -> tuple[dict[str, float | None], int, float, list[float], list[float]]:
    """The gradients and their bytes; a buffer, and the weights of two layers."""
    torch.manual_seed(rank)
    net: Any = Net()
    net.head.register_buffer("local", torch.full((1,), float(rank)))
    names = ["head.weight", "head.local"]
    if how == "attribute":
        net._ddp_params_and_buffers_to_ignore = [*names, "no.such.name"]
    model = LegacyDistributedDataParallel(net, ignore=names if how == "argument" else ())
    add_gradients(model, rank)
    record = model.all_reduce()
    weights = (layer.weight.flatten().tolist() for layer in (net.head, net.conv))
    return gradient_values(net), record.payload_bytes, net.head.local.item(), *weights


def test_ignored_parameters_and_buffers_stay_local() -> None:
    others = {"conv.weight": 0.5, "conv.bias": 0.5, "head.bias": 0.5, "frozen.weight": None}
    size_bytes = 4 * (3 * 4 * 4 + 4 + 4)
    found = run_cases(_ignore, 2, {"argument": ("argument",), "attribute": ("attribute",)})

    for (*first, head, conv), (*second, other_head, other_conv) in found.values():
        assert [first, second] == [[others | {"head.weight": rank}, size_bytes, rank] for rank in (0.0, 1.0)]
        assert (head != other_head, conv == other_conv) == (True, True)


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
        (
            lambda: nn.ParameterList([torch.zeros(2).to(torch.float8_e4m3fn)]),
            "parameter '0' has gradients of dtype torch.float8_e4m3fn, expected",
        ),
    ],
)
def test_parameters_without_values_are_refused_by_name(build: Callable[[], nn.Module], text: str) -> None:
    said = error_of(LegacyDistributedDataParallel, build())

    assert said[0] == "ValueError"
    assert said[1].startswith(text)


# Refused at the call


def _reduce_inside_backward(rank: int, guilty: list[int]) -> tuple[Said, dict[str, float | None], float | None]:
    model = wrap()
    said: list[Said] = []
    add_gradients(model, rank)
    if rank in guilty:
        handle = next(model.parameters()).register_post_accumulate_grad_hook(
            lambda _: said.append(error_of(model.all_reduce))
        )
        add_gradients(model, 0)
        handle.remove()
    else:
        said.append(error_of(model.all_reduce))
    grads = gradient_values(model)
    with torch.no_grad():  # even out the number of micro-batches, as a loop would by its next zero_grad()
        model.all_reduce(skip=True)
    return said[0], grads, step(model, rank)


def test_a_call_from_inside_backward_is_refused_on_every_rank() -> None:
    found = run_cases(_reduce_inside_backward, 2, {"LegacyDDPError": ([0, 1],), "PeerError": ([1],)})
    for kind, of_ranks in found.items():
        for rank, (said, grads, next_mean) in enumerate(of_ranks):
            assert said[0] == kind
            assert "all_reduce() was called from inside backward, expected after it; move it behind" in said[1]
            assert grads == {"weight": float(rank)}
            assert next_mean == 0.5


def _reduce_in_two_threads(rank: int, directory: Path) -> list[Said]:
    model = wrap()
    add_gradients(model, rank)
    store = FileStore(str(directory / "store"), 2)
    said: list[Said] = []

    def reduce() -> None:
        said.append(error_of(model.all_reduce))
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
    assert gradient_values(model) == {"weight": 0.5}
    assert step(model, rank) == 0.5
    return said


def test_a_call_from_a_second_thread_is_refused_while_the_first_one_waits(tmp_path: Path) -> None:
    first, second = run_ranks(_reduce_in_two_threads, 2, tmp_path)

    refused, done = first
    assert refused[0] == "LegacyDDPError"
    assert refused[1].startswith("all_reduce(): another call on this process group is under way in this process")
    assert done is None
    assert second == [None]


# What it leaves behind


@pytest.mark.usefixtures("alone")
def test_hooks_go_with_the_wrapper() -> None:
    module = nn.Linear(2, 1)

    def hooks() -> list[int]:
        return [len(parameter._post_accumulate_grad_hooks or ()) for parameter in module.parameters()]

    for _ in range(50):
        model = LegacyDistributedDataParallel(module)
        assert step(model, 1) == 1.0
    gc.collect()
    assert hooks() == [1, 1]
    del model
    gc.collect()
    assert hooks() == [0, 0]
    add_gradients(module, 1)
