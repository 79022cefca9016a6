"""Reader of optimized HLO text: every instruction with the number of times that one execution of
the program runs it.

XLA's own cost analysis counts the body of a loop once. Here a body counts as often as its loop
runs: by the trip count that the compiler knows, or, for a loop whose end is data, by the count that
the caller states for its name scope.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

TripCounts = Callable[[str], float | None]
"""Iterations of a loop by its op_name; None for a loop that the caller does not know."""

_TYPES = {
    0.5: "s4 u4",
    1: "pred s8 u8",
    2: "s16 u16 f16 bf16",
    4: "s32 u32 f32",
    8: "s64 u64 f64 c64",
    16: "c128",
}
_BYTES = {name: size for size, names in _TYPES.items() for name in names.split()}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<= ]*)\]")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Applied to scalars, element by element: nothing in them is a product or a collective.
_ELEMENTWISE = frozenset(
    """
        reduce all-reduce all-reduce-start reduce-scatter reduce-window scatter sort map select-and-scatter
        reduce-scatter-start
    """.split()
)


class Array(NamedTuple):
    """Type of an array: dtype in HLO's spelling, and dimensions."""

    dtype: str
    dims: tuple[int, ...]

    def __str__(self) -> str:
        """As in HLO: f32[3,4]."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes, without the padding of a tiled layout."""
        width = 1 if self.dtype.startswith("f8") else _BYTES.get(self.dtype, 0)
        return math.ceil(self.size * width)


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        name: unique in its computation.
        opcode: such as "dot".
        results: its arrays; those of a tuple in order.
        operands: names of instructions of the same computation.
        attributes: the text after the operands.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def frame(self) -> str:
        """Key of its line in `Module.lines`."""
        found = _FRAME.search(self.attributes)
        return found.group(1) if found else ""

    @property
    def op_name(self) -> str:
        """Path of JAX's name scopes and primitives; empty if the compiler dropped it."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""


class Computation(NamedTuple):
    """A computation: its instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction]

    def operands(self, instruction: Instruction) -> list[Array]:
        """Types of an instruction's operands, tuples flattened."""
        return [
            array
            for name in instruction.operands
            if name in self.instructions
            for array in self.instructions[name].results
        ]


class Module(NamedTuple):
    """A compiled program.

    Attributes:
        computations: by name.
        entry: name of the one that runs.
        devices: partitions times replicas.
        lines: lines of Python, "models/decoder.py:336", by stack frame.
    """

    computations: dict[str, Computation]
    entry: str
    devices: int
    lines: dict[str, str]


class Loop(NamedTuple):
    """A loop around an instruction.

    Attributes:
        op_name: the loop's name scopes.
        trips: number of times that its body runs.
        known: whether the count is the compiler's or the caller's; an unknown loop counts once.
    """

    op_name: str
    trips: float
    known: bool


class Visit(NamedTuple):
    """An instruction as a run of the program meets it.

    Attributes:
        instruction, computation: the instruction and where it is.
        count: number of executions; a branch of a conditional counts as if it were taken.
        loops: the loops around it, outermost first.
    """

    instruction: Instruction
    computation: Computation
    count: float
    loops: tuple[Loop, ...]

    def inside(self, scope: str) -> bool:
        """Whether a loop of that name scope surrounds it."""
        return any(in_scope(loop.op_name, scope) for loop in self.loops)


def in_scope(op_name: str, scope: str) -> bool:
    """Whether an op_name is inside a name scope, which transformations such as `jvp` may wrap."""
    return any(re.fullmatch(rf"(\w+\()*{re.escape(scope)}\)*", part) for part in op_name.split("/"))


def parse(text: str) -> Module:
    """Read the text of an optimized HLO module, as `jax.stages.Compiled.as_text` gives it.

    Raises:
        ValueError: if there is no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    current = None
    header = text.split("\n", 1)[0]
    devices = math.prod(
        int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    )
    for line in text.splitlines():
        if not line.startswith(" "):
            opened = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
            if opened and not line.startswith("HloModule"):
                current = Computation(opened.group(2), {})
                computations[current.name] = current
                entry = current.name if opened.group(1) else entry
        elif current is not None and (instruction := _instruction(line)) is not None:
            current.instructions[instruction.name] = instruction
    if not entry:
        raise ValueError("HLO text: it has no ENTRY computation")
    return Module(computations, entry, devices, _lines(text))


@contextlib.contextmanager
def names_of_this_code() -> Iterator[None]:
    """Compile with the name scopes and lines of the code that runs.

    JAX's compile cache tells programs apart without them by default: it returns a program that was
    kept under names which have changed since, and what is counted by name is then wrong.
    """
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


def walk(module: Module, trip_counts: TripCounts = lambda op_name: None) -> Iterator[Visit]:
    """Visit every instruction of the program, those of called computations included.

    Args:
        module: the program.
        trip_counts: for loops whose count the compiler does not know.
    """
    return _walk(module, module.entry, 1.0, (), trip_counts)


def _walk(
    module: Module, name: str, count: float, loops: tuple[Loop, ...], trip_counts: TripCounts
) -> Iterator[Visit]:
    computation = module.computations[name]
    for instruction in computation.instructions.values():
        yield Visit(instruction, computation, count, loops)
        if instruction.opcode in _ELEMENTWISE or instruction.opcode.endswith(("-done", "-update")):
            continue
        inner = count
        around = loops
        if instruction.opcode == "while":
            loop = _loop(module, instruction, trip_counts)
            inner = count * loop.trips
            around = (*loops, loop)
        for called in _called(instruction):
            if called in module.computations:
                yield from _walk(module, called, inner, around, trip_counts)


def _called(instruction: Instruction) -> list[str]:
    # A metadata string may hold anything.
    attributes = re.sub(r"metadata=\{[^}]*\}", "", instruction.attributes)
    names = _CALLED.findall(attributes)
    for branches in _BRANCHES.findall(attributes):
        names += [branch.strip().lstrip("%") for branch in branches.split(",")]
    return names


def _loop(module: Module, instruction: Instruction, trip_counts: TripCounts) -> Loop:
    op_name = instruction.op_name
    if known := _KNOWN_TRIPS.search(instruction.attributes):
        return Loop(op_name, int(known.group(1)), True)
    if (bound := _constant_bound(module, instruction)) is not None:
        return Loop(op_name, bound, True)
    stated = trip_counts(op_name)
    return Loop(op_name, 1.0 if stated is None else stated, stated is not None)


def _constant_bound(module: Module, instruction: Instruction) -> int | None:
    """Trips of a loop `for (i = 0; i < n; i += d)` with constant n and d: JAX's, and the compiler's
    own, unrolled.
    """
    found = re.search(r"\bcondition=%?([\w.\-]+)", instruction.attributes)
    condition = module.computations.get(found.group(1)) if found else None
    if condition is None:
        return None
    compares = [one for one in condition.instructions.values() if one.opcode == "compare"]
    if len(compares) != 1 or "direction=LT" not in compares[0].attributes:
        return None
    counter, limit = (condition.instructions.get(name) for name in compares[0].operands)
    if (bound := _constant(limit)) is None:
        return None
    return math.ceil(bound / _increment(module, instruction, counter))


def _increment(module: Module, loop: Instruction, counter: Instruction | None) -> int:
    """Increment of a loop's counter, 1 if it can't be read: the compiler unrolls the loops that it
    makes.
    """
    place = re.search(r"\bindex=(\d+)", counter.attributes) if counter is not None else None
    found = re.search(r"\bbody=%?([\w.\-]+)", loop.attributes)
    body = module.computations.get(found.group(1)) if found else None
    if (
        place is None
        or body is None
        or (root := list(body.instructions.values())[-1]).opcode != "tuple"
    ):
        return 1
    following = body.instructions.get(root.operands[int(place.group(1))])
    while following is not None and following.opcode == "copy":
        following = body.instructions.get(following.operands[0])
    if following is None or following.opcode != "add":
        return 1
    return next(
        (n for name in following.operands if (n := _constant(body.instructions.get(name)))), 1
    )


def _constant(instruction: Instruction | None) -> int | None:
    """The value of a scalar constant that is a number without a sign."""
    if instruction is None or instruction.opcode != "constant" or not instruction.operands:
        return None
    return int(instruction.operands[0]) if instruction.operands[0].isdigit() else None


def _lines(text: str) -> dict[str, str]:
    """The tables before the first computation: files, lines in them, and stack frames at these."""

    def table(name: str, entry: str) -> list[tuple[str, ...]]:
        return re.findall(
            entry, text.partition(f"\n{name}\n")[2].partition("\n\n")[0], re.MULTILINE
        )

    files = {
        key: "/".join(path.split("/")[-2:]) for key, path in table("FileNames", r'^(\d+) "(.*)"')
    }
    places = table("FileLocations", r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
    lines = {key: f"{files[file]}:{line}" for key, file, line in places}
    return {
        key: lines[place] for key, place in table("StackFrames", r"^(\d+) \{file_location_id=(\d+)")
    }


def _instruction(line: str) -> Instruction | None:
    matched = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if matched is None:
        return None
    start = matched.end()
    stop = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    opcode = re.match(r"\s*([\w\-]+)\(", line[stop:])
    if opcode is None:
        return None
    first = stop + opcode.end() - 1
    last = _closing(line, first)
    return Instruction(
        matched.group(1),
        opcode.group(1),
        _arrays(line[start:stop]),
        _operands(line[first + 1 : last]),
        line[last + 1 :],
    )


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`; the end if there is none."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if not depth:
            return match.start()
    return len(text)


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(dim.strip(" <=")) for dim in dims.split(",") if dim.strip()))
        for dtype, dims in _ARRAY.findall(text)
    )


def _operands(text: str) -> tuple[str, ...]:
    """The last word of each operand, without the type that some versions print before it."""
    text = re.sub(r"/\*.*?\*/", "", text)
    names = []
    depth = 0
    start = 0
    for place, character in enumerate(f"{text},"):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and not depth:
            words = text[start:place].split()
            names += [words[-1].lstrip("%")] if words else []
            start = place + 1
    return tuple(names)
