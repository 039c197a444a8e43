"""The figures quoted inside sentences of the documentation, and cells about torch DDP; tables.py writes them."""

from collections.abc import Mapping
from types import MappingProxyType

from _ddp_scenes import SCENES
from _table import Column, Place, Table, figure

LEVELS, FAULTS = ("ours, off", "ours, info"), "torch_ddp_faults.json"


def _steps(model: str, update_freq: int, *numbers: Place) -> tuple[Place, ...]:
    return tuple(
        (f"step of {model}, update-freq {update_freq}, set_to_none={kind}, 2 ranks", *number)
        for kind in ("yes", "no")
        for number in numbers
    )


def _ours(number: str) -> list[Place]:
    return [("variants", level, number) for level in LEVELS]


def _hosts(
    *ways: str, rates: tuple[int, ...] = (1, 2), update_freqs: tuple[int, ...] = (1, 4, 8, 16)
) -> tuple[Place, ...]:
    return tuple(
        ("rates", f"{rate} Gbit/s", f"step, update-freq {update_freq}", "variants", way, "median_ratio")
        for rate in rates
        for update_freq in update_freqs
        for way in ways
    )


def _reproducible(model: str) -> Column:
    places = (
        (f"step of {model}, update-freq {update_freq}, 2 ranks", "variants", "reproducible", "median_ratio")
        for update_freq in (1, 4)
    )
    return figure("reproducible_2.json", *places)


def _level(what: str) -> Column:
    return figure("debug_step_2.json", ("step of train_lm, 2 ranks", "ratios", what))


_LOCAL, _BF16 = "local compute alone", "ours, off, reduce_dtype=bf16"
FIGURES: Mapping[str, Column] = MappingProxyType(
    {
        "transformer": figure("step_2.json", *_steps("transformer", 1, *_ours("median_ratio"))),
        "transformer, 4": figure("step_2.json", *_steps("transformer", 4, *_ours("median_ratio"))),
        "small, processor": figure("step_small_2.json", *_steps("small", 1, *_ours("cpu_ratio"))),
        "tiny, views": figure(
            "step_others_2.json", *_steps("tiny", 1, ("ratios", "ours, off / torch DDP, bucket views"))
        ),
        "hosts": figure("hosts.json", *_hosts(*LEVELS)),
        "hosts, views": figure("hosts.json", *_hosts("torch DDP, bucket views")),
        "hosts, local, 1": figure("hosts.json", *_hosts(_LOCAL, rates=(1,), update_freqs=(1,))),
        "hosts, local, 16": figure("hosts.json", *_hosts(_LOCAL, rates=(1,), update_freqs=(16,))),
        "hosts, bf16, 1": figure("hosts.json", *_hosts(_BF16, rates=(1,), update_freqs=(1,))),
        "hosts, bf16, 16": figure("hosts.json", *_hosts(_BF16, rates=(1,), update_freqs=(16,))),
        "header, 64": figure("agree_header_64.json", ("run", "64", "tree", "ratio_to_all_gather")),
        "detail": _level("detail"),
        "recorder": _level("record every step"),
        "operations": figure(
            "operations.json",
            *(
                (f"step of {model}, 1 ranks", "variants", "with operations", "median_ratio")
                for model in ("transformer encoder", "train_lm")
            ),
            form="{:.0f}",
        ),
        "reproducible, main job": _reproducible("main job"),
        "reproducible, transformer": _reproducible("transformer"),
        **{
            f"reproducible, {leaves}": figure(
                "reproducible_2.json",
                ("call, transformer, 2 ranks", "variants", f"reproducible, K = {leaves.split()[0]}", "median_ratio"),
            )
            for leaves in ("1 leaf", "4 leaves")
        },
        "digests": figure(
            "digest_2.json",
            *((f"step of {model}, 2 ranks", "longer") for model in ("train_lm", "1,000 small tensors", "transformer")),
            form="{:.4f}",
        ),
        **{
            f"torch DDP, {row}": Column("", ((row, "cell"),), "{}", is_text=True, file=FAULTS)
            for row in dict.fromkeys(scene.row for scene in SCENES)
        },
    }
)


def torch_ddp() -> Table:
    """Every situation that was run, with its outcome."""
    place = ("{row}", "situations", "{label}", "told")
    return Table(
        file=FAULTS,
        heading="situation",
        columns=[Column("outcome", (place,), "{}", is_text=True)],
        rows={f"{scene.row}: {scene.label}": {"row": scene.row, "label": scene.label} for scene in SCENES},
    )
