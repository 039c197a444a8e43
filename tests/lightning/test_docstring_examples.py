"""The examples in the docstrings of the strategies run."""

from typing import Any

import pytest
from lightning import Fabric, Trainer

from legacy_ddp.lightning import LegacyDDPFabricStrategy, LegacyDDPStrategy
from tests.helpers.docstring_examples import run_examples


@pytest.mark.parametrize("strategy, user", [(LegacyDDPStrategy, Trainer), (LegacyDDPFabricStrategy, Fabric)])
def test_the_example_of_a_strategy_runs(strategy: Any, user: Any) -> None:
    count, failures = run_examples(strategy, {item.__name__: item for item in (strategy, user)})

    assert failures == ""
    assert count > 0
