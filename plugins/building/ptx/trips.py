"""Count of the round trips to global memory that wait for one another in a kernel's PTX.

A thread issues its instructions in order. It waits if an instruction needs a number that has not arrived. So a load
costs a round trip unless other work, or other loads, are under way meanwhile. Within a stretch (instructions without a
branch or label between them) the assembler puts loads first. So a stretch takes as many round trips as its longest
chain of loads that need each other's results. Fences and waits for asynchronous copies are round trips as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from .read import Kernel, split, statements

LEAVES = ("bra", "ret", "exit")
ORDERED = ("bar", "barrier", "membar", "fence", "griddepcontrol", "cp")  # no load moves across them
WITHOUT_RESULT = (*LEAVES, *ORDERED, "st", "red", "trap", "pragma")
WORD = re.compile(r"%?[A-Za-z_$][\w$]*")
NARROW = 4  # the fewest bytes that a loop should load in each of its round trips


class Instruction(NamedTuple):
    """An instruction: its name with suffixes, the registers that it writes, and those that it reads."""

    name: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def loads(self) -> int:
        """The bytes that the instruction loads from global memory; 0 if it loads none."""
        parts = self.name.split(".")
        if parts[0] != "ld" or set(parts) & {"param", "shared", "local", "const"}:
            return 0
        return int(parts[-1][1:]) // 8 * int(next((part[1] for part in parts if part in ("v2", "v4")), 1))


def instruction(text: str) -> Instruction:
    """Parse a statement that is an instruction."""
    guard = re.match(r"@!?(%\w+)\s+", text)
    name, _, rest = text[guard.end() if guard else 0 :].partition(" ")
    operands = split(rest)
    written = 0 if name.split(".")[0] in WITHOUT_RESULT else 1
    writes = tuple(WORD.findall(operands[0])) if written and operands else ()
    reads = tuple(word for one in operands[written:] for word in WORD.findall(one))
    return Instruction(name, writes, (*reads, *([guard[1]] if guard else ())), tuple(operands))


class Stretches(NamedTuple):
    """A kernel's stretches. The number of a stretch is the number of labels and branches before it."""

    all: list[list[Instruction]]
    labels: dict[str, int]  # the stretch that begins at each label

    def next(self, number: int) -> list[int]:
        last = self.all[number][-1] if self.all[number] else None
        root = last.name.split(".")[0] if last else ""
        targets = [self.labels[last.operands[0]]] if last and root == "bra" else []
        falls = root not in LEAVES or (last is not None and len(last.reads) > (root == "bra"))  # with a guard
        return targets + [number + 1] * (falls and number + 1 < len(self.all))


def stretches(kernel: Kernel) -> Stretches:
    """Divide a kernel's body at its labels and branches."""
    result = Stretches([[]], {})
    for one in statements(kernel.body):
        if one.endswith(":"):
            result.all.append([])
            result.labels[one[:-1]] = len(result.all) - 1
        elif one not in "{}" and one[0] != ".":
            result.all[-1].append(instruction(one))
            if result.all[-1][-1].name.split(".")[0] in LEAVES:
                result.all.append([])
    return result


class Clock:
    """A thread's round trips so far, and the round trip at which each register and copy under way arrives."""

    def __init__(self) -> None:
        self.trips = 0
        self.ready: dict[str, int] = {}
        self.copies = [0]  # the arrival of every batch of asynchronous copies; the last batch is open

    def run(self, stretch: Iterable[Instruction]) -> None:
        latest = self.trips
        for one in stretch:
            root = one.name.split(".")[0]
            start = max([self.trips, *(self.ready.get(name, 0) for name in one.reads)])
            arrival = start + (one.loads > 0 or root == "atom")
            self.ready |= dict.fromkeys(one.writes, arrival)
            if root == "cp":
                start = self._copy(one, start)
            latest = max(latest, start)
            if root in ORDERED:
                self.trips = latest = latest + (root in ("membar", "fence") and "cta" not in one.name)
        self.trips = latest
        self.ready = {name: trip for name, trip in self.ready.items() if trip > latest}

    def _copy(self, one: Instruction, start: int) -> int:
        if "commit_group" in one.name:
            self.copies.append(0)
        elif "wait_group" in one.name:
            awaited = len(self.copies) - 1 - int(one.operands[0])
            start = max([start, *self.copies[: max(awaited, 0)]])
        else:
            self.copies[-1] = max(self.copies[-1], start + 1)
        return start


class Loop(NamedTuple):
    """An innermost loop: its label, the round trips of an iteration, and the bytes that a thread loads in them."""

    label: str
    trips: int
    bytes: int

    @property
    def is_narrow(self) -> bool:
        """Whether a round trip loads hardly anything, so that the loop should load several inputs at a time."""
        return self.bytes < NARROW * self.trips


def loops(parts: Stretches) -> list[Loop]:
    """Return the innermost loops of a kernel that load from global memory."""
    ends: dict[int, int] = {}
    for number in range(len(parts.all)):
        for following in parts.next(number):
            if following <= number:
                ends[following] = number
    names = {number: label for label, number in parts.labels.items()}
    found = []
    for begin, end in ends.items():
        if any(begin < other <= end for other in ends):
            continue
        body = parts.all[begin : end + 1]
        loaded = sum(one.loads for stretch in body for one in stretch)
        if not loaded:
            continue
        clock, trips = Clock(), []
        for _ in range(3):  # the third iteration is like all later ones
            for stretch in body:
                clock.run(stretch)
            trips.append(clock.trips)
        found.append(Loop(names[begin], trips[2] - trips[1], loaded))
    return found


def along(parts: Stretches, trace: Iterable[int]) -> int:
    """Return the round trips of a thread that ran these stretches, by their numbers."""
    clock = Clock()
    for number in trace:
        clock.run(parts.all[number])
    return clock.trips
