"""Cards of ranks: which ranks form a host, and why a group uses gloo alone."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._transport.hosts import MAX_RANKS, find_hosts, own_card, why_gloo

APART = {
    "boot": "they run on different hosts",
    "network": "they run in different network namespaces",
    "user": "they belong to different users",
}


def _cards(hosts: str) -> list[dict[str, str]]:
    """A rank per letter, on the host of this name."""
    return [{**own_card(), "boot": host} for host in hosts]


def test_one_host_has_one_boot_one_network_and_one_user() -> None:
    card = own_card()

    assert why_gloo([card, own_card()]) == ""
    assert find_hosts([card, own_card()]) == [(0, 1)]
    for fact, meaning in APART.items():
        apart = [card, card, {**card, fact: "x"}]
        assert find_hosts(apart) == [(0, 1), (2,)]
        assert why_gloo(apart) == f"ranks 0 and 2: {meaning}, with unequal numbers of ranks, 1 to 2"
    assert why_gloo([card, {"problem": "no /proc"}]) == "rank 1: no /proc"


@pytest.mark.parametrize(
    "hosts, reason",
    [
        ("aaaa", ""),
        ("aabb", ""),
        ("abab", ""),
        ("abcabc", ""),
        ("aaabbbaaabbb", ""),
        ("a", ""),
        ("ab", "ranks 0 and 1: they run on different hosts, with one rank each"),
        ("abcd", "ranks 0 and 1: they run on different hosts, with one rank each"),
        ("aab", "ranks 0 and 2: they run on different hosts, with unequal numbers of ranks, 1 to 2"),
        ("aaabbc", "ranks 0 and 3: they run on different hosts, with unequal numbers of ranks, 1 to 3"),
        ("a" * (MAX_RANKS + 1), "257 ranks on a host, more than 256"),
        ("ab" * (MAX_RANKS + 1), "257 ranks on a host, more than 256"),
    ],
)
def test_hosts_with_equal_numbers_of_ranks_share_memory(hosts: str, reason: str) -> None:
    assert why_gloo(_cards(hosts)) == reason


@given(st.text("abc", min_size=1, max_size=12))
def test_every_rank_is_on_one_host_with_all_ranks_of_its_card(names: str) -> None:
    hosts = find_hosts(_cards(names))

    assert sorted(rank for ranks in hosts for rank in ranks) == list(range(len(names)))
    assert all(list(ranks) == sorted(ranks) for ranks in hosts)
    assert [ranks[0] for ranks in hosts] == sorted(ranks[0] for ranks in hosts)
    assert all(len({names[rank] for rank in ranks}) == 1 for ranks in hosts)
    counts = Counter(names).values()
    assert len(hosts) == len(counts)
    assert (why_gloo(_cards(names)) == "") == (len(counts) == 1 or (len(set(counts)) == 1 and max(counts) > 1))
