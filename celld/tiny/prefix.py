"""Which holder has keys and values for the longest prefix of a prompt.

Owns a radix tree per salt over the token strings of holders; a holder is any integer that names a place where the keys
and values of its whole string lie. Never knows the places, never evicts. Invariant: `longest` returns a holder whose
string really begins with that many of the prompt's tokens, and no holder's string begins with more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """One edge of the tree: its tokens, what follows, and every holder whose string runs through all of it."""

    edge: Tokens
    children: dict[int, _Node] = field(default_factory=dict)
    holders: dict[int, None] = field(default_factory=dict)  # a dict keeps the order: the newest is last


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens two strings share."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return next(i for i in range(limit) if left[i] != right[i])


class PrefixIndex:
    """Token strings of holders, by longest common prefix; strings with different salts never match."""

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._strings: dict[int, tuple[str, Tokens]] = {}

    def __len__(self) -> int:
        return len(self._strings)

    def __contains__(self, holder: int) -> bool:
        return holder in self._strings

    def insert(self, holder: int, salt: str, tokens: Sequence[int]) -> None:
        """Add a holder; one that is there already is an error of the caller."""
        if holder in self._strings:
            raise ValueError(f"holder {holder} is already indexed")
        rest = tuple(tokens)
        self._strings[holder] = (salt, rest)
        node = self._roots.setdefault(salt, _Node(()))
        node.holders[holder] = None
        while rest:
            node = self._child_for(node, rest)
            node.holders[holder] = None
            rest = rest[len(node.edge) :]

    def _child_for(self, node: _Node, rest: Tokens) -> _Node:
        """The child of `node` whose edge is a prefix of `rest`; an edge that is so only in part is split."""
        child = node.children.get(rest[0])
        if child is None:
            child = node.children[rest[0]] = _Node(rest)
            return child
        shared = common_length(child.edge, rest)
        if shared == len(child.edge):
            return child
        upper = _Node(child.edge[:shared], {child.edge[shared]: child}, dict(child.holders))
        child.edge = child.edge[shared:]
        node.children[rest[0]] = upper
        return upper

    def remove(self, holder: int) -> None:
        """Forget a holder. Raises KeyError when it is not there."""
        salt, rest = self._strings.pop(holder)
        node = self._roots[salt]
        del node.holders[holder]
        if not node.holders:
            del self._roots[salt]
            return
        while rest:
            child = node.children[rest[0]]
            del child.holders[holder]
            if not child.holders:
                del node.children[rest[0]]
                return
            rest = rest[len(child.edge) :]
            node = child

    def longest(self, salt: str, tokens: Sequence[int]) -> tuple[int | None, int]:
        """The newest holder that shares the most leading tokens with `tokens`, and how many those are."""
        holder, matched = None, 0
        for node, upto in self._walk(salt, tuple(tokens)):
            holder, matched = next(reversed(node.holders)), upto
        return holder, matched

    def contained_in(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """Holders whose whole string is a prefix of `tokens`: a holder of `tokens` makes them redundant."""
        found: list[int] = []
        for node, upto in self._walk(salt, tuple(tokens)):
            found.extend(h for h in node.holders if len(self._strings[h][1]) == upto)
        return found

    def _walk(self, salt: str, rest: Tokens) -> Iterator[tuple[_Node, int]]:
        """Nodes along `rest` that share at least one token, each with the number of tokens matched at its end."""
        node, upto = self._roots.get(salt), 0
        while node is not None and rest:
            child = node.children.get(rest[0])
            if child is None:
                return
            shared = common_length(child.edge, rest)
            upto += shared
            yield child, upto
            if shared < len(child.edge):
                return
            node, rest = child, rest[shared:]

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._strings.clear()
