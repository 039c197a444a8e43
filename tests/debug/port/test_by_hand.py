"""``legacy-ddp port`` of averages by hand: the lines that a call replaces, what is left to the user, the results."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.command import RefusedError
from tests.helpers.ported import end_states, ported
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import assert_same_bits

IMPORT = "from legacy_ddp import all_reduce_gradients\n"
HEAD = "import torch\nimport torch.distributed as dist\n"


# A step as CleanRL's PPO for several GPUs has it: one flat vector, written back piece by piece.
FLAT = """
for x in batches:
    optimizer.zero_grad()
    module(x).sum().backward()
    if args.world_size > 1:
        parts = []
        for weight in module.parameters():
            if weight.grad is not None:
                parts.append(weight.grad.view(-1))
        flat = torch.cat(parts)
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        start = 0
        for weight in module.parameters():
            if weight.grad is not None:
                weight.grad.data.copy_(flat[start : start + weight.numel()].view_as(weight.grad.data) / args.world_size)
                start += weight.numel()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()
"""
# As OpenNMT-py has it: a function of its own gets the gradients, and fills a buffer again and again.
BUFFER = """
def reduce_and_rescale(tensors, divisor, limit=160):
    space = tensors[0].new(math.ceil(limit / tensors[0].element_size())).zero_()
    held = []

    def send():
        at = 0
        for tensor in held:
            space[at : at + tensor.numel()].copy_(tensor.view(-1))
            at += tensor.numel()
        torch.distributed.all_reduce(space[:at], async_op=False)
        space.div_(divisor)
        at = 0
        for tensor in held:
            tensor.view(-1).copy_(space[at : at + tensor.numel()])
            at += tensor.numel()

    filled = 0
    for tensor in tensors:
        needed = tensor.numel() * tensor.element_size()
        if needed > limit:
            torch.distributed.all_reduce(tensor, async_op=False)
            tensor.div_(divisor)
        elif filled + needed > limit:
            send()
            held, filled = [tensor], needed
        else:
            held.append(tensor)
            filled += needed
    if len(held) > 0:
        send()
"""
HELD = """
for first, second in zip(batches[::2], batches[1::2]):
    optimizer.zero_grad(set_to_none=True)
    for x in (first, second):
        module(x).sum().backward()
    grads = [p.grad.data for p in module.parameters() if p.requires_grad and p.grad is not None]
    reduce_and_rescale(grads, float(args.world_size))
    optimizer.step()
"""
EACH = """
def average(model):
    size = float(dist.get_world_size())
    for p in model.parameters():
        if p.grad is None:
            continue
        dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
        p.grad.data /= size

for x in batches:
    optimizer.zero_grad()
    module(x).sum().backward()
    average(module)
    optimizer.step()
"""
UNUSED = 'module.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))'
START = f"{HEAD}import math\n\n{UNUSED}\noptimizer = torch.optim.Adam(module.parameters(), lr=0.1)"


def test_a_ported_average_ends_in_the_bits_of_the_average_by_hand(tmp_path: Path) -> None:
    theirs = [START + body for body in (FLAT, BUFFER + HELD, EACH)]
    found = [ported(program, tmp_path) for program in theirs]
    ours = [one.after for one in found]
    assert all(one.is_complete for one in found)
    assert [program.count("all_reduce(") for program in ours] == [0, 2, 0]  # two in the function that is not called
    assert [program.count("\n") for program in theirs] != [program.count("\n") for program in ours]

    for states in run_ranks(partial(end_states, programs=[*theirs, *ours]), 2):
        for before, after in zip(states, states[len(ours) :], strict=False):
            assert_same_bits(after, before)
            assert not torch.equal(before["0.weight"], torch.zeros(8, 5))

    flat, held, _ = (one.texts for one in found)  # the lines and the function to delete
    assert flat == ["lines 11 to 21 reduce gradients by hand; all_reduce_gradients(module) takes their place"]
    (text,) = held
    assert text.endswith("takes their place; delete reduce_and_rescale() in lines 7 to 36, if nothing else calls it")


LOOP = "for p in net.parameters():\n    dist.all_reduce(p.grad)\n"
# Lines of an average, and those in their place.
REPLACED = {
    "one loop": (
        "for p in net.parameters():\n    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)\nstep()\n",
        "all_reduce_gradients(net)\nstep()\n",
    ),
    "names, a group, and a list of works": (
        "works = []\nfor name, p in self.net.named_parameters():\n"
        "    works.append(dist.all_reduce(p.grad, group=self.group, async_op=True))\n"
        "for work in works:\n    work.wait()\nfor p in self.net.parameters():\n    p.grad.div_(world_size)\n",
        "all_reduce_gradients(self.net, process_group=self.group)\n",
    ),
    "a list of parameters": (
        "weights = list(chain(a.parameters(), b.parameters()))\n"
        "flat = torch.cat([p.grad.flatten() for p in weights])\ndist.all_reduce(flat)\nflat /= world_size\n"
        "for p, part in zip(weights, flat.split([p.numel() for p in weights])):\n    p.grad = part.view_as(p)\n",
        "weights = list(chain(a.parameters(), b.parameters()))\nall_reduce_gradients(weights)\n",
    ),
    "a list with the gradients of a module": (
        "have = [p for p in net.parameters() if p.grad is not None]\ngrads = [p.grad for p in have]\n"
        "flat = _flatten_dense_tensors(grads)\ndist.all_reduce(flat)\nflat.div_(dist.get_world_size())\n"
        "for grad, part in zip(grads, _unflatten_dense_tensors(flat, grads)):\n    grad.copy_(part)\n",
        "all_reduce_gradients(net)\n",
    ),
    "a count that is read later": (
        "size = dist.get_world_size()\nfor p in net.parameters():\n    dist.all_reduce(p.grad)\n    p.grad /= size\n"
        "print(size)\n",
        "size = dist.get_world_size()\nall_reduce_gradients(net)\nprint(size)\n",
    ),
    "groups of parameters": (
        "for group in groups:\n    for p in group['params']:\n        dist.all_reduce(p.grad)\n"
        "        p.grad /= world_size\n",
        "for group in groups:\n    all_reduce_gradients(group['params'])\n",
    ),
    "a factor": (f"{LOOP}    p.grad.mul_(1.0 / dist.get_world_size())\n", "all_reduce_gradients(net)\n"),
    "another factor": (f"{LOOP}    p.grad *= 1 / float(args.world_size)\n", "all_reduce_gradients(net)\n"),
    "a count of torchrun": (f"{LOOP}    p.grad /= float(os.environ['WORLD_SIZE'])\n", "all_reduce_gradients(net)\n"),
    "a method, and no gradients": (
        "def f(self):\n    grads = [p.grad for p in self.parameters() if p.grad is not None]\n    if not grads:\n"
        "        return\n    for grad in grads:\n        dist.all_reduce(grad)\n        grad /= self.world_size\n",
        "def f(self):\n    all_reduce_gradients(self)\n",
    ),
}


@pytest.mark.parametrize("name", REPLACED)
def test_the_call_takes_the_place_of_the_lines(name: str, tmp_path: Path) -> None:
    before, after = REPLACED[name]

    assert ported(HEAD + before, tmp_path).after == HEAD + IMPORT + after


# Lines that are no mean, or do something else, and words of the remark.
DECISIONS = {
    "a sum": (LOOP, "do not divide by the number of ranks"),
    "a sum over 1": (f"{LOOP}    p.grad /= float(1)\n", "do not divide by the number of ranks"),
    "tokens": (f"{LOOP}    p.grad /= tokens\n", "divide by tokens"),
    "a mean, and a factor": (LOOP.replace("grad)", "grad, dist.ReduceOp.AVG)") + "    p.grad *= 2\n", "multiply by 2"),
    "the greatest": (LOOP.replace("grad)", "grad, op=dist.ReduceOp.MAX)"), "another operation than a sum"),
    "something else": (f"{LOOP}    p.grad /= world_size\n    log(p)\n", "line 7 is about something else"),
    "a condition": (
        "for n, p in net.named_parameters():\n    if 'bias' in n:\n        dist.all_reduce(p.grad)\n"
        "        p.grad /= world_size\n",
        "under a condition",
    ),
    "a condition around a part": (
        "flat = torch.cat([p.grad.flatten() for p in net.parameters()])\nif world_size > 1:\n"
        "    dist.all_reduce(flat)\n    flat /= world_size\nvector_to(flat)\nfor p in net.parameters():\n"
        "    p.grad = flat[: p.numel()].view_as(p)\n",
        "by hand, ",
    ),
    "a value that is read later": (
        "flat = torch.cat([p.grad.flatten() for p in net.parameters()])\ndist.all_reduce(flat)\nflat /= world_size\n"
        "for p in net.parameters():\n    p.grad = flat[: p.numel()].view_as(p)\nprint(flat)\n",
        "other lines read what they compute",
    ),
    "a hook": (f"{LOOP}    p.grad /= world_size\nnet.weight.register_hook(f)\n", "goes behind backward()"),
    "one line": ("for p in net.parameters(): dist.all_reduce(p.grad, dist.ReduceOp.AVG); f()\n", "something else"),
    # A factor besides the number of ranks.
    "4": (f"{LOOP}    p.grad /= 4 * dist.get_world_size()\n", "divide by 4 * dist.get_world_size()"),
    "a factor 4": (f"{LOOP}    p.grad *= 4 / world_size\n", "multiply by 4 / world_size"),
    "the count as a factor": (f"{LOOP}    p.grad.mul_(world_size)\n", "multiply by world_size"),
    "weight decay": (f"{LOOP}    p.grad = p.grad / world_size + 1e-3 * p.data\n", "line 6 is about something else"),
    "a sign": (f"{LOOP}    p.grad = -p.grad / world_size\n", "line 6 is about something else"),
    # An average that is not understood.
    "halves": (
        "for p in net.parameters():\n    g = p.grad.half()\n    dist.all_reduce(g)\n    p.grad.copy_(g / 2)\n",
        "",
    ),
    "a norm in between": (
        "flat = torch.cat([p.grad.view(-1) for p in net.parameters()])\ndist.all_reduce(flat)\n"
        "flat /= dist.get_world_size()\nprint(flat.norm().item())\n"
        "torch.nn.utils.vector_to_parameters(flat, [p.grad for p in net.parameters()])\n",
        "",
    ),
    "a function of a library": (
        "from mylib import all_reduce_and_rescale\ngrads = [p.grad.data for p in net.parameters()]\n"
        "all_reduce_and_rescale(grads, 1.0)\n",
        "",
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_what_may_be_no_mean_of_a_module_is_left_to_the_user(name: str, tmp_path: Path) -> None:
    lines, words = DECISIONS[name]

    found = ported(f"{HEAD}loss.backward()\n{lines}optimizer.step()\n", tmp_path)

    ((is_open, text, _),) = found.remarks
    assert is_open
    assert "by hand" in text
    assert words in text
    assert "wrapper" not in text
    assert found.after == found.before


def test_an_average_of_a_module_that_torch_ddp_wraps_is_left_to_the_user(tmp_path: Path) -> None:
    wrapped = "from torch.nn.parallel import DistributedDataParallel as DDP\nnet = DDP(net)\n"
    found = ported(f"{HEAD}{wrapped}{LOOP}    p.grad /= world_size\nloss.backward()\n", tmp_path)

    assert any(is_open and "that torch DDP wraps here" in text for is_open, text, _ in found.remarks), found.remarks
    assert "all_reduce_gradients" not in found.after


SHARDED = (
    "import torch.distributed as dist\nfrom torch.optim import Optimizer\n\n\nclass Sharded(Optimizer):\n"
    "    def step(self):\n"
    "        for p in self.params:\n            grad = p.grad\n            dist.reduce_scatter_tensor(part, grad)\n"
)


@pytest.mark.parametrize(
    "lines, words",
    [
        ("norm = torch.stack([p.grad.norm() for p in net.parameters()]).sum()\ndist.all_reduce(norm)\n", ""),
        ("flat = torch.cat([p.grad.flatten() for p in net.parameters()])\ndist.all_reduce(flat)\nlog(flat)\n", ""),
        ("for p in net.parameters():\n    dist.all_reduce(p.data)\n    p.data /= world_size\n    p.grad = None\n", ""),
        ("loss = loss / p.grad.numel()\ndist.all_reduce(loss)\n", ""),
        (SHARDED.replace("part, grad", "p, p.data"), ""),
        (
            "def average(tensors):\n    for tensor in tensors:\n        dist.all_reduce(tensor)\n        tensor /= 2\n",
            ".* goes with the file that calls it",
        ),
    ],
)
def test_a_collective_about_something_else_is_no_average_of_gradients(lines: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=f"nothing to port{words}"):
        ported(HEAD + lines, tmp_path)


def test_a_name_that_the_script_has_already_is_not_shadowed(tmp_path: Path) -> None:
    found = ported(
        f"{HEAD}def all_reduce_gradients(net):\n    for p in net.parameters():\n"
        "        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)\n",
        tmp_path,
    )

    assert found.after == (
        f"{HEAD}import legacy_ddp\ndef all_reduce_gradients(net):\n    legacy_ddp.all_reduce_gradients(net)\n"
    )


def test_a_division_before_the_sum_says_that_it_may_round_differently(tmp_path: Path) -> None:
    lines = "for p in net.parameters():\n    p.grad /= world_size\n    dist.all_reduce(p.grad)\n"

    ((is_open, text, _),) = ported(HEAD + lines, tmp_path).remarks

    assert (is_open, text.rpartition("; ")[2]) == (False, "they divide before the sum, which may round differently")


STEP = "from lib.helpers import average_grads, Sharded\nloss.backward()\naverage_grads({})\noptimizer.step()\n"
HELPER = "import torch.distributed as dist\n\ndef average_grads(grads, count):\n    for g in grads:\n"


@pytest.mark.parametrize(
    "helper, argument, is_open, words",
    [
        (
            f"{HELPER}        dist.all_reduce(g)\n        g.div_(count)\n",
            "[p.grad for p in net.parameters()], world_size",
            False,
            "line 3 reduces gradients by hand; all_reduce_gradients(net) takes their place",
        ),
        (f"{HELPER}        dist.all_reduce(g)\n", "[p.grad for p in net.parameters()], 1", True, "do not divide"),
        ("", "net", True, "by its name, average_grads() of another file averages gradients by hand"),
    ],
)
def test_a_function_of_another_file_is_read_or_known_by_its_name(
    helper: str, argument: str, is_open: bool, words: str, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helpers.py").write_text(helper)
    (tmp_path / "scripts").mkdir()

    ((found_open, text, _),) = ported(STEP.format(argument), tmp_path / "scripts").remarks

    assert (found_open, words in text) == (is_open, True), text


def test_an_optimizer_that_reduces_is_named_here_and_in_files_behind_those_that_are_imported(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("from sharded import Sharded\n")
    (tmp_path / "sharded.py").write_text(SHARDED)
    step = "from model import build\noptimizer = build()\nloss.backward()\noptimizer.step()\n"
    words = "the optimizer Sharded reduces gradients by itself"

    ((is_open, there, _),) = ported(step, tmp_path).remarks
    (here,) = ported(SHARDED, tmp_path).texts

    assert is_open
    assert there.startswith(f"{words} in sharded.py:9: leave a loop with this optimizer as it is")
    assert here.startswith(f"{words}: leave")


def test_a_clip_before_the_average_is_told(tmp_path: Path) -> None:
    clip = "clip_grad_norm_(net.parameters(), 0.5)\n"
    found = ported(f"{HEAD}loss.backward()\n{clip}{LOOP}    p.grad /= world_size\noptimizer.step()\n", tmp_path)

    assert any("clips the gradients of each rank alone" in text and not is_open for is_open, text, _ in found.remarks)
