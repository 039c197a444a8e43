"""No warning and no error in healthy trainings by Lightning and accelerate, with default settings.

No story of tests/lightning may warn either, nor the loop of test_with_libraries.py; here the loops are longer than a
rotation of digests.

Run as a script, this file is one of two ranks, which leaves the warnings of legacy_ddp in FOLDER:
``test_clean_libraries.py FOLDER LIBRARY``.
"""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers import logged_warnings
from tests.helpers.scripts import fork_ranks

BATCHES = 48
pytestmark = pytest.mark.thorough


def _lightning() -> None:
    """A perceptron, two adversaries by hand with a clip of their own, and fp16 with a GradScaler; a rank overflows."""
    from lightning.pytorch.plugins import MixedPrecision

    from legacy_ddp.lightning import LegacyDDPStrategy
    from tests.helpers.lightning_jobs import Adversaries, Overflowing, Plain, fit

    for options in (
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    ):
        fit(LegacyDDPStrategy(), Plain(), batches=BATCHES, **options)
    fit(LegacyDDPStrategy(), Adversaries(), batches=BATCHES)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    fit(LegacyDDPStrategy(), Overflowing(), batches=BATCHES, plugins=[plugin], gradient_clip_val=0.05)


def _accelerate() -> None:
    """Two micro-batches to a step, clipped."""
    from accelerate import Accelerator

    from tests.helpers.lightning_jobs import CLASSES, FEATURES, make_data

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), torch.nn.Tanh(), torch.nn.Linear(32, CLASSES))
    model = LegacyDistributedDataParallel(accelerator.prepare_model(net, evaluation_mode=True))
    optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2), make_data(BATCHES))
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(inputs), labels))
            model.all_reduce()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


LOOPS = {"lightning": _lightning, "accelerate": _accelerate}


def _main() -> None:
    # Warnings of legacy_ddp become records of its log; warnings of other libraries stay.
    warnings.filterwarnings("error", message=r"all_reduce\(\) call")
    logged_warnings.listen()
    folder, name = sys.argv[1:]
    LOOPS[name]()
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(logged_warnings.take()))
    dist.destroy_process_group()


@pytest.mark.parametrize("library", LOOPS)
def test_nothing_is_said_of_a_healthy_training_by_a_library(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library, reason=f"needs {library}")
    result = fork_ranks(2, __file__, str(tmp_path), library)

    assert result.returncode == 0, result.stderr
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[], []]


if __name__ == "__main__":
    _main()
