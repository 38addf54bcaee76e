"""Translation of a kernel's PTX to one C++ function, with the bytes of its shared memory and parameters."""

from __future__ import annotations

import re
from collections import defaultdict

from .instructions import Unknown, c_type, literal, split, translate
from .read import BITS, VARIABLE, Kernel, Module, statements
from .trips import LEAVES

SPECIAL = {"%tid.x": "thread().number", "%ctaid.x": "launched().block", "%ntid.x": "launched().threads"}
SPECIAL |= {"%laneid": "(thread().number & 31)", "%globaltimer": "__builtin_ia32_rdtsc()"}  # a clock of unknown rate
LINE_BITS = 16  # the bits of a site's number that are the line; the others are the file's number


class _Function:
    """The translation of one kernel; a Scope of instructions.py."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        self.registers: dict[str, int] = {}
        self.shared: dict[str, int] = {}  # offsets of shared variables
        self.local: dict[str, int] = {}  # bytes of local variables
        self.shared_bytes = 0
        self.scopes: list[dict[str, str]] = []  # registers of inner scopes, which may hide outer ones
        self.lines: list[str] = []
        self.at = 0  # the site of the current statement
        self.pending = 0  # instructions of the current stretch
        self.counted_at = -1  # the line that counts this stretch
        self.stretch = 0  # its number in trips.Stretches

    # ---- the methods of a Scope ----

    def register(self, operand: str) -> str:
        for scope in reversed(self.scopes):
            if operand in scope:
                return scope[operand]
        return "r_" + re.sub(r"\W", "_", operand.lstrip("%"))

    def bits(self, operand: str) -> int:
        return self.registers[self.register(operand)]

    def read(self, operand: str, kind: str) -> str:
        if (number := literal(operand, kind)) is not None:
            return number
        if operand in SPECIAL:
            value = SPECIAL[operand]
        elif self._is_register(operand):
            value = self.register(operand)
        else:
            value = self._symbol(operand)
        if kind == "pred":
            return value
        if kind in ("f32", "f64"):
            return f"as_{c_type(kind)}({value})"
        return f"({c_type(kind)})({value})"

    def address(self, operand: str) -> str:
        match = re.fullmatch(r"\[\s*(.+?)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if match is None:
            raise KeyError(operand)
        base = self.register(match[1]) if self._is_register(match[1]) else self._symbol(match[1])
        return f"((uint64_t){base} + {int(match[2] or 0)}ll)"

    def site(self) -> int:
        return self.at

    def _is_register(self, operand: str) -> bool:
        return operand[0] == "%" or any(operand in scope for scope in self.scopes)

    def _symbol(self, name: str) -> str:
        if name in self.shared:
            return f"(launched().shared + {self.shared[name]})"
        if name in self.module.dynamic:
            return "(launched().shared + kShared)"
        if name in self.local:
            return f"((uint64_t)local_{name})"
        if name in self.module.constants:
            return f"((uint64_t)constant_{name})"
        return f"(launched().arguments + {self.kernel.parameters[name]})"

    # ---- statements ----

    def text(self) -> str:
        """Return the C++ of the function `kernel_main`, and of `kShared` and `kParameters`.

        Raises:
            Unknown: The kernel has a statement that is not supported.
        """
        for one in statements(self.kernel.body):
            self._statement(one)
        self._count()
        head = [f"constexpr int kShared = {self.shared_bytes}, kParameters = {self.kernel.parameter_bytes};"]
        used = "\n".join(self.lines)
        head += [text for name, text in self.module.constants.items() if f"constant_{name}" in used]
        head.append("void kernel_main() {")
        head += [f"alignas(16) uint8_t local_{name}[{size}];" for name, size in self.local.items()]
        of_width = defaultdict(list)
        for name, bits in self.registers.items():
            of_width["bool" if bits == 1 else f"uint{bits}_t"].append(f"{name} = 0")
        head += [f"{kind} {', '.join(names)};" for kind, names in of_width.items()]
        return "\n".join([*head, *self.lines, "}"])

    def _statement(self, text: str) -> None:
        if text == "{":
            self.scopes.append({})
        elif text == "}":
            self.scopes.pop()
        elif text.startswith(".loc "):
            file, line = text.split()[1:3]
            self.at = int(file) << LINE_BITS | min(int(line), (1 << LINE_BITS) - 1)
        elif text.startswith("."):
            self._declare(text)
        elif text.endswith(":"):
            self._count()
            self.lines.append(text.replace("$", "_") + ";")
            self.stretch += 1
            self._begin_count()
        else:
            self._instruction(text)

    def _declare(self, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(maxsplit=2)
            for name in split(names):
                many = re.fullmatch(r"(.+)<(\d+)>", name)
                for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                    if self.scopes:
                        self.scopes[-1][one] = f"inner{len(self.registers)}_{one.lstrip('%')}"
                    self.registers[self.register(one)] = BITS[kind[1:]]
        elif variable := VARIABLE.match(text):
            size = BITS[variable[2]] // 8 * int(variable[4] or 1)
            if variable[1] == "local":
                self.local[variable[3]] = size
            else:
                self.shared[variable[3]] = self.shared_bytes
                self.shared_bytes += (size + 15) // 16 * 16
        elif not text.startswith(".pragma"):
            raise Unknown(text)

    def _instruction(self, text: str) -> None:
        guard = re.match(r"@(!?)(%\w+)\s+", text)
        name, _, rest = text[guard.end() if guard else 0 :].partition(" ")
        self.pending += name != "pragma"
        if self.counted_at < 0:
            self._begin_count(self.pending)
        line = translate(self, name, split(rest))
        if guard:
            line = f"if ({guard[1]}{self.register(guard[2])}) {{ {line} }}"
        leaves = name.split(".")[0] in LEAVES
        if leaves:
            self._count()
        self.lines.append(line)
        if leaves:
            self.stretch += 1
            self._begin_count()

    # A stretch of instructions without a branch or label is counted by one statement at its beginning.
    def _begin_count(self, pending: int = 0) -> None:
        self.counted_at, self.pending = len(self.lines), pending
        self.lines.append("")

    def _count(self) -> None:
        if self.counted_at >= 0 and self.pending:
            self.lines[self.counted_at] = f"count({self.stretch}, {self.pending});"
        self.pending = 0


def source(module: Module, kernel: Kernel, program: str) -> str:
    """Return the C++ file of one kernel, which registers itself under its program's name."""
    function = _Function(module, kernel).text()
    files = ", ".join(f'{{{number}, "{name}"}}' for number, name in sorted(module.files.items()))
    known = f'const Known known{{"{program}", kernel_main, kShared, kParameters, {{{files}}}}};'
    return f'#include "run.h"\nnamespace {{\nusing namespace kv::ptx;\n{function}\n{known}\n}}\n'
