"""The examples in the docstrings of the strategies run."""

import pytest

from tests.helpers.docstring_examples import run_examples
from tests.helpers.lightning_scenarios import needs_lightning


@needs_lightning
@pytest.mark.parametrize("name, user", [("LegacyDDPStrategy", "Trainer"), ("LegacyDDPFabricStrategy", "Fabric")])
def test_the_example_of_a_strategy_runs(name: str, user: str) -> None:
    import lightning

    from legacy_ddp import lightning as strategies

    strategy = getattr(strategies, name)
    count, failures = run_examples(strategy, {name: strategy, user: getattr(lightning, user)})

    assert failures == ""
    assert count > 0
