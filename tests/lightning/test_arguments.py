"""Arguments, registered names and examples of the strategies, and the import without Lightning."""

from typing import Any

import pytest
import torch

from legacy_ddp import Checks
from tests.helpers.docstring_examples import run_examples
from tests.helpers.lightning_scenarios import needs_lightning
from tests.helpers.scripts import run_script

pytestmark = needs_lightning
BOTH = pytest.mark.parametrize("strategy", ["LegacyDDPStrategy", "LegacyDDPFabricStrategy"], indirect=True)


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> type:
    from legacy_ddp import lightning

    return getattr(lightning, request.param)


@pytest.mark.parametrize(
    "name, start_method", [("legacy_ddp", "popen"), ("legacy_ddp_spawn", "spawn"), ("legacy_ddp_fork", "fork")]
)
def test_a_name_finds_the_strategy_in_both_registries(name: str, start_method: str) -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    from legacy_ddp.lightning import LegacyDDPFabricStrategy, LegacyDDPStrategy

    for registry, kind in ((StrategyRegistry, LegacyDDPStrategy), (STRATEGY_REGISTRY, LegacyDDPFabricStrategy)):
        strategy = registry.get(name)

        assert type(strategy) is kind
        assert strategy._start_method == start_method


@BOTH
@pytest.mark.parametrize(
    "given, kind, said",
    [
        ({"buffer_size": 0}, ValueError, "buffer_size"),
        ({"timeout_seconds": -1.0}, ValueError, "timeout_seconds"),
        ({"checks": "some"}, ValueError, "checks"),
        ({"ignore": "layer"}, TypeError, "ignore"),
        # What a strategy does not take, and what to do instead.
        ({"static_graph": True}, TypeError, "takes no static_graph; leave it out"),
        ({"broadcast_buffers": False}, TypeError, "ignore="),
        ({"process_group": None}, TypeError, "all ranks of the job"),
        ({"reproducible": True}, TypeError, "docs/reproducible.md"),
        ({"dim": 0}, TypeError, "the device that Lightning gave it"),
        ({"bufer_size": 1}, TypeError, "has no argument 'bufer_size'"),
    ],
)
def test_an_unusable_argument_of_the_wrapper_is_refused_before_any_rank_is_started(
    strategy: type, given: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        strategy(**given)
    assert caught.value.__notes__ == [f"meaning and next step: legacy-ddp explain {kind.__name__}"]


@pytest.mark.usefixtures("alone")
def test_a_level_of_the_environment_beside_a_reaction_of_the_strategy_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The strategy passed the settings of the environment to the wrapper as those of the script."""
    from legacy_ddp.lightning import LegacyDDPStrategy

    monkeypatch.setenv("LEGACY_DDP_CHECKS", "off,timeout_seconds=30")
    model = LegacyDDPStrategy(checks=Checks(nonfinite="raise"))._wrap(torch.nn.Linear(2, 1), None)

    assert model.extra_repr().endswith("timeout_seconds=30.0, checks=Checks(level='off', nonfinite='raise')")


def test_a_state_of_a_communication_hook_without_the_hook_is_refused() -> None:
    from legacy_ddp.lightning import LegacyDDPStrategy

    with pytest.raises(ValueError, match="ddp_comm_hook is missing"):
        LegacyDDPStrategy(ddp_comm_state=object())


@BOTH
def test_the_example_of_a_strategy_runs(strategy: type) -> None:
    from lightning import Fabric, Trainer

    names = {strategy.__name__: strategy, "Fabric": Fabric, "Trainer": Trainer}
    count, failures = run_examples(strategy, names)

    assert failures == ""
    assert count > 0


def test_without_lightning_the_core_works_and_the_strategies_name_the_package_to_install() -> None:
    program = (
        "import sys, legacy_ddp; assert not any(name.startswith('lightning') for name in sys.modules); "
        "sys.modules['lightning'] = None; import legacy_ddp.lightning"
    )
    result = run_script("-c", program)

    assert result.returncode == 1
    text, end = result.stderr.splitlines()[-2:]
    assert text.startswith("ImportError: legacy_ddp.lightning needs the package lightning")
    assert end == "meaning and next step: legacy-ddp explain ImportError"
    assert "pip install 'legacy_ddp[lightning]'" in result.stderr
