"""Captured steps beside threads, copies, checkpoints and modes, for a while: equal operations, and a clean end."""

import pytest

from tests.helpers.scripts import run_script

STRESS = """
import gc
import threading

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from legacy_ddp.debug._operations.capture import OperationCapture

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.LSTM(8, 8, batch_first=True))
x, other = torch.randn(3, 4, 8), nn.Linear(8, 8)
stop = threading.Event()


def beside():
    # Allocates, frees and trains in a thread of its own: dirty memory for the next operations.
    while not stop.is_set():
        other(torch.full((64, 8), 1e30)).sum().backward()


def step(round_number):
    model.zero_grad()
    torch.manual_seed(1)
    capture = OperationCapture(model)
    with FlopCounterMode(display=False) if round_number % 3 == 0 else torch.enable_grad():
        capture.start()
        hidden = checkpoint(model[0], x, use_reentrant=False)
    model[1](hidden)[0].square().sum().backward()
    return capture.stop(), [parameter.grad.clone() for parameter in model.parameters()]


thread = threading.Thread(target=beside)
thread.start()
try:
    step(0)  # in torch 2.8 the first of all checkpoints imports modules that run operations
    first, grads = step(1)
    for round_number in range(60):
        again, others = step(round_number)
        assert again == first, next((a, b) for a, b in zip(first, again) if a != b)
        assert all(map(torch.equal, grads, others))
        assert _get_current_dispatch_mode_stack() == []
finally:
    stop.set()
    thread.join()
gc.collect()
torch.ones(1).add_(1)
"""


@pytest.mark.thorough
def test_sixty_captured_steps_are_equal_and_end_cleanly() -> None:
    ended = run_script("-c", STRESS)

    assert (ended.returncode, ended.stderr) == (0, "")
