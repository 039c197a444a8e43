"""Random programs leave the gradients, and what is kept of them, that plain torch leaves."""

from functools import partial

import pytest

from tests.helpers.random_programs import run_programs
from tests.helpers.ranks import run_ranks


@pytest.mark.thorough
def test_300_random_programs_end_in_the_gradients_of_plain_torch() -> None:
    assert run_ranks(partial(run_programs, size=2, count=300), 2, fresh=True) == [300, 300]
