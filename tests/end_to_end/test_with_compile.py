"""Is a compiled model one graph, and does it train as under torch DDP that is not compiled?"""

import os
import tempfile
import warnings
from typing import Any

import pytest
import torch

from tests.helpers.besides_ddp import Side, batches, loss_of, net, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import thorough


def _train(rank: int, side: Side, where: str, backend: str) -> tuple[dict[str, torch.Tensor], int, int]:
    """Weights, graphs, and operations that were left to Python."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's compiler uses torch.jit
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.gettempdir()  # goes with the test
    import torch._dynamo.utils as dynamo_utils

    torch.manual_seed(0)
    module = net()
    inner: Any = torch.compile(module, backend=backend, fullgraph=True) if where == "inside" else module
    model = side.wrap(inner)
    called: Any = torch.compile(model, backend=backend, fullgraph=True) if where == "outside" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(batch: torch.Tensor) -> None:
        loss_of(called, batch).backward()
        side.meet(model)
        optimizer.step()
        optimizer.zero_grad()

    step = torch.compile(step, backend=backend) if where == "around the call" else step
    for batch in batches(rank):
        step(batch)
    counters = dynamo_utils.counters
    state = {name: p.detach() for name, p in weights(module).items()}
    return state, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.fixture(scope="module")
def expected() -> list[dict[str, torch.Tensor]]:
    return [state for state, *_ in run_ranks(_train, 2, Side(ours=False), "nowhere", "eager")]


@pytest.mark.parametrize("where", [thorough("inside"), "outside", thorough("around the call")])
def test_a_compiled_model_is_one_graph_and_ends_with_the_bits_of_torch_ddp(
    expected: list[dict[str, torch.Tensor]], where: str
) -> None:
    found = run_ranks(_train, 2, Side(ours=True), where, "eager", timeout_seconds=120)

    for (state, graphs, breaks), ddp in zip(found, expected, strict=True):
        assert (graphs, breaks) == (1, 0) or where == "around the call"
        for name, weight in ddp.items():
            assert torch.equal(state[name], weight), name


@pytest.mark.thorough
@pytest.mark.slow
def test_what_inductor_compiles_ends_with_the_weights_of_torch_ddp(expected: list[dict[str, torch.Tensor]]) -> None:
    found = run_ranks(_train, 2, Side(ours=True), "outside", "inductor", timeout_seconds=240)

    for (state, graphs, _), ddp in zip(found, expected, strict=True):
        assert graphs == 1
        torch.testing.assert_close(state, ddp, rtol=0, atol=1e-6)  # its code rounds in other places
