"""Exchange of call headers, and the error for the first mismatch, equal on all ranks.

Every rank reads the same rows and therefore finds the same error. Functions with the argument ``call`` are collective
after a mismatch: the ranks exchange details. No gradient changes here. So after an agreed error every ``.grad`` is as
before the call, and the next call may succeed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial, reduce
from itertools import zip_longest
from operator import and_, itemgetter, or_
from typing import Any

import torch

from legacy_ddp._errors import AgreedError, DesyncError, LayoutError, LegacyDDPError, PeerError, add_explanation
from legacy_ddp._log import script_lines
from legacy_ddp._memory.flat_buffer import ABSENT, DENSE
from legacy_ddp._memory.layout import MODULE
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Flag, Header, Headers, Operation, Participation, encode_header
from legacy_ddp._ranks.tree_reduce import format_splits, is_aligned
from legacy_ddp._steps.policy import closure_advice, closure_owner, local_work
from legacy_ddp._text import Finding, compare_groups, compare_rows, error_text, group_ranks, list_some, name_ranks, wrap

IGNORED = "it ignored (ignore=)"
_OTHER_CALLS = "Ranks met in different calls"
_OF_PARAMETERS = (Operation.ALL_REDUCE, Operation.CONSTRUCTION)  # their inventories have all parameters
LAYOUT_ADVICE = "make the module and the settings alike on every rank"
_MODULE_ADVICE = "wrap the same modules in the same order on every rank, and make their calls in the same order"


class Precedence(IntEnum):
    """The order of the errors about ranks in the same call with the same layout: only the first is raised.

    Facts come before numbers: a fact is evidence against a rank, while of numbers only a majority can name a rank.
    """

    REPEAT = 1
    STEPPED = 2
    STEPS = 3
    PARTICIPATION = 4
    SPLIT = 5
    UNEVEN = 6
    METRICS = 7
    ISSUED = 8
    OTHER = 9


Mismatch = Callable[[Sequence[Header]], AgreedError | None]


class Agreement:
    """Matching headers of all ranks.

    Headers are decoded only if their bytes differ where most calls have equal bytes, or if somebody reads them.
    """

    def __init__(self, headers: Headers, own: Header) -> None:
        self.headers = headers
        self.own = own  # the header of this rank
        self.has_same_mask = headers.is_equal("mask")  # all ranks have gradients of the same kinds in the same slots
        # All ranks do the same work, without a failure or a tree, and there is nothing else to compare.
        self.is_uniform = headers.is_alike and not own.leaves and not own.flags & Flag.FAILED
        self.some_flags = self.common_flags = own.flags  # the flags that any rank has, and that all ranks have
        self.participants: Sequence[int] = range(headers.size)  # the ranks whose gradients count
        self.skipped_ranks: tuple[int, ...] = ()  # all other ranks
        self.sample_size: int | None = None  # the sum of all sample sizes, None for a plain mean
        self.divisor = headers.size  # of the sum over the ranks; 0 without any participant
        if not headers.is_alike or own.participation != Participation.PLAIN:
            self._count()

    def _count(self) -> None:
        flags = self.headers.flags
        self.some_flags, self.common_flags = reduce(or_, flags), reduce(and_, flags)
        self.participants = tuple(rank for rank, row in enumerate(self.rows) if row.takes_part)
        self.skipped_ranks = tuple(rank for rank, row in enumerate(self.rows) if not row.takes_part)
        sizes = [row.sample_size for row in self.rows if row.participation == Participation.SAMPLES]
        if sizes:
            self.sample_size = self.divisor = sum(sizes)
        else:
            counted = len(self.ranks_with(Flag.COUNTED))
            self.divisor = len(self.participants) + counted if self.participants else 0

    def leave_out_all(self) -> None:
        """Reduce nothing: the gradients of no rank count."""
        self.participants, self.skipped_ranks, self.divisor = (), tuple(range(self.headers.size)), 0

    @property
    def rows(self) -> Sequence[Header]:
        return self.headers.rows

    def ranks_with(self, flag: int) -> list[int]:
        return [rank for rank, flags in enumerate(self.headers.flags) if flags & flag]

    def column(self, name: str) -> list[int]:
        return self.headers.column(name)


def agree(
    call: Call,
    header: Header,
    inventory: Mapping[str, str],
    *,
    mismatches: Sequence[tuple[Precedence, Mismatch]] = (),
    metrics: Sequence[str] = (),
    layout_advice: str = LAYOUT_ADVICE,
    on_device: bool = False,
) -> Agreement:
    """Exchange headers, and return them if they match.

    Writes the wrapper, operation and number of ``call`` to ``header``, whose ``layout`` is the fingerprint of
    ``inventory``. ``mismatches``: of the checks, in any order. ``metrics``: the names behind ``header.metric_names``.
    ``layout_advice``: the next step in the text of a LayoutError. ``on_device``: the payload may use the user's group.

    Raises:
        PeerError: a rank failed before the exchange.
        DesyncError: a different wrapper, operation or call; sample_size on some ranks only; a skipped or extra call; a
            split of micro-batches unsuitable for a tree; different names of metrics; a mismatch that a check finds.
        LayoutError: a different inventory.
    """
    header.wrapper_id, header.operation, header.call = call.wrapper_id, call.operation, call.number
    if on_device and (issued := call.groups.issued()) is not None:
        header.issued = issued
        header.flags |= Flag.ISSUED_KNOWN
    with call.phase("agree"):
        agreement = Agreement(Headers(*call.exchange_headers(*encode_header(header))), header)
        if not agreement.is_uniform:
            rows, of_metrics = agreement.rows, partial(_find_other_metrics, call, metrics)
            problem = (
                _find_failure(call, rows, "")
                or _find_other_call(call, rows)
                or _find_other_layout(call, rows, inventory, layout_advice)
                or _find_other_meaning(rows, [*mismatches, (Precedence.METRICS, of_metrics)])
            )
            try:
                if problem is not None:
                    raise _in_context(call, rows, problem)
            finally:
                del problem  # its traceback holds this frame, and the call and the wrapper would live on with it
        if call.operation in _OF_PARAMETERS:
            call.group_state.agreed = call.operation, call.number, inventory
        if not call.groups.endpoints_exchanged:
            call.exchange_endpoints()
    return agreement


@contextmanager
def announcing_failures(call: Call) -> Iterator[None]:
    """Run local work. A failure reaches the waiting ranks in a header before the exception leaves.

    Raises:
        PeerError: some ranks failed, or all with different errors; the same text on every rank.
        Exception: the local exception, unchanged, if every rank failed with the same text: then no rank waits.
    """
    try:
        if not call.groups.endpoints_exchanged:
            call.prepare_watchdog()
        yield
    except Exception as error:
        announce_failure(call, error)
        raise


def announce_failure(call: Call, error: Exception) -> None:
    """Collective: tell the other ranks in a header that ``error`` ended the local work of this rank.

    Returns if every rank failed with the same text: then no rank waits. Otherwise raises a PeerError, as
    :func:`announcing_failures`.
    """
    add_explanation(error)
    if isinstance(error, LegacyDDPError) and error.call is None:
        error.call, error.phase = call.number, call.phase_name
    header = Header(wrapper_id=call.wrapper_id, operation=call.operation, call=call.number, flags=Flag.FAILED)
    with call.phase("agree"):
        headers = Headers(*call.exchange_headers(*encode_header(header)))
        problem = _find_failure(call, headers.rows, error_text(error))
    try:
        if problem is not None:
            raise problem from error
    finally:
        del problem  # its traceback holds this frame
    call.mark_finished()


def agree_on_kinds(call: Call, kinds: Sequence[int]) -> list[int]:
    """Collective: the kind of each reduced gradient: absent if absent on all ranks, dense if the kinds differ.

    Needed only if the headers show different kinds. A rank sends 2 bytes a slot. ``kinds``: of this rank.
    """
    own = torch.tensor(kinds, dtype=torch.uint8, device="cpu")
    # One maximum gives both ends: the largest kind, and 255 minus the smallest kind that is not absent.
    lowest = torch.where(own == ABSENT, 0, 255 - own)
    with call.phase("agree"):
        ends = call.maximum(torch.stack([own, lowest.to(torch.uint8)]))
    largest, smallest = ends[0], 255 - ends[1]
    return [int(kind) for kind in torch.where((largest == ABSENT) | (largest == smallest), largest, DENSE)]


def ranks_where(call: Call, is_true: bool) -> tuple[int, ...]:
    """Collective: the ranks that pass True."""
    values = call.gather(torch.tensor([int(is_true)], device="cpu")).flatten()
    return tuple(values.nonzero().flatten().tolist())


def _in_context(call: Call, rows: Sequence[Header], problem: AgreedError) -> AgreedError:
    """Collective: ``problem`` with the name of the wrapper, if a rank has several, and the context of a DesyncError."""
    # A rank that failed before the exchange, or has another version of the library, does not take part here.
    if isinstance(problem, PeerError) or len({row.version for row in rows}) > 1:
        return problem
    wrappers, notes = gather_context(call)
    text = str(problem)
    head, colon, rest = text.partition(":")
    if wrappers and len({row.wrapper_id for row in rows}) == 1 and head in (rows[0].call_name, _OTHER_CALLS):
        text = f"{head} of {wrappers[0]}{colon}{rest}"
    if isinstance(problem, DesyncError):
        text = "\n".join([text, *(line for note in notes for line in wrap(note, "  "))])
    problem.args = (text,)
    return problem


def gather_context(call: Call) -> tuple[list[str], list[str]]:
    """Collective: the names of the wrappers of the call, from ranks with several wrappers, and notes about its context:
    differences between ranks in their ``no_sync()`` blocks, and the closure of an optimizer step."""
    context = {"wrapper": call.wrapper_name, "work": local_work(), "closure": closure_owner()}
    of_ranks = call.gather_objects(context)
    work = compare_rows([of_rank["work"] for of_rank in of_ranks])
    closures = [(owner, ranks) for owner, ranks in group_ranks([of_rank["closure"] for of_rank in of_ranks]) if owner]
    notes = [*map(str, work.differences), *(closure_advice(name_ranks(ranks), owner) for owner, ranks in closures)]
    return [of_rank["wrapper"] for of_rank in of_ranks if of_rank["wrapper"]], notes


def _find_failure(call: Call, rows: Sequence[Header], own_text: str) -> AgreedError | None:
    """The error for failed ranks; None also if all ranks failed with the same text. Collective if a rank failed.

    ``own_text``: the text of the error of this rank, empty without one.
    """
    failed = [rank for rank, row in enumerate(rows) if row.flags & Flag.FAILED]
    if not failed:
        return None
    texts = call.gather_objects(own_text)
    if len(failed) == len(rows) and len(set(texts)) == 1:
        return None
    who, listed = name_ranks(failed), "; ".join(f"rank {rank}: {texts[rank]}" for rank in failed)
    text = f"{who} failed before the exchange, so nothing was exchanged and no gradient changed. {listed}"
    return agreed_error(PeerError, rows, text, failed)


def _find_other_call(call: Call, rows: Sequence[Header]) -> AgreedError | None:
    """Collective after a difference: the ranks exchange their modules and lines."""
    if len({(row.version, row.wrapper_id, row.operation, row.call, row.source) for row in rows}) == 1:
        return None
    details = call.gather_objects({"module": call.module_class, "lines": script_lines()})
    wrappers = _name_wrappers(rows, [of_rank["module"] for of_rank in details])
    calls = [
        {"header version": str(row.version), "wrapper": wrapper, "call": row.call_name, "src": str(row.source)}
        for row, wrapper in zip(rows, wrappers, strict=True)
    ]
    findings = (compare_rows(calls), _find_other_line([of_rank["lines"] for of_rank in details]))
    text = "\n".join(str(finding) for finding in findings if finding)
    text = f"{_OTHER_CALLS[0].lower()}{_OTHER_CALLS[1:]}:\n{text}\nlet every rank make the same calls in the same order"
    # Only the calls name ranks: a rank may make the same call from another line.
    return agreed_error(DesyncError, rows, text, compare_rows(calls).ranks)


def _find_other_line(stacks: Sequence[Sequence[str]]) -> Finding:
    """The innermost lines that differ: ranks may make their calls in one function that different lines have called."""
    depths = zip_longest(*stacks, fillvalue="no line of a script")
    different = next((lines for lines in depths if len({*lines}) > 1), ())
    return compare_rows([{"line": line} for line in different])


def _name_wrappers(rows: Sequence[Header], classes: Sequence[str]) -> list[str]:
    """The wrapper of each rank: the class of its module if that is enough to tell the wrappers apart."""
    distinct = {(row.wrapper_id, name) for row, name in zip(rows, classes, strict=True)}
    holders = Counter(name for _, name in distinct)
    return [
        name if name and holders[name] == 1 else f"wrapper {row.wrapper_id}{name and f' ({name})'}"
        for row, name in zip(rows, classes, strict=True)
    ]


def _find_other_layout(
    call: Call, rows: Sequence[Header], inventory: Mapping[str, str], advice: str
) -> AgreedError | None:
    if len({row.layout for row in rows}) == 1:
        return None
    since, changes = _changes_of_own(call, inventory)
    own = {"inventory": dict(inventory), "ignored": sorted(call.ignored), "since": since, "changes": changes}
    details = call.gather_distinct(own)
    finding = compare_groups(_with_ignored(details))
    names = [item.name for item in finding.differences]
    advice = _MODULE_ADVICE if MODULE in names else advice
    lines = [str(finding), *_describe_changes(details), advice]
    text = "\n".join(["ranks hold different parameters, buffers or settings:", *lines])
    error = agreed_error(LayoutError, rows, text, finding.ranks)
    if len(names) == 1 and names[0].startswith("parameter "):
        error.parameter = names[0].removeprefix("parameter ").strip("'")
    return error


def _changes_of_own(call: Call, inventory: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The last call in which all ranks had the same parameters, and what this rank has added or removed since."""
    if call.group_state.agreed is None:
        return "", {}
    operation, number, before = call.group_state.agreed
    kinds = {name.partition(" ")[0] for name in inventory} & {name.partition(" ")[0] for name in before}
    changes = {name: "added" for name in inventory if name not in before}
    changes |= {name: "removed" for name in before if name not in inventory}
    since = "construction" if operation == Operation.CONSTRUCTION else f"{operation} call {number}"
    return since, {name: change for name, change in changes.items() if name.partition(" ")[0] in kinds}


def _describe_changes(details: Sequence[tuple[Mapping[str, Any], tuple[int, ...]]]) -> list[str]:
    """Lines about what only some ranks have added or removed since all ranks held the same."""
    lines = []
    for held, ranks in details:
        others = [other["inventory"] for other, _ in details if other is not held]
        one, many = name_ranks(ranks), len(ranks) > 1
        for change, has in (("added", "have" if many else "has"), ("removed", "lack" if many else "lacks")):
            names = [name for name, how in held["changes"].items() if how == change]
            names = [name for name in names if any((name in other) is (change == "removed") for other in others)]
            if names:
                shown = list_some(names)
                lines += wrap(f"only {one} {has} {shown}, {change} after {held['since']}", "  ")
    return lines


def _with_ignored(
    details: Sequence[tuple[Mapping[str, Any], tuple[int, ...]]],
) -> list[tuple[dict[str, str], tuple[int, ...]]]:
    """The inventories with their ranks. Each has also the names that its ranks ignore and other ranks compare.

    A name that no other rank compares is no difference: a rank may ignore a tensor because no other rank has it.
    """
    compared = {name for held, _ in details for name in held["inventory"]}
    rows = []
    for held, ranks in details:
        names = [f"{kind} {name!r}" for kind in ("parameter", "buffer") for name in held["ignored"]]
        rows.append(({**{name: IGNORED for name in names if name in compared}, **held["inventory"]}, ranks))
    return rows


def _find_other_meaning(
    rows: Sequence[Header], mismatches: Sequence[tuple[Precedence, Mismatch]]
) -> AgreedError | None:
    """The first error about ranks in the same call with the same layout, in the order of their precedence."""
    finders = sorted([*_ALWAYS_FOUND, *mismatches], key=itemgetter(0))
    return next((problem for _, find in finders if (problem := find(rows)) is not None), None)


def _find_repeat(rows: Sequence[Header]) -> AgreedError | None:
    ranks = _ranks_alone_with(Flag.REPEAT, rows)
    reading = "no backward since the last call, gradients unchanged: an extra call"
    return _slipped(rows, ranks, reading) if ranks else None


def _find_skipped_call(rows: Sequence[Header]) -> AgreedError | None:
    # Weights change for other reasons, too. Only with unequal numbers of backward passes the change proves a step that
    # the other ranks did not make.
    ranks = _ranks_alone_with(Flag.STEPPED, rows)
    if not ranks or not _compare_backwards(rows):
        return None
    return _slipped(rows, ranks, "weights changed between its first backward and now: a skipped call")


def compare_work(rows: Sequence[Header]) -> Finding:
    """The numbers of micro-batches of the participants. With ``reproducible=True`` every block is a micro-batch, also
    an empty block."""
    return _compare_counts(rows, [row.leaves or row.micro_batches for row in rows])


def _compare_backwards(rows: Sequence[Header]) -> Finding:
    return _compare_counts(rows, [row.micro_batches for row in rows])


def _compare_counts(rows: Sequence[Header], micro_batches: Sequence[int]) -> Finding:
    ranks = _participants(rows)
    return compare_rows([{"micro-batches since the last call": str(micro_batches[rank])} for rank in ranks], ranks)


def _find_mixed_participation(rows: Sequence[Header]) -> AgreedError | None:
    arguments = {Participation.PLAIN: "sample_size=None", Participation.SAMPLES: "an int sample_size"}
    ranks = [rank for rank, row in enumerate(rows) if row.participation != Participation.SKIP]
    finding = compare_rows([{"argument": arguments[Participation(rows[rank].participation)]} for rank in ranks], ranks)
    advice = "pass sample_size= on every rank or on none"
    return desync_error(rows, "plain and weighted calls met", finding, advice)


def _find_bad_split(rows: Sequence[Header]) -> AgreedError | None:
    ranks = _participants(rows)  # a rank without gradients counts as zeros
    most = max((rows[rank].leaves for rank in ranks), default=0)
    if not most:
        return None
    finding = compare_rows([{"micro-batches": str(rows[rank].leaves)} for rank in ranks], ranks)
    if not finding and is_aligned(len(rows), most):
        return None
    found = str(finding) if finding else f"  {most} on each of {len(rows)} ranks, which is no power of two"
    splits = format_splits(len(rows) * most)
    text = f"micro-batches are not split over the ranks as reproducible=True needs it:\n{found}\n{splits}"
    return agreed_error(DesyncError, rows, text, finding.ranks)


def _find_other_metrics(call: Call, names: Sequence[str], rows: Sequence[Header]) -> AgreedError | None:
    """Collective after a difference."""
    ranks = [rank for rank, row in enumerate(rows) if not row.flags & Flag.JOINED]  # other ranks count as zeros
    if len({rows[rank].metric_names for rank in ranks}) <= 1:
        return None
    held = call.gather_objects(list(names))
    finding = compare_rows([{f"metric {name!r}": "a value" for name in held[rank]} for rank in ranks], ranks)
    advice = "pass metrics= with equal names on every rank, with 0.0 on a rank without data"
    return desync_error(rows, "ranks bring different metrics", finding, advice)


def _find_other_collectives(rows: Sequence[Header]) -> AgreedError | None:
    # The collectives of a group pair in the order in which they are issued. If the numbers differ, the payload of one
    # rank would pair with other data of another rank. On the CPU the payload has a private group: nothing to compare.
    if not all(row.flags & Flag.ISSUED_KNOWN for row in rows):
        return None
    finding = compare_rows([{"collectives since the last call": str(row.issued)} for row in rows])
    advice = (
        "the tensors of one rank would pair with the data of another collective; issue collectives in the same order\n"
        "around this call on every rank, also those with async_op=True, or pass a group of its own as process_group="
    )
    return desync_error(rows, "ranks have issued different numbers of collectives on process_group", finding, advice)


_ALWAYS_FOUND: Sequence[tuple[Precedence, Mismatch]] = (
    (Precedence.REPEAT, _find_repeat),
    (Precedence.STEPPED, _find_skipped_call),
    (Precedence.PARTICIPATION, _find_mixed_participation),
    (Precedence.SPLIT, _find_bad_split),
    (Precedence.ISSUED, _find_other_collectives),
)


def _participants(rows: Sequence[Header]) -> list[int]:
    return [rank for rank, row in enumerate(rows) if row.takes_part]


def _ranks_alone_with(flag: int, rows: Sequence[Header]) -> list[int]:
    """The participants with ``flag``; empty if all of them have it: then the training loop is made like this."""
    participants = _participants(rows)
    ranks = [rank for rank in participants if rows[rank].flags & flag]
    return ranks if len(ranks) < len(participants) else []


def _slipped(rows: Sequence[Header], ranks: Sequence[int], reading: str) -> AgreedError:
    advice = "call all_reduce() once per step on every rank"
    lines = [f"{name_ranks(ranks)}: {reading}", str(_compare_backwards(rows)), advice]
    return agreed_error(DesyncError, rows, "\n".join(filter(None, lines)), ranks)


def desync_error(rows: Sequence[Header], headline: str, finding: Finding, advice: str = "") -> AgreedError | None:
    """The error for the differences in ``finding``, with the next step; None without a difference."""
    if not finding:
        return None
    text = "\n".join(filter(None, [f"{headline}:", str(finding), advice]))
    return agreed_error(DesyncError, rows, text, finding.ranks)


def agreed_error(kind: type[AgreedError], rows: Sequence[Header], text: str, ranks: Sequence[int]) -> AgreedError:
    """An error that is equal on all ranks. Names no call if the ranks are in different calls."""
    names = {row.call_name for row in rows}
    shared = len(names) == 1
    text = f"{names.pop()}: {text}" if shared else text[0].upper() + text[1:]
    return kind(text, ranks=ranks, call=rows[0].call if shared else None, phase="agree")
