"""KV blocks that outlive their sequence: a tree over token ids, a block's worth of them per node.

A path from the root spells a prefix, so whoever begins with the same ids begins with the same blocks. Only full blocks
are in the tree, and only once they are computed. A node that some sequence holds stays; one that nobody holds is
*idle*, and goes when its block is needed, the longest unused first. Sequences let go of their paths from the far end,
so in the order of idleness each node stands behind all of its children, and what is evicted is always a leaf.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence

from services.scheduler.engine.api import SequenceKey
from services.scheduler.kv.pool import BlockPool


class Node:
    """One full block: the ids in it, after those of its parents. `known` ends when a flush or a failure hides it."""

    __slots__ = ("author", "block", "children", "holders", "key", "known", "parent")

    def __init__(self, key: Hashable, block: int, parent: Node | None, author: SequenceKey) -> None:
        self.key = key
        self.block = block
        self.parent = parent
        self.author = author
        self.children: dict[Hashable, Node] = {}
        self.holders = 0
        self.known = True


class PrefixCache:
    """Gives out the pool's blocks, shared ones too. A *path* is a sequence's leading nodes; the sequence owns the list.

    `salt` keeps prefixes apart that must not meet (tenants): it belongs to the first block's key, and so to all.
    """

    __slots__ = ("_children", "_idle", "block_size", "enabled", "pool")

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self._children: dict[Hashable, Node] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def cached(self) -> int:
        """Blocks that hold a prefix, and that nobody holds."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return self.pool.free + len(self._idle)

    def find(self, salt: Hashable, ids: Sequence[int], most: int) -> list[Node]:
        """The longest known prefix of `ids`, of at most `most` blocks; held by nobody yet."""
        path: list[Node] = []
        children, size = self._children, self.block_size
        while len(path) < most and children:
            start = len(path) * size
            node = children.get(_key(salt, ids[start : start + size], first=not path))
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def idle_in(self, path: Iterable[Node]) -> int:
        """How many of these blocks would no longer be available if they were held."""
        return sum(not node.holders for node in path)

    def hold(self, path: Iterable[Node]) -> None:
        """A sequence begins with this path, as `find` gave it."""
        for node in path:
            if not node.holders:
                del self._idle[node]
            node.holders += 1

    def take(self, count: int) -> list[int]:
        """Gives out blocks, idle ones where free ones don't suffice; the caller has looked at `available`."""
        while self.pool.free < count:
            self._evict()
        return self.pool.take(count)

    def share(self, path: list[Node], salt: Hashable, ids: Sequence[int], block: int, author: SequenceKey) -> int:
        """`block`, the next one after `path`, now holds `ids` and is shared as the path's new end; returns the block.

        That is another one where the same ids were there already; `block` is free again then.
        """
        parent = path[-1] if path else None
        children = self._children if parent is None else parent.children
        key = _key(salt, ids, first=parent is None)
        node = children.get(key)
        if node is None:
            node = children[key] = Node(key, block, parent, author)
        else:
            self.pool.give_back([block])
            if not node.holders:
                del self._idle[node]
        node.holders += 1
        path.append(node)
        return node.block

    def may_extend(self, path: Sequence[Node]) -> bool:
        """Whether what follows the path can be shared: nothing can behind a node that is hidden."""
        return self.enabled and (not path or path[-1].known)

    def let_go(self, path: list[Node], blocks: Iterable[int]) -> None:
        """A sequence ends or gives way: `blocks` are its own and are free; its path goes on being known."""
        for node in reversed(path):
            node.holders -= 1
            if not node.holders:
                if node.known:
                    self._idle[node] = None
                else:
                    self.pool.give_back([node.block])
        path.clear()
        self.pool.give_back(blocks)

    def forget_of(self, author: SequenceKey, path: Iterable[Node]) -> None:
        """What this sequence computed can't be trusted: hides it, with all that was built on it."""
        node = next((node for node in path if node.author == author), None)
        if node is not None and node.known:
            siblings = self._children if node.parent is None else node.parent.children
            del siblings[node.key]
            self._hide(node)

    def flush(self) -> int:
        """Hides everything. Idle blocks are free at once, others when they are let go; returns how many those are."""
        roots, self._children = self._children, {}
        return sum(self._hide(node) for node in roots.values())

    def check_integrity(self, tables: Iterable[tuple[Sequence[Node], Sequence[int]]]) -> None:
        """Raises AssertionError unless free, idle and held blocks are all blocks, each once: (path, blocks) of all."""
        holders: Counter[Node] = Counter()
        own: list[list[int]] = []
        for path, blocks in tables:
            assert [node.block for node in path] == list(blocks[: len(path)]), "a path and its blocks differ"
            holders.update(path)
            own.append(list(blocks[len(path) :]))
        known = list(_walk(self._children.values()))
        assert all(node.known for node in known)
        assert all(node.holders == holders[node] for node in (*known, *holders))
        assert {node for node in known if not node.holders} == self._idle.keys()
        assert all(child.holders <= node.holders for node in known for child in node.children.values())
        self.pool.check_integrity([*own, [node.block for node in {*known, *holders}]])

    def _evict(self) -> None:
        node, _ = self._idle.popitem(last=False)
        assert not node.children, "a parent was idle before its child"
        siblings = self._children if node.parent is None else node.parent.children
        del siblings[node.key]
        node.known = False
        self.pool.give_back([node.block])

    def _hide(self, node: Node) -> int:
        """Returns how many blocks of this subtree are still held."""
        held = 0
        for each in list(_walk([node])):
            each.known = False
            each.children = {}
            if each.holders:
                held += 1
            else:
                del self._idle[each]
                self.pool.give_back([each.block])
        return held


def _key(salt: Hashable, ids: Sequence[int], *, first: bool) -> Hashable:
    return (salt, tuple(ids)) if first else tuple(ids)


def _walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """Not recursive: a path is as long as a context."""
    rest = list(nodes)
    while rest:
        node = rest.pop()
        yield node
        rest += node.children.values()
