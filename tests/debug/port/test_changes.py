"""The changes of ``legacy-ddp port`` in a script, and what it leaves to the user."""

from pathlib import Path

import pytest

from tests.helpers.ported import ported

OURS = "from legacy_ddp import LegacyDistributedDataParallel"
THEIRS = "from torch.nn.parallel import DistributedDataParallel"
OTHER = "from mylib import LegacyDistributedDataParallel"
MADE_HERE = f"{THEIRS} as DDP\n"
MADE = f"{MADE_HERE}model = DDP(net)\n"
HEAD = f"{MADE}optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"

# A script behind MADE_HERE if it makes the wrapper, else behind HEAD. The port writes the lines with a plus, and
# removes those with a minus.
BODIES = {
    "a loop of micro-batches": (
        "for xs in steps:\n    for x in xs:\n        model(x).backward()\n+    model.all_reduce()\n    # next\n"
        "    optimizer.step()\n"
    ),
    "every fourth micro-batch": (
        "for i, x in data:\n\tmodel(x).backward()\n\tif i % 4 == 0:\n+\t\tmodel.all_reduce()\n"
        "\t\tclip_grad_norm_(model.parameters(), 1)\n\t\toptimizer.step()\n"
    ),
    "clipping of every micro-batch before a rare step": (
        "for i, x in data:\n    model(x).backward()\n+    model.all_reduce()\n"
        "    clip_grad_norm_(model.parameters(), 1)\n    if i % 4 == 0:\n        optimizer.step()\n"
    ),
    "two branches": (
        "if scaler:\n    scaler.scale(loss).backward()\n+    model.all_reduce()\n"
        "    scaler.unscale_(optimizer)\n    scaler.step(optimizer)\nelse:\n    loss.backward()\n"
        "+    model.all_reduce()\n    optimizer.step()\n"
    ),
    "branches of backward alone": (
        "if scaler:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\n+model.all_reduce()\n"
        "optimizer.step()"
    ),
    "helper functions": (
        "def backward(loss):\n    loss.backward()\n\ndef update():\n    optimizer.step()\n\nbackward(x)\n"
        "+model.all_reduce()\nupdate()\n"
    ),
    "another name in the function": (
        "def train(net, opt):\n    net(x).backward()\n+    net.all_reduce()\n    opt.step()\ntrain(model, optimizer)\n"
    ),
    "a parameter that another file passes": (
        "def train(model, opt):\n    model(x).backward()\n+    model.all_reduce()\n    opt.step()\n"
    ),
    "lines that go on": "loss = (\n    a +\n    b)\n(loss\n .backward())\n+model.all_reduce()\noptimizer.step()\n",
    "a setting of torch DDP under a condition": (
        "for x in xs:\n-    if ddp and x:\n-        # why\n"
        "-        model.require_backward_grad_sync = x is last\n    model(x).backward()\n+model.all_reduce()\n"
        "optimizer.step()\n"
    ),
    "a setting of torch DDP in branches": (
        "if a:\n    b()\nelif ddp:\n-    model.require_backward_grad_sync = x\n+    pass\nif f():\n"
        "-    model.require_backward_grad_sync = y\n+    pass\n"
        "-if a:\n-    if ddp:\n-        model.require_backward_grad_sync = z\n"
        "-b(); model.require_backward_grad_sync = z\n+b(); pass\n"
        "loss.backward()\n+model.all_reduce()\noptimizer.step()\n"
    ),
    "characters of several bytes": (
        "größe = '日本'\n日 = loss.backward()  # ü\n+model.all_reduce()\noptimizer.step()\n"
    ),
    "a step in each branch": (
        "loss.backward()\n+model.all_reduce()\nif i % 2:\n    optimizer.step()\nelse:\n    optimizer.step()\n"
    ),
    "several backward passes, one with a condition": (
        "for x in xs:\n    if x:\n        a.backward()\n    b.backward()\n+    model.all_reduce()\n"
        "    optimizer.step()\n"
    ),
    "several backward passes of each micro-batch": (
        "for x in xs:\n    a.backward()\n    b.backward()\n+model.all_reduce()\noptimizer.step()\n"
    ),
    "several backward passes in a function": (
        "def back(x):\n    x.backward()\n\nback(a)\nback(b)\n+model.all_reduce()\noptimizer.step()\n"
    ),
    "several backward passes and a setting of torch DDP": (
        "-model.require_backward_grad_sync = False\na.backward()\nb.backward()\n+model.all_reduce()\noptimizer.step()\n"
    ),
    "an optimizer of another name": (
        "from torch import optim\no = optim.RMSprop(model.parameters())\no.zero_grad()\nloss.backward()\n"
        "+model.all_reduce()\no.step()\n"
    ),
    "a backward of another name": (
        "from torch.autograd import backward as back\nback([loss])\n+model.all_reduce()\noptimizer.step()\n"
    ),
    "a profiler": "loss.backward()\n+model.all_reduce()\nscheduler.step()\nprofiler.step()\noptimizer.step()\n",
    "a second backward elsewhere": (
        "if debug:\n    loss.backward()\n    save()\nfor x in xs:\n    loss.backward()\n"
        "+    model.all_reduce()\n    optimizer.step()\n"
    ),
    "a wrapper under a condition": (
        'if ddp:\n  model = DDP(model)\nloss.backward()\n+if hasattr(model, "all_reduce"):\n'
        "+  model.all_reduce()\noptimizer.step()\n"
    ),
    "step and wrapper under one condition": (
        "if train:\n    model = DDP(model)\n    loss.backward()\n+    model.all_reduce()\n    optimizer.step()\n"
    ),
    "a wrapper of another function, by the same name": (
        "def wrap():\n    model = DDP(n)\n    return model\ndef main():\n    model = wrap()\n    loss.backward()\n"
        "+    model.all_reduce()\n    optimizer.step()\n"
    ),
    "a wrapper as one of two values": "model, x = DDP(n), 1\nloss.backward()\n+model.all_reduce()\noptimizer.step()\n",
    "a wrapper that moves": (
        "model: nn.Module = torch.compile(DDP(n).to(0))\nloss.backward()\n+model.all_reduce()\noptimizer.step()\n"
    ),
    "a wrapper for each optimizer": (
        "d = DDP(d_net)\ng = DDP(g_net)\nd_optim = torch.optim.Adam(d.parameters())\n"
        "g_optim = torch.optim.Adam([{'params': g_net.parameters()}])\nd_optim, g_optim = load(d_optim, g_optim)\n"
        "d_loss(real).backward()\n+d.all_reduce()\nd_loss(fake).backward()\n+d.all_reduce()\nd_optim.step()\n"
        "g_loss.backward()\n+g.all_reduce()\ng_optim.step()\n"
    ),
    "a wrapper of another method": (
        "class A:\n    def a(self):\n        self.m = DDP(self.m)\n    def b(self, n):\n        loss.backward()\n"
        "+        self.m.all_reduce()\n        optimizer.step()\n"
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_call_stands_between_backward_and_the_first_reader_of_gradients(name: str, tmp_path: Path) -> None:
    body = BODIES[name]
    head = MADE_HERE if "DDP(" in body else HEAD
    before, after = (
        "\n".join(line.removeprefix(own) for line in body.split("\n") if line[:1] != other)
        for own, other in ("-+", "+-")
    )

    assert ported(head + before, tmp_path).after == head.replace(THEIRS, OURS) + after


# Imports and the constructor, before and after.
CLASSES = {
    "an import": (f"{THEIRS}\nm = DistributedDataParallel(n)\n", f"{OURS}\nm = LegacyDistributedDataParallel(n)\n"),
    "an import of several names": (
        "from torch.nn.parallel import DataParallel, DistributedDataParallel as DDP  # both\nm = DDP(n)\n",
        f"from torch.nn.parallel import DataParallel  # both\n{OURS} as DDP\nm = DDP(n)\n",
    ),
    "an import with comments": (
        "from torch.nn.parallel import (\n    DistributedDataParallel,  # it\n)\nm = DistributedDataParallel(n)\n",
        "from legacy_ddp import (\n    LegacyDistributedDataParallel,  # it\n)\nm = LegacyDistributedDataParallel(n)\n",
    ),
    "the full name": (
        '"""About."""\nimport torch\nfrom torch import nn\nx = 1\nm = torch.nn.parallel.DistributedDataParallel(n)\n',
        f'"""About."""\nimport torch\nfrom torch import nn\n{OURS}\nx = 1\nm = LegacyDistributedDataParallel(n)\n',
    ),
    "a part of the name": (
        "from torch import nn\nm = nn.parallel.DistributedDataParallel(n)",
        f"from torch import nn\n{OURS}\nm = LegacyDistributedDataParallel(n)",
    ),
    "a test of the class": (
        f"{THEIRS}\nis_ddp = isinstance(m, (DataParallel, DistributedDataParallel))\n",
        f"{OURS}\nis_ddp = isinstance(m, (DataParallel, LegacyDistributedDataParallel))\n",
    ),
    "another class of the same name": (
        f"{THEIRS}\n{OTHER}\nm = DistributedDataParallel(n)\no = LegacyDistributedDataParallel(n)\n",
        f"{OURS} as DistributedDataParallel\n{OTHER}\nm = DistributedDataParallel(n)\n"
        "o = LegacyDistributedDataParallel(n)\n",
    ),
    "another class of the same name, and several imports": (
        f"from torch.nn.parallel import DataParallel, DistributedDataParallel\n{OTHER}\n"
        "m = DistributedDataParallel(n)\n",
        f"from torch.nn.parallel import DataParallel\n{OURS} as DistributedDataParallel\n{OTHER}\n"
        "m = DistributedDataParallel(n)\n",
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_is_replaced(name: str, tmp_path: Path) -> None:
    before, after = CLASSES[name]

    assert ported(before, tmp_path).after == after


@pytest.mark.parametrize(
    "before, after",
    [
        (
            "n, [0], None, 0, False, True, g, 25, True, 1, b",
            "n, init_sync=True, process_group=g, gradient_as_bucket_view=b",
        ),
        ("module=n, device_mesh=mesh, bucket_cap_mb=(1 + 2)", "module=n, process_group=mesh"),
        ("\n    n,  # it\n    device_ids=[0],\n    process_group=g,\n", "\n    n,  # it\n    process_group=g,\n"),
        ("n,\n        device_ids=[0],  # one\n        init_sync=True", "n,\n        # one\n        init_sync=True"),
        # Where the module is left, one line.
        ("\n    net,\n    device_ids=[0],\n    broadcast_buffers=False,\n", "net"),
        ("net.to(d),\n    device_ids=[0]", "net.to(d)"),
        ("\n    module=net, device_ids=[0]", "module=net"),
        ("\n    net, # why\n    device_ids=[0]", "\n    net, # why\n    "),
        ("\n    net,\n", "\n    net,\n"),
        ("\n    f(\n        1),\n    [0]", "\n    f(\n        1),\n    "),
    ],
)
def test_arguments_of_torch_ddp_are_removed(before: str, after: str, tmp_path: Path) -> None:
    assert ported(f"{MADE_HERE}m = DDP({before})\n", tmp_path).after == f"{OURS} as DDP\nm = DDP({after})\n"


STEP = "loss.backward()\noptimizer.step()\n"
# The body of a script, and what is left to decide.
DECISIONS = {
    "evaluation on rank 0": (
        "if dist.get_rank() == 0:\n    model.eval()\nif not args.local_rank:\n    model.eval()\n"
        "if i % 9 == 0 and master_process:\n    model.eval()\n",
        [],
    ),
    "evaluation on the other ranks": ("if rank == 0:\n    pass\nelse:\n    model.eval()\n", ["evaluation"]),
    "evaluation in a domain": ("if domain:\n    model.eval()\n", ["evaluation"]),
    "evaluation by a function of one rank": ("def test():\n    model.eval()\nif is_main_process():\n    test()\n", []),
    "evaluation by a function of one rank and of all": (
        "def test():\n    model.eval()\nif is_main_process():\n    test()\ntest()\n",
        ["evaluation"],
    ),
    "evaluation of another module": ("ema.eval()\n", []),
    "a second order": ("a.backward(create_graph=True)\noptimizer.step()\n", ["autograd"]),
    "a backward pass under a condition": ("if x:\n    a.backward()\n", ["backwards"]),
    "a graph that is kept": ("a.backward(retain_graph=True)\n", ["backwards"]),
    "an evaluation by the function of a step": (
        "def back(x):\n    model(x).backward()\nback(x)\noptimizer.step()\nwith torch.no_grad():\n    back(x)\n",
        [],
    ),
    "a last micro-batch": ("with model.no_sync():\n    a.backward()\n", []),
    "a scaler that does all": ("loss_scaler(loss, optimizer)\n", ["call"]),
    "a member": ("model._register_builtin_comm_hook(x)\n", ["members"]),
    "the class as a value": ("f(DDP)\n", ["class"]),
    "the class as a text": ("name == 'DistributedDataParallel'\n", ["class"]),
    "a wrapper without a variable": ("f(DDP(n))\n", ["call"]),
    "devices, and another module that moves": ("model = DDP(n, device_ids=[0])\nema.to(device)\n", ["arguments"]),
    "devices, and a function that moves the module": (
        "model = DDP(net, [0])\ndef move():\n    net.to(device)\n",
        ["arguments"],
    ),
    "devices, and new tensors": ("model = DDP(n, [0])\nfor x in y:\n    torch.zeros(1).cuda()\n", ["arguments"]),
    "no devices": ("model = DDP(n, device_ids=None)\n", []),
    "arguments not seen": ("model = DDP(n, **k)\n", ["arguments"]),
    "an argument in parentheses": ("model = DDP(n, ([0]))\n", ["arguments"]),
    "an argument of another library": ("model = DDP(n, delay_allreduce=True)\n", ["arguments"]),
    "a flag without effect": ("model = DDP(n, find_unused_parameters=True)\n", []),
    "no broadcasts": ("model = DDP(net, broadcast_buffers=False)\nmodel.eval()\n", ["buffers", "evaluation"]),
    "perhaps no broadcasts": ("model = DDP(net, broadcast_buffers=not off)\n", ["buffers"]),
    "averaged statistics": ("distribute_bn(model, size, True)\n", ["statistics"]),
    "a setting": ("model.require_backward_grad_sync = last\n", ["accumulation"]),
    "a setting in a loop of optimizer steps": (
        "while True:\n    model.require_backward_grad_sync = last\n    loss.backward()\n    optimizer.step()\n",
        ["accumulation"],
    ),
    "a setting in a loop of micro-batches": (
        "for x in xs:\n    model.require_backward_grad_sync = x\n    loss.backward()\noptimizer.step()\n",
        [],
    ),
    "a setting, and a condition of the step": (
        "for i in n:\n    model.require_backward_grad_sync = x\n    loss.backward()\n    if i % 4 == 0:\n"
        "        optimizer.step()\n",
        [],
    ),
    # The place of the call needs a look.
    "clipping in the loop": ("for x in xs:\n    loss.backward()\n    clip_grad_norm_(p, 1)\n", ["backwards", "call"]),
    "a gradient that is read in the loop": ("for x in xs:\n    x.backward()\n    log(w.grad)\n", ["backwards", "call"]),
    "a step if ready": ("for x in xs:\n    x.backward()\n    if ready:\n        optimizer.step()\n", ["accumulation"]),
    "a step that is left out": (
        "for x in xs:\n    x.backward()\n    if i % 2:\n        continue\n    optimizer.step()\n",
        ["accumulation"],
    ),
    "Join": ("from torch.distributed.algorithms.join import Join\nwith Join([model]):\n    pass\n", ["hooks"]),
    "a distributed checkpoint": (
        "from torch.distributed.checkpoint.state_dict import get_state_dict\nget_state_dict(model, optimizer)\n",
        ["checkpoints"],
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_what_the_text_cannot_tell_is_left_to_the_user(name: str, tmp_path: Path) -> None:
    body, expected = DECISIONS[name]

    found = ported(HEAD + body + STEP, tmp_path)

    assert found.pages() == expected
    assert found.is_complete == (not expected)


# Steps in which a call would be wrong, or might be; behind MADE_HERE or MADE.
QUESTIONS = {
    "no step": "loss.backward()\n",
    "no backward": "",
    "a step that comes first": "optimizer.step()\nloss.backward()\n",
    "a step in another branch": "if a:\n    loss.backward()\nelse:\n    optimizer.step()\n",
    "a step for the last micro-batches": (
        "for i, x in data:\n    model(x).backward()\n    if i % 4 == 0:\n        optimizer.step()\noptimizer.step()\n"
    ),
    "statements on one line": "loss.backward(); optimizer.step()\n",
    "a condition on one line": "for i in r:\n    loss.backward()\n    if i % 2: optimizer.step()\n",
    "a line that goes on": "loss.backward()\nif i % 2: \\\noptimizer.step()\n",
    "an optimizer of another module": "opt = torch.optim.SGD(head.parameters())\nloss.backward()\nopt.step()\n",
    "another module in the function": (
        "def probe():\n    model = Linear()\n    model(x).backward()\n    optimizer.step()\n"
    ),
    "a closure": "def closure():\n    model(x).backward()\n    return 1\noptimizer.step(closure)\n",
    "another class": (
        "self.model = DDP(net)\nclass A:\n    def f(self, opt):\n        self.model(x).backward()\n        opt.step()\n"
    ),
    "wrappers of a loop": f"for n in nets:\n    m = DDP(n)\n{STEP}",
    "an item": f"m[0] = DDP(n)\n{STEP}",
    "a list": f"ms = [DDP(n) for n in nets]\n{STEP}",
    "a function that makes wrappers": f"def f(): return DDP(n)\nm = f()\n{STEP}",
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_call_that_might_be_wrong_is_a_question(name: str, tmp_path: Path) -> None:
    before = (MADE_HERE if "DDP(" in QUESTIONS[name] else MADE) + QUESTIONS[name]
    found = ported(before, tmp_path)

    assert ({*found.pages()}, found.after) == ({"call"}, before.replace(THEIRS, OURS))


@pytest.mark.parametrize(
    "other",
    [
        "try:\n    from apex.parallel import DistributedDataParallel\nexcept ImportError:\n    pass\n",
        "class DistributedDataParallel:\n    pass\n",
        "DistributedDataParallel = 1\n",
        "print(f'{DistributedDataParallel}')\n",
        f"import torch\n{OTHER}\nm = torch.nn.parallel.DistributedDataParallel(n)\n",
    ],
)
def test_where_the_name_of_the_class_has_another_meaning_nothing_is_changed(other: str, tmp_path: Path) -> None:
    before = f"{other}{THEIRS}\nmodel = DistributedDataParallel(n)\n{STEP}"

    found = ported(before, tmp_path)

    assert (found.pages(), found.after) == (["class"], before)


def test_a_file_that_only_tests_the_class_says_that_the_wrapper_is_made_elsewhere(tmp_path: Path) -> None:
    found = ported(CLASSES["a test of the class"][0], tmp_path)

    assert found.texts == ["no wrapper is made in this file; port the file that makes it, too"]


@pytest.mark.parametrize(
    "body, page",
    [
        ("model.register_comm_hook(None, h)\n", "hooks"),
        ("with model.no_sync():\n    pass\n", "accumulation"),
        ("thread.join()\n", None),
        ("other = DDP(net2)\n", "wrappers"),
        ("a.backward()\n", "backwards"),
        ("model = DDP(net, device_ids=[0])\nfor x in xs:\n    x = x.to(device)\n", "arguments"),
        ("model = DDP(net, [0])\ndef get():\n    return x.pin_memory().cuda()\n", "arguments"),
        ("import torch\ntorch.nn.BatchNorm2d(1)\ntorch.nn.BatchNorm1d(2)\n", "evaluation"),
        ("import torch\ntorch.nn.SyncBatchNorm.convert_sync_batchnorm(n)\n", "autograd"),
        ("scaler.scale(x).backward()\nclip_grad_norm_(p, 1)\nscaler.step(optimizer)\n", "call"),
        ("scaler.scale(x).backward()\nscaler.unscale_(opt)\nclip_grad_norm_(p, 1)\nscaler.step(optimizer)\n", None),
    ],
)
def test_what_works_as_before_is_a_note(body: str, page: str | None, tmp_path: Path) -> None:
    found = ported(HEAD + body + STEP, tmp_path)

    assert (found.pages(), found.pages(is_open=False)) == ([], [page] if page else [])


def test_several_backward_passes_with_one_call_say_where_torch_ddp_averages_too(tmp_path: Path) -> None:
    found = ported(f"{HEAD}if x:\n    a.backward()\nelse:\n    b.backward()\n{STEP}", tmp_path)

    assert found.texts == [
        "one all_reduce() for several backward(); torch DDP averages in each, which rounds differently; for its bits "
        "add model.all_reduce() after line 5 and line 7, too"
    ]


def test_a_missing_set_epoch_is_a_note_because_torch_ddp_has_the_same_order(tmp_path: Path) -> None:
    without, with_epochs = (
        ported(f"{HEAD}s = DistributedSampler(d)\n{more}{STEP}", tmp_path) for more in ("", "s.set_epoch(1)\n")
    )

    assert without.texts == ["without sampler.set_epoch(epoch) every epoch has the same order, as under torch DDP"]
    assert without.is_complete
    assert not with_epochs.texts


def test_a_step_in_a_file_without_the_wrapper_names_the_line_of_the_call(tmp_path: Path) -> None:
    step = "def f(loss, opt, scaler):\n    scaler.scale(loss).backward()\n"
    condition = "    if update:\n        scaler.unscale_(opt)\n        scaler.step(opt)\n    else:\n        x = 1\n"

    found = ported(step + condition, tmp_path)

    assert (found.pages(), found.diff) == (["files"], "")
    assert found.texts == [
        "which wrapper this backward() is for is not seen here; all_reduce() of the wrapper goes before line 4, under "
        "the condition of the step, before unscale_() and clipping; torch DDP averages in each backward() here, for "
        "its bits write it after line 2 instead"
    ]


def test_a_step_without_the_wrapper_says_what_the_wrapper_needs_elsewhere(tmp_path: Path) -> None:
    body = "task.prepare(broadcast_buffers=not off)\nmodel.eval()\ndistribute_bn(model)\n"

    assert ported(body + STEP, tmp_path).pages() == ["buffers", "evaluation", "statistics", "files"]


def test_only_a_script_without_no_sync_is_told_that_torch_ddp_averages_in_each_backward(tmp_path: Path) -> None:
    step = "for i in n:\n    loss.backward()\n    if i % 4 == 0:\n        optimizer.step()\n"
    plain, inside = (ported(f"{HEAD}{before}{step}", tmp_path).texts for before in ("", "f(model.no_sync())\n"))

    assert [text.endswith("for its bits call after each") for text in plain] == [True]
    assert not any("averages in each" in text for text in inside)


def test_a_wrapper_under_a_condition_and_a_step_in_another_file_need_a_guard(tmp_path: Path) -> None:
    (text,) = ported(f"{THEIRS} as DDP\nif many:\n    model = DDP(net)\n", tmp_path).texts

    assert text.endswith(
        "call all_reduce() where the training step is, behind hasattr(), because the module may be plain"
    )


def test_removed_broadcasts_of_buffers_say_what_the_script_does_instead(tmp_path: Path) -> None:
    words = ("broadcast_buffers=False", "broadcast_buffers=True", "forward_sync_buffers=False")
    off, on, no_sync = (ported(f"{HEAD}model = DDP(net, {word})\n{STEP}", tmp_path).texts for word in words)

    assert off == [
        "broadcast_buffers is removed: forward sends no buffers here, but the constructor sends those of rank 0 once, "
        "which torch DDP with False does not; if ranks start with different buffers, and keep them, name these in "
        "ignore="
    ]
    assert no_sync == [
        "forward_sync_buffers is removed: forward sends no buffers here, so that False needs nothing in its place"
    ]
    assert on == [
        "broadcast_buffers is removed: forward sends no buffers; broadcast_buffers() does, before an evaluation and "
        "before a checkpoint"
    ]
