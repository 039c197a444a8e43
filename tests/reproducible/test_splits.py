"""Which hosts of ranks add their sums to nodes of the tree, compared with the nodes of a recursive tree."""

from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._reproducible.tree_reduce import why_no_nodes

Ranks = tuple[int, ...]


def _nodes(ranks: Ranks) -> set[Ranks]:
    """The first part of a node is the largest power of two that is less than all."""
    if len(ranks) == 1:
        return {ranks}
    half = 2 ** ((len(ranks) - 1).bit_length() - 1)
    return {ranks} | _nodes(ranks[:half]) | _nodes(ranks[half:])


@st.composite
def _hosts(draw: st.DrawFn) -> list[Ranks]:
    """At least two hosts with equally many ranks: consecutive, or with two exchanged, or in any order."""
    count, each = draw(st.integers(2, 6)), draw(st.integers(1, 9))
    ranks = list(range(count * each))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    elif draw(st.booleans()):
        first, second = draw(st.sampled_from(ranks)), draw(st.sampled_from(ranks))
        ranks[first], ranks[second] = ranks[second], ranks[first]
    return sorted(tuple(sorted(ranks[start : start + each])) for start in range(0, len(ranks), each))


@given(_hosts())
def test_hosts_are_nodes_where_the_tree_has_a_node_with_their_ranks(hosts: list[Ranks]) -> None:
    nodes = _nodes(tuple(range(sum(map(len, hosts)))))

    assert (why_no_nodes(hosts) == "") == all(ranks in nodes for ranks in hosts)
