"""Find stop strings in a stream of text, holding back what could be the start of one.

This module must not know tokens.
"""

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """All stop strings of a request as one automaton over characters.

    Args:
        stops: The strings, none empty.

    Source: Aho and Corasick, "Efficient string matching" (1975).
    Cost on the token path: one or two dictionary look-ups per character, for 4 strings or 1,000.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fallback = [0]
        self.match_length = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, character in enumerate(stop, start=1):
            following = self.children[node].get(character)
            if following is None:
                following = len(self.children)
                self.children[node][character] = following
                self.children.append({})
                self.depth.append(depth)
                self.fallback.append(0)
                self.match_length.append(0)
            node = following
        self.match_length[node] = len(stop)

    def _link(self) -> None:
        """Give each node the longest proper suffix that is also in the tree, and its match."""
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.children[node].items():
                self.fallback[child] = self.step(self.fallback[node], character)
                queue.append(child)
            # A node's own string is longer than any that ends in its suffix.
            self.match_length[node] = (
                self.match_length[node] or self.match_length[self.fallback[node]]
            )

    def step(self, node: int, character: str) -> int:
        """The node after reading one character."""
        while True:
            following = self.children[node].get(character)
            if following is not None:
                return following
            if node == 0:
                return 0
            node = self.fallback[node]


@lru_cache(maxsize=64)
def compile_stops(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of a stop list; clients tend to send the same list again and again."""
    return StopAutomaton(stops)


class StopFilter:
    """Passes text through until a stop string appears.

    Args:
        stops: Strings that end the text; may be empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = compile_stops(stops) if stops else None
        self._node = 0
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Add text; return what is now certain to come before any stop string."""
        automaton = self._automaton
        if automaton is None:
            return text
        node = self._node
        for index, character in enumerate(text, start=1):
            node = automaton.step(node, character)
            if length := automaton.match_length[node]:
                self.stopped = True
                shown = self._held + text[:index]
                self._held = ""
                return shown[: len(shown) - length]
        self._node = node
        shown = self._held + text
        cut = len(shown) - automaton.depth[node]
        self._held = shown[cut:]
        return shown[:cut]

    def flush(self) -> str:
        """Return what is still held back: the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held
