"""The table of mutants: faults that a change could make, and the tests that find each.

A snippet stands once in the package, in any file: the table does not depend on the places of files.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """``before`` becomes ``after``. ``killers``: arguments of pytest, split at spaces."""

    name: str
    before: str
    after: str
    killers: str


_PRECEDENCE = "tests/ranks/test_precedence.py"
_CONTEXT = "tests/ranks/test_context.py"
_EXCHANGES = "tests/call/test_exchanges.py"
_HEADER = "tests/ranks/test_header_faults.py"
_LOST = "tests/watchdog/test_lost_ranks.py"
_LATE = "tests/call/test_late_nonfinite.py -k later_by_all"
_LATE_RANK = "tests/call/test_late_rank.py"
_LATE_DIGESTS = "tests/replicas/test_late_digests.py -k later_by_all"
_ABSENT = "tests/call/test_absent_gradients.py"
_PAYLOADS = "tests/watchdog/test_payloads.py"
_INTERRUPTS = "tests/test_interrupts.py"
_KILLED = f"{_LOST}::test_the_last_of_two_names_the_other"

AGREEMENT = (
    Mutant(
        "classes of modules are not compared",
        "{**(module or {}), **build_inventory(parameters",
        "{**build_inventory(parameters",
        "tests/ranks/test_wrap_order.py -k another_order",
    ),
    Mutant(
        "names of metrics before the meaning of the call",
        "    METRICS = 7",
        "    METRICS = 0",
        _PRECEDENCE,
    ),
    Mutant(
        "layouts after the meaning of the call",
        "or _find_other_layout(call,",
        "or _find_other_meaning(rows, mismatches) or _find_other_layout(call,",
        _PRECEDENCE,
    ),
    Mutant(
        "every distinct value is sent by rank 0",
        "sources = {ranks[0]: size for",
        "sources = {0: size for",
        "tests/ranks/test_many_ranks.py -k in_order",
    ),
    Mutant(
        "a row of several ranks counts for the first of them",
        "holders.setdefault(value, []).extend(ranks)",
        "holders.setdefault(value, []).extend(ranks[:1])",
        "tests/ranks/test_agreement.py -k construction_names",
    ),
    Mutant(
        "different errors on all ranks are local errors",
        "if len(failed) == len(rows) and len(set(texts)) == 1:",
        "if len(failed) == len(rows):",
        f"{_HEADER} -k different_mistakes",
    ),
    Mutant(
        "wrappers are not compared",
        "row.wrapper_id, row.operation, row.call, row.source",
        "row.operation, row.call, row.source",
        f"{_HEADER} -k another_wrapper",
    ),
    Mutant(
        "operations are not compared",
        "row.wrapper_id, row.operation, row.call, row.source",
        "row.wrapper_id, row.call, row.source",
        _PRECEDENCE,
    ),
    Mutant(
        "a fact of all ranks is an error",
        "return ranks if len(ranks) < len(participants) else []",
        "return ranks",
        f"{_HEADER} -k repeated_call_of_all",
    ),
    Mutant(
        "a change of weights alone is a skipped call",
        "if not ranks or not _compare_backwards(rows):",
        "if not ranks:",
        f"{_HEADER} -k writes_its_weights",
    ),
    Mutant(
        "a rank that left join() has a number of steps",
        "if not row.flags & Flag.JOINED]  # other ranks make no more steps",
        "if row is not None]",
        "tests/call/test_join.py -k host",
    ),
    Mutant(
        "unknown numbers of steps are compared",
        "if not all(rows[rank].flags & Flag.STEPS_KNOWN for",
        "if not any(rows[rank].flags & Flag.STEPS_KNOWN for",
        "tests/steps/test_step_counter.py tests/call/test_edited.py -k nothing_is or without_the_check",
    ),
    Mutant(
        "numbers of steps are not part of equal work",
        '_ALIKE = _STARTS["sample_size"]',
        '_ALIKE = _STARTS["steps"]',
        _PRECEDENCE,
    ),
    Mutant(
        "a split that no tree has is accepted",
        "if not finding and is_aligned(len(rows), most):",
        "if not finding:",
        "tests/reproducible/test_reproducible_faults.py -k refused",
    ),
    Mutant(
        "micro-batches of ranks that skip count",
        '    ranks = _participants(rows)\n    return compare_rows([{"micro-batches since',
        '    ranks = list(range(len(rows)))\n    return compare_rows([{"micro-batches since',
        "tests/ranks/test_agreement.py -k skips",
    ),
    Mutant(
        "two sets of metrics are equal",
        "if len({rows[rank].metric_names for rank in ranks}) <= 1:",
        "if len({rows[rank].metric_names for rank in ranks}) <= 2:",
        _PRECEDENCE,
    ),
    Mutant(
        "a plain mean counts ranks that skip",
        "self.divisor = len(self.participants) + counted if",
        "self.divisor = len(self.headers) if",
        "tests/call/test_all_reduce.py -k take_part_count",
    ),
    Mutant(
        "sample sizes are not added",
        "self.divisor = sum(sizes)",
        "self.divisor = max(sizes)",
        "tests/call/test_all_reduce.py -k take_part_count",
    ),
    Mutant(
        "sample_size=0 takes part",
        "self.participation == Participation.SAMPLES and self.sample_size > 0",
        "self.participation == Participation.SAMPLES and self.sample_size >= 0",
        "tests/call/test_all_reduce.py -k no_part or that_take_part",
    ),
    Mutant(
        "absent gradients decide the kind",
        "lowest = torch.where(own == ABSENT, 0, 255 - own)",
        "lowest = 255 - own",
        "tests/call/test_sparse.py -k host",
    ),
    Mutant(
        "ranks that failed alike still wait",
        "self._peers_waiting, self._failed_alike = False, True",
        "self._peers_waiting, self._failed_alike = True, True",
        f"{_HEADER} -k the_same_mistake_on_every_rank",
    ),
)

COLLECTIVES = (
    Mutant(
        "zeros of backward count as cleared gradients",
        "(own.was_written(parameter.grad) and own.is_alone(hooks))",
        "own.is_alone(hooks)",
        "tests/call/test_untrained.py -k with_an_effect",
    ),
    Mutant(
        "gradients cleared in place are not noticed",
        "kinds[own.index] == ABSENT or (own.was_written(parameter.grad) and",
        "kinds[own.index] == ABSENT or (False and",
        "tests/call/test_untrained.py -k without_effect",
    ),
    Mutant(
        "a write through .data is no write",
        "and not self._has_other_values(parameters, unwritten)",
        "",
        "tests/call/test_untrained.py -k with_an_effect",
    ),
    Mutant(
        "a parameter that took the place of another is not noticed",
        "if first.get(slot.name) is not internals.identity(parameter)",
        "if slot.name not in first",
        "tests/call/test_untrained.py -k without_effect",
    ),
    Mutant(
        "old gradients of an optimizer are new ones",
        "self.idle += before is not None and before[0] is mark[0] and before[1] == mark[1]",
        "",
        "tests/call/test_untrained.py -k without_effect",
    ),
    Mutant(
        "what changes in a no_sync() block is a forgotten call",
        "            else:\n                self._seen = self._read()",
        "            else:\n                pass",
        "tests/call/test_forgotten_call.py",
    ),
    Mutant(
        "values of weights are not compared after a forgotten call",
        "version != now or not torch.equal(values, present)",
        "version != now",
        "tests/call/test_forgotten_call.py",
    ),
    Mutant(
        "one written parameter is a forgotten call",
        "2 * sum(changed) <= len(changed)",
        "not any(changed)",
        "tests/call/test_forgotten_call.py",
    ),
    Mutant(
        "the call of another counter is no call",
        "all(hook.counts[hook.index] and not hook.is_consumed",
        "any(hook.counts[hook.index] and not hook.is_consumed",
        "tests/call/test_forgotten_call.py",
    ),
    Mutant(
        "frozen parameters of one rank are shared",
        "for item in parameters for test, is_marked",
        "for item in parameters if item.tensor.requires_grad for test, is_marked",
        "tests/test_ancestor_interface.py -k overwritten",
    ),
    Mutant(
        "a mark of one rank needs a true value",
        'lambda parameter: hasattr(parameter, "expert")',
        'lambda parameter: bool(getattr(parameter, "expert", False))',
        "tests/test_ancestor_interface.py -k overwritten",
    ),
    Mutant(
        "arguments of the newer class are not taken in their places",
        "if not isinstance(world_size, Group):",
        "if True:",
        "tests/test_ancestor_interface.py -k places",
    ),
    Mutant(
        "results do not reach the memory of the script",
        "not self.as_views or index in self._held",
        "not self.as_views",
        "tests/memory/test_script_memory.py -k in_every_step",
    ),
    Mutant(
        "results overlap in memory",
        "if self._of_parameters.overlaps(start, stop) or self._of_results.overlaps(start, stop):",
        "if False:",
        "tests/memory/test_script_memory.py -k overlaps",
    ),
    Mutant(
        "segments that other ranks write to are kept after a failure",
        "if any(call.segments.serials) or call.phase_name in",
        "if call.phase_name in",
        f"{_KILLED} tests/call/test_gradients_after_failures.py",
    ),
    Mutant(
        "an agreed error drops the gradients",
        "except AgreedError:",
        "except ():",
        _PRECEDENCE,
    ),
    Mutant(
        "non-finite values before replicas",
        "CHECKS: tuple[type[Check], ...] = (",
        "CHECKS: tuple[type[Check], ...] = (NonFiniteGradients,",
        _PRECEDENCE,
    ),
    Mutant(
        "edited gradients are not checked",
        "    EditedGradients,\n",
        "",
        _PRECEDENCE,
    ),
    Mutant(
        "only an error looks at non-finite values",
        'checks.nonfinite_policy != "ignore"',
        'checks.nonfinite_policy == "raise"',
        _EXCHANGES,
    ),
    Mutant(
        "collectives of the script are not compared",
        "if not all(row.flags & Flag.ISSUED_KNOWN for row in rows):",
        "if True:",
        "tests/test_devices.py -k another_order",
    ),
    Mutant(
        "a step with a NaN is not skipped",
        "agreement.leave_out_all()",
        "pass",
        "tests/call/test_nonfinite_skip.py",
    ),
    Mutant(
        "a streak of non-finite gradients never ends",
        "self._warned.discard(call.groups)",
        "pass",
        "tests/call/test_nonfinite.py -k warnings_are_logged or told_by_default",
    ),
    Mutant(
        "every non-finite gradient of a streak is described",
        "if call.groups in self._warned and not is_told_again:",
        "if False:",
        _EXCHANGES,
    ),
    Mutant(
        "late rows are judged before they are complete on all ranks",
        "newest = min((word >> _WINDOW for word in words), default=ring.agreed)",
        "newest = max((word >> _WINDOW for word in words), default=ring.agreed)",
        _LATE,
    ),
    Mutant(
        "a late row counts as complete at once",
        "return int(self.host[0]) == self.serial == int(self.host[-1])",
        "return True",
        _LATE,
    ),
    Mutant(
        "the late row of a failed call is kept",
        "while self.waiting and self.waiting[-1].number > self.agreed:",
        "while False:",
        _LATE,
    ),
    Mutant(
        "late digests are compared before all ranks have them",
        "newest = self.agreed - max(word & _OLDEST for word in words)",
        "newest = self.agreed - min(word & _OLDEST for word in words)",
        _LATE_DIGESTS,
    ),
    Mutant(
        "a late digest from before a broadcast is compared",
        "if reading is not None and reading.generation == generation else 0",
        "if reading is not None else 0",
        _LATE_DIGESTS,
    ),
    Mutant(
        "the last words of a late digest are not mixed",
        "advance(state, [words, zero, zero])",
        "advance(state, [words])",
        "tests/replicas/test_digest.py -k joined_bytes",
    ),
    Mutant(
        "a large finite gradient counts as infinite on a device",
        'internals.foreach_norm(list(grads.values()), float("inf"))',
        "internals.foreach_norm(list(grads.values()), 2)",
        _LATE,
    ),
    Mutant(
        "the host waits for the copy of a late row",
        "host.copy_(answer, non_blocking=True)",
        "host.copy_(answer)",
        _LATE,
    ),
    Mutant(
        "metrics on a device are read on their own",
        "        later = reader or devices.Reader()\n",
        "        later, reader = devices.Reader(), None\n",
        "tests/test_host_waits.py -k one_wait_in_all",
    ),
    Mutant(
        "a step on a device counts whatever its gradients are",
        "                    if _is_of_training(parameter):\n",
        "                    if True:\n",
        "tests/test_simulated_device.py -k step_of_one_rank",
    ),
    Mutant(
        "a scale of 1 may overflow",
        "scale is not None and 1 < scale < math.inf",
        "scale is not None and 1 <= scale < math.inf",
        "tests/call/test_nonfinite_skip.py -k scaler_did_not_make",
    ),
    Mutant(
        "sums of metrics are rounded term by term",
        "return math.fsum(values)",
        "return sum(values)",
        "tests/call/test_metrics.py -k sums",
    ),
    Mutant(
        "the names of metrics are always those of rank 0, also after its join()",
        "names = next(filter(None, call.gather_objects(names)))",
        "names = call.gather_objects(names)[0]",
        "tests/call/test_metrics.py -k has_left_join",
    ),
    Mutant(
        "the part of a rank is misplaced behind the first run",
        "place = start + (stop - start) * index // size",
        "place = start + stop * index // size",
        "tests/call/test_between_hosts.py -k without_a_gradient",
    ),
    Mutant(
        "no barrier between zeros and the sum",
        "            call.barrier()\n",
        "",
        _EXCHANGES,
    ),
    Mutant(
        "any divisor is a product with its reciprocal",
        "if mantissa == 0.5:",
        "if mantissa >= 0.5:",
        "tests/call/test_host_sum.py -k divided_by_any",
    ),
    Mutant(
        "the narrower dtype holds the sum",
        "if torch.finfo(total.dtype).max > torch.finfo(own.dtype).max:",
        "if torch.finfo(total.dtype).max < torch.finfo(own.dtype).max:",
        "tests/call/test_host_sum.py tests/call/test_dtypes.py -k overflow or range or documented",
    ),
    Mutant(
        "fp16 is divided twice",
        "return before, divisor / before",
        "return before, float(divisor)",
        "tests/call/test_dtypes.py -k fp16",
    ),
    Mutant(
        "missing gradients are not zero",
        "buffer.zero(own_kinds, runs=runs, flat=flat)",
        "pass",
        "tests/call/test_between_hosts.py tests/call/test_sparse.py -k without_a_gradient or differ",
    ),
    Mutant(
        "between hosts nothing is divided",
        "divide(chunk, carried, after)",
        "divide(chunk, carried, 1.0)",
        "tests/call/test_between_hosts.py -k without_a_gradient",
    ),
    Mutant(
        "one rank without evidence hides edited gradients",
        "flags = agreement.some_flags | ALWAYS\n    for check in checks.with_compare_on_cpu",
        "flags = agreement.common_flags | ALWAYS\n    for check in checks.with_compare_on_cpu",
        _PRECEDENCE,
    ),
    Mutant(
        "rank 0 is the source of every broadcast",
        "options.rootTensor = source, 0",
        "options.rootTensor = 0, 0",
        "tests/call/test_broadcast.py -k every_dtype",
    ),
    Mutant(
        "a repeated call divides again",
        "is_repeat=bool(header.flags & Flag.REPEAT)",
        "is_repeat=False",
        f"{_HEADER} -k the_same_mistake_on_every_rank",
    ),
    Mutant(
        "steps are not counted from the end of a call",
        "counter.begin(step.call.groups)",
        "pass",
        _PRECEDENCE,
    ),
    Mutant(
        "micro-batches are not counted from the end of a call",
        "step.counter.reset(step.plan.parameters)",
        "pass",
        _PRECEDENCE,
    ),
    Mutant(
        "the gradient of the first parameter ends every backward",
        "            if thread:\n                self.policy.clock",
        "            if thread and not index:\n                self.policy.clock",
        f"{_LATE_RANK} -k names_the_late_rank",
    ),
    Mutant(
        "a backward counts as data",
        "self.backward += self.accumulated - mark",
        "self.data += self.accumulated - mark",
        f"{_LATE_RANK} -k names_the_late_rank",
    ),
    Mutant(
        "the time of a call counts for the next step",
        "    synchronizer.policy.clock.mark = perf_counter()  # the time of a call counts for no step\n",
        "",
        f"{_LATE_RANK} -k names_the_late_rank",
    ),
    Mutant(
        "a late rank is named without half of the calls",
        "if 2 * calls < len(steps) or not",
        "if not",
        "tests/test_statistics.py -k in_turns",
    ),
    Mutant(
        "a scaler that was passed does not count as the process ends",
        "(ring.is_told or ring.has_scaler or",
        "(ring.is_told or",
        "tests/call/test_late_nonfinite.py -k process_ends",
    ),
    Mutant(
        "a rounded sample_size is taken",
        "if abs(number) >= (limit :=",
        "if number < 0 * (limit :=",
        "tests/call/test_all_reduce.py -k counts_nothing",
    ),
    Mutant(
        "zeros for absent gradients are what the slot held before",
        "views.made.tensors[index].zero_()  #",
        "views.made.tensors[index]  #",
        f"{_ABSENT} -k ancestor",
    ),
    Mutant(
        "zeros for absent gradients, also where no rank takes part",
        'absent_gradients == "zeros" and reduced.divisor:',
        'absent_gradients == "zeros":',
        f"{_ABSENT} -k only_what",
    ),
    Mutant(
        "zeros for gradients that were sparse",
        "kind == ABSENT and slot.name not in sparse",
        "kind == ABSENT",
        f"{_ABSENT} -k ever_sparse",
    ),
    Mutant(
        "a backward that adds to zeros adds to a result",
        " or result.is_zeros:\n",
        ":\n",
        f"{_ABSENT} -k only_what",
    ),
    Mutant(
        "zeros for absent gradients look as cleared results",
        "if not (count or result.is_zeros) and",
        "if not count and",
        f"{_ABSENT} -k only_what",
    ),
)

TRANSPORT = (
    Mutant(
        "a message of another size is a row",
        "if not _is_begun(piece, kind, size) or len(piece) != _HEAD.size + size:",
        "if piece[:1] != kind:",
        "tests/ranks/test_star.py -k another_length",
    ),
    Mutant(
        "the sender of a notice is the lost rank",
        "if kind not in _NOTICES:",
        "if kind != _LATE:",
        "tests/ranks/test_star.py -k connection_closed",
    ),
    Mutant(
        "the hub keeps the end of patience to itself",
        "self._tell(kind, about, rank)",
        "pass",
        "tests/ranks/test_star.py -k gives_up",
    ),
    Mutant(
        "a rank leaves for a lost one without a notice",
        "self.star.give_up(is_late=isinstance(error, SyncTimeoutError))",
        "pass",
        "tests/ranks/test_tree_faults.py -k error_of_gloo",
    ),
    Mutant(
        "a hub asks for no room for the ranks below it",
        "self._check_room(count + below)",
        "self._check_room(0)",
        "tests/ranks/test_lost_groups.py -k hub_without_room",
    ),
    Mutant(
        "a rank tells nobody of a loss as the tree connects",
        "self.tell(self.error_of(error))",
        "pass",
        "tests/ranks/test_tree_faults.py -k as_the_tree_connects",
    ),
    Mutant(
        "a late rank is a lost rank",
        'within {self.timeout.total_seconds():g} s", is_late=True)',
        'within {self.timeout.total_seconds():g} s", is_late=False)',
        f"{_LOST} -k a_stopped_rank_is_named_at_the_timeout",
    ),
    Mutant(
        "a call has the number of the call before",
        "self.number = self.group_state.calls[self.operation] + 1",
        "self.number = self.group_state.calls[self.operation]",
        _PRECEDENCE,
    ),
    Mutant(
        "an agreed error makes the group unusable",
        "if error is not None and self._peers_waiting and not isinstance(error, AgreedError):",
        "if error is not None and self._peers_waiting:",
        _EXCHANGES,
    ),
    Mutant(
        "a problem of a lower rank comes before a problem of more weight",
        "for texts in zip(*rows, strict=True) for rank, text in enumerate(texts) if text",
        "for rank, texts in enumerate(rows) for text in texts if text",
        "tests/ranks/test_refused_calls.py tests/ranks/test_choice.py",
    ),
    Mutant(
        "no rank has a spare segment",
        "return [SegmentIds(tuple(serials), has_spare)",
        "return [SegmentIds(tuple(serials), False)",
        "tests/ranks/test_star.py -k segments_arrive",
    ),
    Mutant(
        "old segments stay mapped",
        "(2 * used if current.has_spare else used)",
        "4 * used",
        "tests/call/test_host_sum.py -k pile_up",
    ),
    Mutant(
        "the ranks that arrived are missing",
        'if not self._store.check([f"begun/{other}"])',
        'if self._store.check([f"begun/{other}"])',
        "tests/ranks/test_lost_groups.py -k never_constructs",
    ),
    Mutant(
        "a shared memory that was asked for may be missing",
        "if settings.transport == HOST and self._groups.size > 1 and",
        "if False and",
        "tests/ranks/test_choice.py -k asked_for",
    ),
)

REPLICAS = (
    Mutant(
        "names of buffers are compared in the first call alone",
        "        if self._compared.get(step.call.groups) is not self._names:\n            step.header",
        "        if step.call.groups not in self._compared:\n            step.header",
        "tests/call/test_buffer_names.py -k next_call",
    ),
    Mutant(
        "the walk does not see a buffer that was None",
        "tree.append([name for name, buffer in buffers.items() if buffer is not None])",
        "tree.append([*buffers])",
        "tests/call/test_buffer_names.py -k next_call",
    ),
    Mutant(
        "a difference is dated from the call whose digest agreed",
        'return f"the first forward after call {last - 1}"',
        'return f"call {last}"',
        "tests/replicas/test_moments.py -k not_dated",
    ),
    Mutant(
        "a broadcast is advised where it raises",
        "_UNLIKE if unlike_tensors(report.differences) else _NEXT_STEP",
        "_NEXT_STEP",
        "tests/call/test_buffer_names.py -k not_advised",
    ),
    Mutant(
        "the scale of a quantized tensor is not digested",
        "checksum = zlib.crc32(internals.quantizer_of(tensor).encode(), checksum)",
        "pass",
        "tests/call/test_odd_tensors.py -k alone_changes",
    ),
    Mutant(
        "quantized tensors are broadcast as they are",
        "internals.integers_of(tensor.detach()) if tensor.is_quantized else tensor.detach()",
        "tensor.detach()",
        "tests/call/test_odd_tensors.py -k several_scales",
    ),
    Mutant(
        "one rank with a digest is enough",
        "elif agreement.common_flags & Flag.SIGNED:",
        "elif agreement.some_flags & Flag.SIGNED:",
        "tests/replicas/test_found_by_default.py -k off_on_a_rank",
    ),
    Mutant(
        "a rank that left join() is compared",
        "for rank, digest in enumerate(of_ranks) if rank not in left}",
        "for rank, digest in enumerate(of_ranks)}",
        "tests/end_to_end/test_clean_loops.py -k joins",
    ),
    Mutant(
        'divergence="raise" warns',
        'if call.checks.compares_replicas or call.checks.divergence == "raise":',
        "if call.checks.compares_replicas:",
        _PRECEDENCE,
    ),
    Mutant(
        "a streak looks again at the same age",
        "self.next_look = self.start + 2 * max(",
        "self.next_look = self.start + 9 * max(",
        "tests/replicas/test_later_differences.py",
    ),
    Mutant(
        "statistics are digested",
        "if name in self.buffers.statistics:",
        "if False:",
        _EXCHANGES,
    ),
    Mutant(
        "a digest without the number of bytes",
        "[totals[index] ^ size for index, size in enumerate(sizes)]",
        "[totals[index] for index, size in enumerate(sizes)]",
        "tests/replicas/test_digest.py -k definition",
    ),
    Mutant(
        "buffers are not digested again",
        "buffers = self._digest_later(self._buffers())\n        self._reader.read()",
        "buffers = Later(self.digests.buffers)\n        self._reader.read()",
        "tests/replicas/test_replica_faults.py",
    ),
    Mutant(
        "a moved digest of parameters is not told",
        "moved = ranks_where(call, digest_all(self._parameters) != self.digests.parameters)",
        "moved = ranks_where(call, False)",
        "tests/replicas/test_later_differences.py -k perturbation",
    ),
    Mutant(
        "evidence against the majority does not matter",
        "ranks = () if has_doubt else tuple(minority) or implicated",
        "ranks = tuple(minority) or implicated",
        "tests/replicas/test_attribution.py tests/replicas/test_evidence.py",
    ),
)

WATCHDOG = (
    Mutant(
        "the farthest rank is missing",
        "if row.progress < farthest and not row.is_out_of_data]",
        "if row.progress <= farthest and not row.is_out_of_data]",
        "tests/watchdog/test_report.py",
    ),
    Mutant(
        "several unknown ranks are missing",
        "return () if strongest is _Evidence.UNKNOWN and len(missing) > 1 else missing",
        "return missing",
        "tests/watchdog/test_report.py",
    ),
    Mutant(
        "a rank in its hook is missing beside a vanished host",
        "if any(row.is_gone and not row.left_after_loss for row in behind):",
        "if any(row.has_ended and not row.left_after_loss for row in behind):",
        "tests/watchdog/test_report.py",
    ),
    Mutant(
        "a rank out of data is missing",
        "return self.sample is not None and self.sample.phase == OUT_OF_DATA and not self.has_ended",
        "return False",
        "tests/call/test_join.py -k out_of_data",
    ),
    Mutant(
        "a dead process is silent",
        "return (Outcome.ENDED if is_dead else outcome), None",
        "return outcome, None",
        "tests/watchdog/test_processes.py -k told_apart or given_to_another",
    ),
    Mutant(
        "a process that /proc does not show is dead",
        "return DEAD if _refuses(peer) else UNKNOWN",
        "return DEAD",
        "tests/watchdog/test_processes.py -k told_apart",
    ),
    Mutant(
        "the numbers of another /proc are those of ranks",
        'os.readlink("/proc/self") == str(os.getpid())',
        "True",
        "tests/watchdog/test_processes.py -k their_numbers",
    ),
    Mutant(
        "requests need no token",
        "elif is_greeting(first, self.endpoint.token):",
        "else:",
        "tests/watchdog/test_server.py -k without_the_token",
    ),
    Mutant(
        "a signal in whose handler an error was raised is forgotten",
        "if came := of_error or of_exit or",
        "if came := of_exit or",
        "tests/watchdog/test_ending.py -k exit_status",
    ),
    Mutant(
        "a newline of a name stays a newline",
        'return "".join(char if char.isprintable() else',
        'return "".join(char if char.isprintable() or char == "\\n" else',
        "tests/test_printable.py",
    ),
    Mutant(
        "a handler of the script ends a call",
        "        except Exception as error:  # noqa: BLE001 - of the script",
        "        except ZeroDivisionError as error:",
        "tests/test_log.py -k ends_no_call",
    ),
    Mutant(
        "the name of a host is a part of a path",
        "_NO_PART_OF_A_NAME.sub('_', host)",
        "host",
        "tests/test_printable.py",
    ),
    Mutant(
        "a rank that left a call is dead",
        "(Outcome.LEFT, None)",
        "(Outcome.ENDED, None)",
        "tests/watchdog/test_processes.py",
    ),
    Mutant(
        "an answer needs no proof",
        "if not hmac.compare_digest(proof, answer_to(greeting, peer.token)):",
        "if not proof:",
        "tests/watchdog/test_server.py -k on_the_port",
    ),
    Mutant(
        "the proof of a client serves a server, too",
        'hmac.digest(token.encode(), side + nonce, "sha256")',
        'hmac.digest(token.encode(), nonce, "sha256")',
        "tests/watchdog/test_server.py -k on_the_port",
    ),
    Mutant(
        "ranks outside of the group of a collective are missing, too",
        "of = (wait.source,) if wait.source >= 0 else wait.ranks or numbers",
        "of = (wait.source,) if wait.source >= 0 else numbers",
        "tests/watchdog/test_outside.py -k subgroup",
    ),
    Mutant(
        "every rank shows a wait outside of calls",
        "reporters=reporters([row for row in rows if row.sample is not None] or rows, (), ()),",
        "reporters=tuple(row.rank for row in rows),",
        "tests/watchdog/test_outside.py -k lock",
    ),
    Mutant(
        "a wait for a work ends never",
        'if instruction.opname == "POP_TOP" or instruction.opname.startswith("STORE_"):',
        'if instruction.opname.startswith("STORE_"):',
        "tests/watchdog/test_activity.py -k ends_with_its_statement",
    ),
    Mutant(
        "the stack alone tells a wait",
        "    if before[:3] != now[:3]:",
        "    return before[0] != now[0]\n    if before[:3] != now[:3]:",
        "tests/watchdog/test_outside.py -k loop_that_moves",
    ),
    Mutant(
        "a signal ends a wait",
        "cpu_seconds > _WAKE_SECONDS * max(2, slices) and not is_spinning",
        "not is_spinning",
        "tests/watchdog/test_activity.py -k signals",
    ),
    Mutant(
        "a rank that left without an error is not named",
        "if waited_seconds > _ENDS_TOGETHER_SECONDS and reason.startswith(LEFT_NORMALLY) and not was_asked(reason):",
        "if False:",
        "tests/watchdog/test_outside.py -k ended_first",
    ),
    Mutant(
        "a rank at the exit of its process has no reason",
        'if status["sample"]["phase"] == AT_END else status',
        "if False else status",
        "tests/watchdog/test_activity.py -k goes_on",
    ),
    Mutant(
        "the neighbour of a rank that raised says nothing",
        "if is_first and self._is_next_of(rank) and self._is_of_process and is_fault(exit_reason):",
        "if False:",
        "tests/watchdog/test_outside.py -k others_go_on",
    ),
    Mutant(
        "a survivor does not wait for its turn to end",
        "            end_after(error, self.processes([found.rank]))",
        "            pass",
        "tests/end_to_end/test_outside_under_torchrun.py -k root_cause and raises",
    ),
    Mutant(
        "any user gets an answer at the socket",
        "return self._local is not None and self._local.is_of_user(sock) and number <= _MAX_LOCAL",
        "return number <= _MAX_LOCAL",
        "tests/watchdog/test_local.py -k another_user",
    ),
    Mutant(
        "one poll tells who waits for whom",
        "is_sure = is_late or not any(row.has_moved for row in rows)",
        "is_sure = True",
        "tests/watchdog/test_job.py -k went_on",
    ),
    Mutant(
        "a group that is a part of the job sees all of it",
        "if unseen and any(_is_beyond(wait, numbers) for wait in waits.values()):",
        "if False:",
        "tests/watchdog/test_job.py -k part_of_the_job",
    ),
    Mutant(
        "every rank shows the report on a loss",
        "if (reporter := watchdog.reporter_of(report)) != self.groups.rank:",
        "if (reporter := watchdog.reporter_of(report)) < 0:",
        "tests/test_traceback.py -k survivor_of_a_host",
    ),
    Mutant(
        "a rank points to the reporter of any host",
        "for peer in reporters if peer.identity.host == self._view.own.identity.host",
        "for peer in reporters",
        "tests/watchdog/test_report.py -k reporter_of_its_own_host",
    ),
    Mutant(
        "a dead rank is a reporter beside a living one",
        "row.rank not in in_wait, row.is_gone, row.rank in behind",
        "row.rank not in in_wait, row.rank in behind",
        "tests/watchdog/test_report.py -k one_waiting_rank_of_each_host",
    ),
    Mutant(
        "ranks with different stacks are one state",
        "process_text(row), row.outcome, row.note, sample)",
        "process_text(row), row.outcome, row.note)",
        "tests/watchdog/test_report.py -k line_of_json",
    ),
    Mutant(
        "the JSON of a report has every stack",
        "keeps_stack=place < _MAX_KEPT_STACKS",
        "keeps_stack=True",
        "tests/watchdog/test_report.py -k long_stack_each_fits",
    ),
    Mutant(
        "a process that ended after its answer is alive",
        "if states.get(rank) == DEAD:",
        "if False:",
        "tests/watchdog/test_report.py -k seen_dead",
    ),
    Mutant(
        "a call that met no rank counts",
        "        if has_met:\n            self._met",
        "        if True:\n            self._met",
        "tests/ranks/test_blame.py -k interrupted_before",
    ),
    Mutant(
        "a second failure is not written down",
        "if self.failure is not None and (self._missing or not logs):",
        "if self.failure is not None:",
        "tests/watchdog/test_processes.py",
    ),
    Mutant(
        "a payload that was not issued is complete",
        "return bool(self.words) and all(int(word)",
        "return all(int(word)",
        _PAYLOADS,
    ),
    Mutant(
        "a payload is complete with the one before",
        "int(word) >= self.serial for word",
        "int(word) >= self.serial - 1 for word",
        _PAYLOADS,
    ),
    Mutant(
        "a payload waits from its issue, however far the host is ahead",
        "max(oldest.begun_at, self._advanced_at)",
        "oldest.begun_at",
        _PAYLOADS,
    ),
    Mutant(
        "the host waits for the word of a payload",
        "device=place), non_blocking=True)",
        "device=place))",
        f"{_PAYLOADS} -k copies_one_number",
    ),
    Mutant(
        "no rank is missing where a payload was not issued",
        "behind = [rank for rank, reached in progress.items() if reached < farthest]",
        "behind: list[int] = []",
        _PAYLOADS,
    ),
    Mutant(
        "the thread of the watchdog sleeps on after the first payload",
        "        if is_first:\n            self._server.wake()",
        "",
        f"{_PAYLOADS} -k does_not_issue",
    ),
)

STEPS = (
    Mutant(
        "a result divided again is marked on the ranks that hold it alone",
        "stale, marked, fresh = step.call.maximum(torch.stack([stale, marked, fresh])).bool()",
        "stale, marked, fresh = torch.stack([stale, marked, fresh]).bool()",
        "tests/steps/test_divided_results.py -k three_ranks",
    ),
    Mutant(
        "a result that some ranks have cleared is whole",
        "(stale & (marked | fresh | is_divided))",
        "(stale & (marked | is_divided))",
        "tests/steps/test_divided_results.py -k not_stepped",
    ),
    Mutant(
        "a plain call forgets which results were divided again",
        "header.participation == Participation.SAMPLES) or counter.divided:",
        "header.participation == Participation.SAMPLES):",
        "tests/steps/test_divided_results.py -k not_stepped",
    ),
    Mutant(
        "earlier results are looked for behind the copy",
        "        grads = _collect(plan, leaves, header, reader, takes_part=takes_part)\n",
        "        grads = _collect(plan, leaves, header, reader, takes_part=takes_part)\n"
        "        stale = counter.stale(plan.parameters, is_weighted=is_weighted)\n",
        "tests/steps/test_divided_results.py -k not_stepped",
    ),
    Mutant(
        "a layer frozen for the first time is forgotten",
        "return internals.identity(grad) if hook.counts[hook.index] and not hook.is_consumed else None",
        "return None",
        "tests/steps/test_frozen_gradients.py",
    ),
    Mutant(
        "every gradient since the first pass is half a gradient",
        "if 0 <= hook.first_pass <= last and",
        "if 0 <= hook.first_pass and",
        "tests/steps/test_passes.py -k half_a_backward",
    ),
    Mutant(
        "a gradient that was cleared in place belongs to its first pass",
        "is_added=counts[index] > 0 and (is_continued or thread != self.thread)",
        "is_added=counts[index] > 0",
        "tests/steps/test_passes.py -k half_a_backward",
    ),
    Mutant(
        "a block with half a backward is a leaf",
        "        check_complete(self._counter.incomplete(plan.parameters))\n        grads = self._grads_of(plan)",
        "        grads = self._grads_of(plan)",
        "tests/steps/test_passes.py -k half_a_backward",
    ),
    Mutant(
        "passes inside of a pass are micro-batches",
        "return min(largest, passes.forwards) if passes.has_nested and passes.forwards else largest",
        "return largest",
        "tests/steps/test_passes.py -k reentrant",
    ),
)

_SETTINGS = "tests/debug/diff/test_settings.py"

TRACES = (
    Mutant(
        "a step without settings has other settings",
        'may_lack = phase in ("settings", *self.may_lack)',
        "may_lack = phase in self.may_lack",
        _SETTINGS,
    ),
    Mutant(
        "the start of a resumed run has settings",
        "            if None not in digests:\n                settings",
        "            if True:\n                settings",
        "tests/debug/diff/test_resumed_runs.py",
    ),
    Mutant(
        "a setting of another implementation is the headline",
        "return item.is_apart, item.is_of_one_side, item.first < step",
        "return False, False, item.first < step",
        _SETTINGS,
    ),
    Mutant(
        "a setting that differs before the step is not the headline",
        "there = sorted((item for item in settings if {*item.present} & {*ranks}), key=unlikeliness)",
        "there = sorted((item for item in settings if item.first == step), key=unlikeliness)",
        _SETTINGS,
    ),
    Mutant(
        "settings after a start are not listed",
        "    if tensors[0] not in starts:\n        return tensors[0]\n",
        "    return tensors[0]\n",
        "tests/debug/diff/test_resumed_runs.py -k lost_a_part",
    ),
)

INTERRUPTS = (
    Mutant(
        "the parts of the replica are known before they are divided",
        "        parts = divide([item.tensor",
        "        self._division = self._division._replace(layout=self._planner.layout)\n"
        "        parts = divide([item.tensor",
        _INTERRUPTS,
    ),
    Mutant(
        "the owner of a call is thought to be there still",
        "            if not has_left(other):",
        "            if other is not self:",
        _INTERRUPTS,
    ),
    Mutant(
        "a block of no_sync() is open before anything closes it",
        "with undone_by(partial(policy.close_block, block)):\n            is_outermost = policy.open_block(block)",
        "is_outermost = policy.open_block(block)\n        with undone_by(partial(policy.close_block, block)):",
        _INTERRUPTS,
    ),
    Mutant(
        "a hook is there before its handle is kept",
        "        handles.append(handle)\n    hooks[handle.id] = hook",
        "        hooks[handle.id] = hook\n        handles.append(handle)\n    hooks[handle.id] = hook",
        _INTERRUPTS,
    ),
)

WORDS = (
    Mutant(
        "a hook before the hook that counts may step",
        " or (internals.inside_backward() and not hook.was_reduced(parameter.grad))",
        "",
        "tests/steps/test_guard.py -k names_the_hook",
    ),
    Mutant(
        "a record of no_sync() has a plain dict of metrics",
        "SyncRecord(call=0, synchronized=False, metrics=NoMetrics())",
        "SyncRecord(call=0, synchronized=False)",
        "tests/call/test_metrics.py -k nothing_was_exchanged",
    ),
    Mutant(
        "the plan of the first micro-batch is forgotten",
        "        self._plan = self._plan or plan\n",
        "",
        "tests/reproducible/test_reproducible_faults.py -k refused",
    ),
    Mutant(
        "several wrappers are not told apart",
        "if len(_numbered) + (self.group_state.wrapper_id is None) < 2:",
        "if self.wrapper_id:",
        _CONTEXT,
    ),
    Mutant(
        "calls inside no_sync() are not counted",
        "self.policy.idle_calls += 1",
        "self.policy.idle_calls += 0",
        _CONTEXT,
    ),
    Mutant(
        "an optimizer that runs its closure once decides by the loss",
        "code.co_filename.startswith(INNER) and code.co_filename != _OF_TORCH",
        "code.co_filename == _OF_TORCH",
        f"{_CONTEXT} -k mean_loss",
    ),
    Mutant(
        "what a rank has added is not told",
        'changes = {name: "added" for name in inventory if name not in before}',
        "changes: dict[str, str] = {}",
        f"{_CONTEXT} -k added_or_removed",
    ),
    Mutant(
        "the function is sent to Checks",
        "        by_environment=True,\n",
        "",
        "tests/test_record.py -k points_at_the_caller",
    ),
    Mutant(
        "any line fits a section",
        "best < _SHARE * sum(weights.values())",
        "best < 0.0",
        "tests/debug/test_explain.py -k other_code",
    ),
    Mutant(
        "texts belong to no caller",
        "_LONGEST_CHAIN = 3",
        "_LONGEST_CHAIN = 0",
        "tests/debug/test_explain.py -k line_of_a_text",
    ),
    Mutant(
        "a warning has no command",
        'text = f"{text}{line}\\n{how_to_explain(section)}"',
        'text = f"{text}{line}"',
        "tests/test_errors_page.py -k warning_has",
    ),
)

_BY_HAND = "tests/debug/port/test_by_hand.py"

PORTS = (
    Mutant(
        "a sum by hand is taken for a mean",
        'if not divisors and summary.operations == {"SUM"}:',
        "if not summary.operations:",
        f"{_BY_HAND} -k left_to_the_user",
    ),
    Mutant(
        "tokens are taken for the number of ranks",
        "if others or (summary.operations ==",
        "if not others and (summary.operations ==",
        f"{_BY_HAND} -k left_to_the_user",
    ),
    Mutant(
        "an average by hand loses its group",
        """{f', process_group={self.group}' if self.group else ''}""",
        "",
        f"{_BY_HAND} -k place_of_the_lines",
    ),
    Mutant(
        "lines go although others read their values",
        "if self._read_elsewhere(made | _mutated(run), run):",
        "if self._read_elsewhere(set(), run):",
        f"{_BY_HAND} -k left_to_the_user",
    ),
    Mutant(
        "a copy of gradients counts as the gradients",
        "calls=frozenset(SHAPE - _COPIES)",
        "calls=frozenset(SHAPE)",
        f"{_BY_HAND} -k about_something_else",
    ),
    Mutant(
        "another class of the same name is shadowed",
        "is_taken = bool(script.bound[_OURS])",
        "is_taken = bool(script.bound[''])",
        "tests/debug/port/test_changes.py -k class_is_replaced",
    ),
    Mutant(
        "the wrapped module has every name",
        "if not _has(module, name):",
        "if module is None:",
        "tests/test_wrapper.py -k says_where_it_is",
    ),
)

MUTANTS = (*AGREEMENT, *COLLECTIVES, *TRANSPORT, *REPLICAS, *WATCHDOG, *STEPS, *TRACES, *INTERRUPTS, *WORDS, *PORTS)
