"""Tables of the figures quoted in the documentation, with their results files; tables.py writes them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from _quoted_figures import torch_ddp
from _quoted_growth import GROWTH
from _table import Column, Place, Table


def _calls() -> Table:
    names = {
        "bare `all_reduce`": "bare all_reduce",
        "bare `all_reduce` again": "bare all_reduce again",
        '`all_reduce()`, `checks="off"`, gradients kept': "ours, off, views",
        '`all_reduce()`, `checks="info"` (the default), likewise': "ours, info, views",
        '`checks="off"`, after `set_to_none=True`': "ours, off, to pack",
        '`checks="off"`, `gradient_as_bucket_view=False`': "ours, off, gradient_as_bucket_view=False",
        "one collective per parameter": "one collective per parameter",
    }
    columns = []
    for ranks in (2, 4):
        place, file = (f"call, transformer, {ranks} ranks", "variants", "{variant}"), f"all_reduce_{ranks}.json"
        columns.append(Column(f"{ranks} ranks", ((*place, "median_ratio"),), file=file))
        columns.append(Column("median", ((*place, "median_ms"),), "{:.1f} ms", file=file))
    return Table(
        file="all_reduce_2.json",
        heading="one call, against a bare `all_reduce` of the same bytes",
        columns=columns,
        rows={label: {"variant": name} for label, name in names.items()},
    )


def _parts() -> Table:
    names = [
        "bare all_reduce",
        "copy gradients into the flat tensor",
        "exchange headers",
        "divide the flat tensor",
        "norm of the flat tensor",
        "assign views to .grad",
    ]
    place = ("parts, transformer, 2 ranks", "variants", "{part}")
    return Table(
        file="all_reduce_2.json",
        heading="alone, after a barrier",
        columns=[
            Column("of the bare `all_reduce`", ((*place, "median_ratio"),)),
            Column("median", ((*place, "median_ms"),), "{:.2f} ms"),
        ],
        rows={name: {"part": name} for name in names},
    )


def _phases() -> Table:
    names = {
        '`checks="off"`, gradients kept': "ours, off, views",
        '`checks="info"`, gradients kept': "ours, info, views",
        '`checks="off"`, after `set_to_none=True`': "ours, off, to pack",
        '`checks="info"`, likewise': "ours, info, to pack",
    }
    place = ("call, transformer, 2 ranks", "variants", "{variant}", "phase_ms")
    return Table(
        file="all_reduce_2.json",
        heading="ms of one call, by `record.seconds`",
        columns=[Column(phase, ((*place, phase),)) for phase in ("plan", "pack", "agree", "payload", "alias")],
        rows={label: {"variant": name} for label, name in names.items()},
    )


_WAYS = MappingProxyType(
    {
        "torch DDP, default": "torch DDP",
        "the same again": "torch DDP again",
        "torch DDP, `gradient_as_bucket_view=True`": "torch DDP, bucket views",
        "torch DDP, `static_graph=True`": "torch DDP, static graph",
        '`checks="off"`': "ours, off",
        '`checks="info"`': "ours, info",
        "one collective per parameter": "one collective per parameter",
        "local compute, then a bare `all_reduce`": "local compute + bare all_reduce",
        "no synchronisation at all": "local compute alone",
    }
)


def _step_places(model: str, update_freq: int, kinds: Sequence[str], ranks: int = 2) -> tuple[Place, ...]:
    return tuple(
        (
            f"step of {model}, update-freq {update_freq}, set_to_none={kind}, {ranks} ranks",
            "variants",
            "{variant}",
            "median_ratio",
        )
        for kind in kinds
    )


def _steps() -> Table:
    columns = [
        Column(f"update-freq {update_freq}", _step_places("transformer", update_freq, ("yes", "no")), is_range=True)
        for update_freq in (1, 4)
    ]
    return Table(
        file="step_2.json",
        heading="whole training step, against torch DDP",
        columns=columns,
        rows={label: {"variant": name} for label, name in _WAYS.items()},
    )


def _crowded_steps() -> Table:
    return Table(
        file="step_4.json",
        heading="4 ranks on 2 cores, against torch DDP",
        columns=[Column(f"update-freq {freq}", _step_places("transformer", freq, ("yes",), 4)) for freq in (1, 4)],
        rows={label: {"variant": name} for label, name in _WAYS.items()},
    )


def _other_steps() -> Table:
    names = ("torch DDP", "torch DDP again", "ours, off", "ours, info")
    models = {
        "small ResNet, 164 tensors": ("resnet", "step_resnet_2.json"),
        "10,000 tiny tensors": ("tiny", "step_others_2.json"),
        "embedding of 256 MiB": ("embedding", "step_others_2.json"),
        "the same, sparse": ("sparse embedding", "step_others_2.json"),
    }
    return Table(
        file="step_others_2.json",
        heading="whole step, against torch DDP",
        columns=[
            Column(title, _step_places(model, 1, ("yes", "no")), is_range=True, file=file)
            for title, (model, file) in models.items()
        ],
        rows={label: {"variant": name} for label, name in _WAYS.items() if name in names},
    )


def _small_steps() -> Table:
    names = {label: name for label, name in _WAYS.items() if name != "one collective per parameter"}
    places = tuple((*place[:-1], "cpu_ratio") for place in _step_places("small", 1, ("yes", "no")))
    times = tuple((*place[:-1], "cpu_ms") for place in places)
    return Table(
        file="step_small_2.json",
        heading="processor time of a step, 16 small tensors",
        columns=[
            Column("against torch DDP", places, is_range=True),
            Column("median in ms", times, "{:.1f}", is_range=True),
        ],
        rows={label: {"variant": name} for label, name in names.items()},
    )


def _hosts() -> Table:
    ways = {
        '`checks="off"`': "ours, off",
        '`checks="info"`': "ours, info",
        "`reduce_dtype=torch.bfloat16`": "ours, off, reduce_dtype=bf16",
        "torch DDP, `gradient_as_bucket_view=True`": "torch DDP, bucket views",
        "torch DDP, `bf16_compress_hook`": "torch DDP, bf16_compress_hook",
        "torch DDP again": "torch DDP again",
        "no synchronisation at all": "local compute alone",
    }
    rows = {
        f"{rate} Gbit/s: {label}": {"rate": f"{rate} Gbit/s", "way": way}
        for rate in (1, 2, 10)
        for label, way in ways.items()
    }
    return Table(
        file="hosts.json",
        heading="two hosts, whole step, against torch DDP",
        columns=[
            Column(
                f"update-freq {freq}",
                (("rates", "{rate}", f"step, update-freq {freq}", "variants", "{way}", "median_ratio"),),
            )
            for freq in (1, 4, 8, 16)
        ],
        rows=rows,
    )


def _hosts_of_2() -> Table:
    ways = {
        '`checks="off"`': "ours, off",
        '`checks="info"`': "ours, info",
        '`checks="off"`, `transport="gloo"`': "ours, off, gloo",
        "`reduce_dtype=torch.bfloat16`, over gloo alone (older)": "ours, off, reduce_dtype=bf16",
        "torch DDP, `gradient_as_bucket_view=True`": "torch DDP, bucket views",
        "torch DDP, `bf16_compress_hook`": "torch DDP, bf16_compress_hook",
        "torch DDP again": "torch DDP again",
        "no synchronisation at all": "local compute alone",
    }
    return Table(
        file="hosts_of_2.json",
        heading="two hosts of two ranks, 1 Gbit/s, whole step, against torch DDP",
        columns=[
            Column(
                f"update-freq {freq}",
                (("rates", "1 Gbit/s", f"step, update-freq {freq}", "variants", "{way}", "median_ratio"),),
            )
            for freq in (1, 4)
        ],
        rows={label: {"way": way} for label, way in ways.items()},
    )


def _memory() -> Table:
    names = {
        "torch DDP, default": "torch DDP",
        "torch DDP, `gradient_as_bucket_view=True`": "torch DDP, views",
        "here": "ours",
        'here, `transport="gloo"`': "ours, gloo",
        "here, `gradient_as_bucket_view=False`": "ours, no views",
    }
    models = {"transformer": "transformer", "embedding of 256 MiB": "embedding"}
    return Table(
        file="memory.json",
        heading="gradients, by bytes of parameters",
        columns=[
            Column(
                title,
                tuple(
                    (model, "variants", "{variant}, set_to_none=" + kind, number)
                    for kind in ("False", "True")
                    for number in ("gradients_ratio", "first_step_ratio")
                ),
                is_range=True,
            )
            for title, model in models.items()
        ],
        rows={label: {"variant": name} for label, name in names.items()},
    )


def _wire() -> Table:
    return Table(
        file="wire.json",
        heading="main job, gradients travel in",
        columns=[
            Column("bits/byte", (("{wire}", "mean_bits"),), "{:.3f}"),
            Column("difference", (("{wire}", "mean_difference"),), "{:+.3f}"),
            Column("seeds differ by", (("{wire}", "seed_spread"),), "{:.3f}"),
        ],
        rows={
            "fp32, their own dtype": {"wire": "their own"},
            "bf16": {"wire": "bfloat16"},
        },
    )


def _reproducible() -> Table:
    main_job, transformer = "step of main job, update-freq {}", "step of transformer, update-freq {}"
    kinds = {
        "one call, 1 micro-batch": ("call, transformer", "reproducible, K = 1"),
        "one call, 4 micro-batches": ("call, transformer", "reproducible, K = 4"),
        "step of the transformer, update-freq 1": (transformer.format(1), "reproducible"),
        "step of the transformer, update-freq 4": (transformer.format(4), "reproducible"),
        "step of the main job, update-freq 1": (main_job.format(1), "reproducible"),
        "step of the main job, update-freq 4": (main_job.format(4), "reproducible"),
        "the plain call": ("call, transformer", "plain"),
    }
    return Table(
        file="reproducible_{ranks}.json",
        heading="a call against a bare `all_reduce`, a step against the plain form",
        columns=[
            Column("ratio", (("{what}, {ranks} ranks", "variants", "{variant}", "median_ratio"),)),
            Column("median", (("{what}, {ranks} ranks", "variants", "{variant}", "median_ms"),), "{:.0f} ms"),
        ],
        rows={
            f"{where}: {label}": {"ranks": ranks, "what": what, "variant": variant}
            for ranks, where in (("2", "2 ranks"), ("4", "4 ranks on 2 cores"))
            for label, (what, variant) in kinds.items()
        },
    )


def _agreement() -> Table:
    rows = {}
    for ranks, where in (("2", "2 ranks"), ("4", "4 ranks on 2 cores")):
        rows[f'{where}: `checks="off"` again'] = {"ranks": ranks, "variant": "off again"}
        rows[f'{where}: `checks="info"`'] = {"ranks": ranks, "variant": "info"}
    step = "step, update-freq {}, {{ranks}} ranks, zero_grad()"
    numbers = (("median_ratio",), ("ratio_interval", "0"), ("ratio_interval", "1"))
    return Table(
        file="agree_step_{ranks}.json",
        heading='whole step, against `checks="off"`',
        columns=[
            Column(
                f"update-freq {update_freq}",
                tuple((step.format(update_freq), "variants", "{variant}", *number) for number in numbers),
                "{:.2f} ({:.2f} – {:.2f})",  # noqa: RUF001 - an en dash is what a range takes
            )
            for update_freq in (1, 4)
        ],
        rows=rows,
    )


def _replicas() -> Table:
    names = {
        '`checks="detail"`': "detail",
        "`check_replicas()` every 10 steps": "check every 10 steps",
        "`Recorder`, every step": "record every step",
        "`Recorder(every=10)`": "record every 10 steps",
    }
    models = {"the demo's model": "train_lm", "1,000 small tensors": "1,000 small tensors"}
    return Table(
        file="debug_step_2.json",
        heading='whole step, against `checks="off"`',
        columns=[
            Column(title, ((f"step of {model}, 2 ranks", "ratios", "{what}"),)) for title, model in models.items()
        ],
        rows={label: {"what": name} for label, name in names.items()},
    )


def _digests() -> Table:
    names = {
        "the main job's model": "train_lm",
        "1,000 tensors of 16 elements": "1,000 small tensors",
        "transformer of 8.8 million parameters": "transformer",
    }
    place = ("step of {model}, 2 ranks",)
    return Table(
        file="digest_2.json",
        heading='digests in a step at `"info"`, 2 ranks',
        columns=[
            Column("a step takes longer by", ((*place, "longer"),), "{:.4f}"),
            Column("95 % of the median, from", ((*place, "longer_95", "0"),), "{:.4f}"),
            Column("to", ((*place, "longer_95", "1"),), "{:.4f}"),
            Column("share of the digests' own time", ((*place, "share"),), "{:.4f}"),
            Column("step", ((*place, "step_ms"),), "{:.1f} ms"),
        ],
        rows={label: {"model": name} for label, name in names.items()},
    )


def _operations() -> Table:
    names = {"transformer encoder of two layers": "transformer encoder", "the main job's model": "train_lm"}
    place = ("step of {model}, 1 ranks",)
    return Table(
        file="operations.json",
        heading="a step with operations, 1 rank",
        columns=[
            Column("against a plain step", ((*place, "variants", "with operations", "median_ratio"),), "{:.1f}"),
            Column("median", ((*place, "variants", "with operations", "median_ms"),), "{:.0f} ms"),
            Column("a recorder alone", ((*place, "variants", "recorder", "median_ratio"),)),
            Column("operations", ((*place, "operations"),), "{:,}"),
            Column("bytes a step", ((*place, "step_bytes"),), "{:,}"),
            Column("bytes once", ((*place, "once_bytes"),), "{:,}"),
        ],
        rows={label: {"model": name} for label, name in names.items()},
    )


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "call": _calls(),
        "parts": _parts(),
        "phases": _phases(),
        "step": _steps(),
        "crowded": _crowded_steps(),
        "others": _other_steps(),
        "small": _small_steps(),
        "wire": _wire(),
        "reproducible": _reproducible(),
        "hosts": _hosts(),
        "hosts of two": _hosts_of_2(),
        "memory": _memory(),
        "agree": _agreement(),
        "replicas": _replicas(),
        "digests": _digests(),
        "operations": _operations(),
        "torch DDP": torch_ddp(),
        **GROWTH,
    }
)
