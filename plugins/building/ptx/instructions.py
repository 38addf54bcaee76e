"""Translation of every PTX instruction to C++ statements over a thread's registers.

A register is an unsigned integer of its width, which contains its bits; a predicate is a bool. Accesses to memory,
barriers and operations of a warp are calls of the runtime (plugins/tests/ptx/run.h).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from .read import BITS, split

SPACES = ("param", "global", "shared", "local", "const")
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">"}
COMPARED |= {"hs": ">="}
ROUNDED = {"rni": "nearbyintf", "rzi": "truncf", "rmi": "floorf", "rpi": "ceilf"}
INFIX = {"and": "&", "or": "|", "xor": "^"}
# Functions of float32. An `approx` instruction calls the host's exact function.
FUNCTIONS = {"sqrt": "sqrtf", "rcp": "1.0f / ", "ex2": "exp2f", "lg2": "log2f", "sin": "sinf", "cos": "cosf"}
FUNCTIONS |= {"neg": "-", "abs": "fabsf", "rsqrt": "1.0f / sqrtf", "tanh": "tanhf"}


class Unknown(Exception):
    """An instruction, or a form of one, that this translation does not support."""


class Scope(Protocol):
    """The kernel of an instruction: its registers and symbols."""

    def register(self, operand: str) -> str:
        """Return the C++ variable of a register."""

    def bits(self, operand: str) -> int:
        """Return the width of a register in bits."""

    def read(self, operand: str, kind: str) -> str:
        """Return an operand's value as an expression of the C++ type of `kind`, a PTX type."""

    def address(self, operand: str) -> str:
        """Return the address of an operand `[base + offset]` as an expression."""

    def site(self) -> int:
        """Return the number of the current source line, as the runtime numbers lines."""


Parts, Operands = list[str], list[str]
Writer = Callable[[Scope, Parts, Operands], str]
WRITERS: dict[str, Writer] = {}


def writes(*names: str) -> Callable[[Writer], Writer]:
    """Return a decorator that registers a function as the translation of the instructions `names`."""

    def register(writer: Writer) -> Writer:
        WRITERS.update(dict.fromkeys(names, writer))
        return writer

    return register


def translate(scope: Scope, name: str, operands: Operands) -> str:
    """Return the C++ statements of an instruction.

    Args:
        scope: Its kernel.
        name: The instruction with its suffixes, for instance "add.f32".
        operands: As PTX writes them.

    Raises:
        Unknown: The instruction, or this form of it, is not supported.
    """
    parts = name.split(".")
    if parts[0] not in WRITERS:
        raise Unknown(name)
    try:
        return WRITERS[parts[0]](scope, parts, operands)
    except (KeyError, IndexError, StopIteration) as error:
        raise Unknown(f"{name} {', '.join(operands)}: {error}") from error


def assign(scope: Scope, target: str, kind: str, value: str) -> str:
    """Return the statement `target = value`; value has the C++ type of `kind`, and signed values widen."""
    if target == "_":
        return f"(void)({value});"
    width = max(scope.bits(target), 8)
    if kind in ("f32", "f64"):
        value = f"bits_of({value})"
    elif kind[0] == "s":
        value = f"(uint{width}_t)(int{width}_t)(int{BITS[kind]}_t)({value})"
    elif kind != "pred":
        value = f"(uint{BITS[kind]}_t)({value})"
    return f"{scope.register(target)} = {value};"


def _unsigned(kind: str) -> str:
    return f"u{BITS[kind]}"


def _inputs(scope: Scope, operands: Operands, *kinds: str) -> list[str]:
    return [scope.read(operand, kind) for operand, kind in zip(operands[1:], kinds, strict=False)]


# ---- control ----


@writes("bra")
def _branch(_: Scope, __: Parts, a: Operands) -> str:
    return f"goto {a[0].replace('$', '_')};"


@writes("ret", "exit")
def _leave(_: Scope, __: Parts, ___: Operands) -> str:
    return "return;"


@writes("trap")
def _trap(scope: Scope, _: Parts, __: Operands) -> str:
    return f'report({scope.site()}, "a trap");'


@writes("bar", "barrier")
def _barrier(scope: Scope, parts: Parts, a: Operands) -> str:
    if a != ["0"] or parts[1] != "sync":
        raise KeyError("of some threads")
    return f"barrier({scope.site()});"


@writes("membar", "fence")
def _fence(_: Scope, parts: Parts, __: Operands) -> str:
    return "fence();" if parts[-1] != "cta" else ""


@writes("griddepcontrol")
def _between_launches(scope: Scope, parts: Parts, _: Operands) -> str:
    return {"wait": f"wait_for_earlier({scope.site()});", "launch_dependents": ""}[parts[1]]


@writes("pragma")
def _nothing(_: Scope, __: Parts, ___: Operands) -> str:
    return ""


# ---- memory ----


@writes("mov")
def _move(scope: Scope, parts: Parts, a: Operands) -> str:
    kind = parts[-1]
    if kind == "pred":
        return assign(scope, a[0], kind, scope.read(a[1], kind))
    bits = BITS[kind]
    if a[0][0] == "{":
        into = split(a[0][1:-1])
        each = bits // len(into)
        lines = [f"uint{bits}_t whole = {scope.read(a[1], _unsigned(kind))};"]
        lines += [f"{scope.register(x)} = (uint{each}_t)(whole >> {i * each});" for i, x in enumerate(into) if x != "_"]
        return "{ " + " ".join(lines) + " }"
    if a[1][0] == "{":
        packed = split(a[1][1:-1])
        each = bits // len(packed)
        shifted = [f"(uint{bits}_t){scope.read(x, f'u{each}')} << {i * each}" for i, x in enumerate(packed)]
        return assign(scope, a[0], _unsigned(kind), " | ".join(shifted))
    return assign(scope, a[0], _unsigned(kind), scope.read(a[1], _unsigned(kind)))


def _access(parts: Parts) -> tuple[str, int, str]:
    """Return the space, the number of elements and the type of a load or a store."""
    space = next((part for part in parts if part in SPACES), "")
    return space, int(next((part[1] for part in parts if part in ("v2", "v4")), 1)), parts[-1]


@writes("ld")
def _load(scope: Scope, parts: Parts, a: Operands) -> str:
    space, count, kind = _access(parts)
    each = BITS[kind] // 8
    into = split(a[0][1:-1]) if a[0][0] == "{" else [a[0]]
    watched = f"read(at, {count * each}, {scope.site()});" if space in ("global", "shared", "") else ""
    exact = f"int{BITS[kind]}_t" if kind[0] == "s" else f"uint{BITS[kind]}_t"
    whole = "s" if kind[0] == "s" else "u"
    lines = [
        assign(scope, x, f"{whole}{max(scope.bits(x), 8)}", f"load<{exact}>(at + {i * each})")
        for i, x in enumerate(into)
        if x != "_"
    ]
    return f"{{ const uint64_t at = {scope.address(a[1])}; {watched} {' '.join(lines)} }}"


@writes("st")
def _store(scope: Scope, parts: Parts, a: Operands) -> str:
    space, count, kind = _access(parts)
    bits = BITS[kind]
    values = split(a[1][1:-1]) if a[1][0] == "{" else [a[1]]
    row = ", ".join(f"(uint{bits}_t){scope.read(x, f'u{bits}')}" for x in values)
    call = "store_local(at, row, sizeof row);" if space == "local" else f"write(at, row, sizeof row, {scope.site()});"
    return f"{{ const uint64_t at = {scope.address(a[0])}; const uint{bits}_t row[{count}] = {{{row}}}; {call} }}"


@writes("cvta")
def _to_space(scope: Scope, _: Parts, a: Operands) -> str:
    return assign(scope, a[0], "u64", scope.read(a[1], "u64"))


@writes("atom", "red")
def _atomic(scope: Scope, parts: Parts, a: Operands) -> str:
    kind = parts[-1]
    if parts[0] == "red":
        a = ["_", *a]
    operation = next(part for part in parts if part in ("add", "min", "max"))
    call = f"atomic_{operation}<{c_type(kind)}>({scope.address(a[1])}, {scope.read(a[2], kind)}, {scope.site()})"
    return assign(scope, a[0], kind, call)


@writes("cp")
def _copy(scope: Scope, parts: Parts, a: Operands) -> str:
    if parts[2] == "commit_group":
        return "copy_commit();"
    if parts[2] in ("wait_group", "wait_all"):
        return f"copy_wait({a[0] if a else 0});"
    if len(a) != 3:
        raise KeyError("filled up with zeros")
    return f"copy_async({scope.address(a[0])}, {scope.address(a[1])}, {a[2]}, {scope.site()});"


# ---- arithmetic ----


def c_type(kind: str) -> str:
    named = {"f32": "float", "f64": "double", "pred": "bool"}
    return named[kind] if kind in named else f"{'int' if kind[0] == 's' else 'uint'}{BITS[kind]}_t"


@writes("add", "sub")
def _add(scope: Scope, parts: Parts, a: Operands) -> str:
    kind, sign = parts[-1], "+" if parts[0] == "add" else "-"
    if kind == "f16x2":
        x, y = _inputs(scope, a, "u32", "u32")
        each = (f"from_f16((uint16_t)({x} >> {at})) {sign} from_f16((uint16_t)({y} >> {at}))" for at in (16, 0))
        return assign(scope, a[0], "u32", f"packed_f16({', '.join(each)})")
    if kind[0] != "f":
        x, y = _inputs(scope, a, _unsigned(kind), _unsigned(kind))
        return assign(scope, a[0], _unsigned(kind), f"{x} {sign} {y}")
    x, y = _inputs(scope, a, kind, kind)
    return assign(scope, a[0], kind, f"add_rz({x}, {sign}{y})" if "rz" in parts else f"{x} {sign} {y}")


@writes("mul", "mad", "fma")
def _multiply(scope: Scope, parts: Parts, a: Operands) -> str:
    kind, bits = parts[-1], BITS[parts[-1]]
    if kind[0] == "f":
        values = ", ".join(_inputs(scope, a, *[kind] * 3))
        if parts[0] == "mul":
            return assign(scope, a[0], kind, "(" + values.replace(", ", ") * (") + ")")
        if set(parts) & {"rp", "rz", "sat"}:
            raise KeyError("rounding")
        fused = "fma_rm" if "rm" in parts else {"f32": "__builtin_fmaf", "f64": "__builtin_fma"}[kind]
        return assign(scope, a[0], kind, f"{fused}({values})")
    wide, whole = ("wide" in parts or "hi" in parts), f"u{bits}"
    x, y = _inputs(scope, a, *[kind if wide else whole] * 2)
    product = f"multiplied({x}, {y})" if wide else f"((uint64_t){x} * (uint64_t){y})"
    out = f"u{2 * bits}" if "wide" in parts else whole
    if "hi" in parts:
        product = f"({product} >> {bits})"
    more = f" + (uint{BITS[out]}_t){scope.read(a[3], out)}" if parts[0] == "mad" else ""
    return assign(scope, a[0], out, f"(uint{BITS[out]}_t){product}{more}")


@writes("div", "rem")
def _divide(scope: Scope, parts: Parts, a: Operands) -> str:
    kind = parts[-1]
    x, y = _inputs(scope, a, kind, kind)
    if kind[0] == "f":
        return assign(scope, a[0], kind, f"{x} / {y}")
    return assign(scope, a[0], kind, f"{'quotient' if parts[0] == 'div' else 'remainder_of'}({x}, {y})")


@writes("min", "max")
def _extreme(scope: Scope, parts: Parts, a: Operands) -> str:
    kind = parts[-1]
    if "NaN" in parts:
        raise KeyError("NaN")
    x, y = _inputs(scope, a, kind, kind)
    if kind == "f32":
        return assign(scope, a[0], kind, f"f{parts[0]}f({x}, {y})")
    return assign(scope, a[0], kind, f"{x} {'<' if parts[0] == 'min' else '>'} {y} ? {x} : {y}")


@writes("neg", "abs", *(set(FUNCTIONS) - {"neg", "abs"}))
def _function(scope: Scope, parts: Parts, a: Operands) -> str:
    kind = parts[-1]
    if kind == "f32":
        value = f"{FUNCTIONS[parts[0]]}({scope.read(a[1], kind)})"
        return assign(scope, a[0], kind, f"flushed({value})" if "ftz" in parts else value)
    if parts[0] == "neg":
        return assign(scope, a[0], _unsigned(kind), f"0 - {scope.read(a[1], _unsigned(kind))}")
    x = scope.read(a[1], kind)
    return assign(scope, a[0], kind, {"abs": f"{x} < 0 ? -{x} : {x}"}[parts[0]])


@writes("copysign")
def _copy_sign(scope: Scope, parts: Parts, a: Operands) -> str:
    sign, x = _inputs(scope, a, "f32", "f32")
    return assign(scope, a[0], parts[-1], f"copysignf({x}, {sign})")


@writes("and", "or", "xor")
def _logic(scope: Scope, parts: Parts, a: Operands) -> str:
    kind = "pred" if parts[-1] == "pred" else _unsigned(parts[-1])
    x, y = _inputs(scope, a, kind, kind)
    return assign(scope, a[0], kind, f"{x} {INFIX[parts[0]]} {y}")


@writes("not")
def _invert(scope: Scope, parts: Parts, a: Operands) -> str:
    if parts[-1] == "pred":
        return assign(scope, a[0], "pred", f"!{scope.read(a[1], 'pred')}")
    kind = _unsigned(parts[-1])
    return assign(scope, a[0], kind, f"~{scope.read(a[1], kind)}")


@writes("shl", "shr")
def _shift(scope: Scope, parts: Parts, a: Operands) -> str:
    kind = parts[-1] if parts[-1][0] == "s" else _unsigned(parts[-1])
    x, by = _inputs(scope, a, kind, "u32")
    return assign(scope, a[0], kind, f"shifted_{'left' if parts[0] == 'shl' else 'right'}({x}, {by})")


@writes("lop3", "prmt", "shf", "bfe", "bfi")
def _of_bits(scope: Scope, parts: Parts, a: Operands) -> str:
    if parts[0] in ("shf", "bfe") and parts[1:] not in (["l", "wrap", "b32"], ["r", "wrap", "b32"], ["u32"]):
        raise KeyError("form")
    name = f"shf_{parts[1]}" if parts[0] == "shf" else parts[0]
    return assign(scope, a[0], "u32", f"{name}({', '.join(_inputs(scope, a, *['u32'] * 4))})")


@writes("popc", "clz")
def _counted(scope: Scope, parts: Parts, a: Operands) -> str:
    x = scope.read(a[1], _unsigned(parts[-1]))
    return assign(scope, a[0], "u32", f"{'ones' if parts[0] == 'popc' else 'leading_zeros'}({x})")


@writes("selp")
def _choose(scope: Scope, parts: Parts, a: Operands) -> str:
    kind = _unsigned(parts[-1])
    x, y, condition = _inputs(scope, a, kind, kind, "pred")
    return assign(scope, a[0], kind, f"{condition} ? {x} : {y}")


@writes("setp")
def _compare(scope: Scope, parts: Parts, a: Operands) -> str:
    kind, how = parts[-1], parts[1]
    x, y = _inputs(scope, a, kind, kind)
    if kind[0] == "f" and how in ("nan", "num"):
        value = f"{'!' if how == 'num' else ''}unordered({x}, {y})"
    elif kind[0] == "f" and how not in COMPARED:
        value = f"({x} {COMPARED[how.removesuffix('u')]} {y} || unordered({x}, {y}))"
    else:
        value = f"{x} {COMPARED[how]} {y}"
        if kind[0] == "f" and how == "ne":
            value = f"({value} && !unordered({x}, {y}))"
    if len(parts) > 3 and parts[2] in INFIX:
        other = a[3].removeprefix("!")
        value = f"({value}) {INFIX[parts[2]]} {'!' if other != a[3] else ''}{scope.read(other, 'pred')}"
    elif len(parts) > 3 and parts[2] != "ftz":
        raise KeyError("form")
    if "|" in a[0]:
        raise KeyError("two results")
    return assign(scope, a[0], "pred", value)


@writes("cvt")
def _convert(scope: Scope, parts: Parts, a: Operands) -> str:
    how, to, start = set(parts[1:-2]), parts[-2], parts[-1]
    rounded = next((ROUNDED[one] for one in how if one in ROUNDED), "")
    if to == "f16x2":
        high, low = _inputs(scope, a, "f32", "f32")
        return assign(scope, a[0], "u32", f"packed_f16({high}, {low})")
    if start == "f16" and to == "f32":
        return assign(scope, a[0], to, f"from_f16({scope.read(a[1], 'u16')})")
    if to == "f16" and start == "f32" and "rn" in how:
        return assign(scope, a[0], "u16", f"to_f16({scope.read(a[1], 'f32')})")
    if start == "f32" and to == "f32":
        x = f"{rounded}({scope.read(a[1], 'f32')})"
        return assign(scope, a[0], to, f"saturated({x})" if "sat" in how else x)
    if start == "f32" and to[0] in "su":
        return assign(scope, a[0], to, f"whole<{c_type(to)}>({rounded}({scope.read(a[1], 'f32')}))")
    if to[0] == "f" and how <= {"rn"}:
        return assign(scope, a[0], to, f"({c_type(to)}){scope.read(a[1], start)}")
    if start[0] in "su" and to[0] in "su" and not how:
        return assign(scope, a[0], to, f"({c_type(to)}){scope.read(a[1], start)}")
    raise KeyError("form")


# ---- a warp together ----


@writes("shfl")
def _shuffle(scope: Scope, parts: Parts, a: Operands) -> str:
    if parts[2] != "bfly":
        raise KeyError("form")
    to, _, ok = a[0].partition("|")
    values = ", ".join(_inputs(scope, a, *["u32"] * 4))
    result = f"const Shuffled result = shuffle({values}, {scope.site()});"
    second = assign(scope, ok, "pred", "result.inside") if ok else ""
    return f"{{ {result} {assign(scope, to, 'u32', 'result.value')} {second} }}"


@writes("redux")
def _reduce(scope: Scope, parts: Parts, a: Operands) -> str:
    if parts[1:] != ["sync", "max", "s32"]:
        raise KeyError("form")
    x, mask = _inputs(scope, a, "s32", "u32")
    return assign(scope, a[0], "s32", f"warp_max({x}, {mask}, {scope.site()})")


@writes("ldmatrix")
def _load_matrices(scope: Scope, parts: Parts, a: Operands) -> str:
    if "x4" not in parts:
        raise KeyError("form")
    call = f"load_matrices({scope.address(a[1])}, {str('trans' in parts).lower()}, rows, {scope.site()});"
    lines = [assign(scope, x, "u32", f"rows[{i}]") for i, x in enumerate(split(a[0][1:-1]))]
    return f"{{ uint32_t rows[4]; {call} {' '.join(lines)} }}"


@writes("mma")
def _multiply_matrices(scope: Scope, parts: Parts, a: Operands) -> str:
    if "m16n8k16" not in parts or parts[-4:] != ["f32", "f16", "f16", "f32"]:
        raise KeyError("form")
    d, x, y, z = (split(operand[1:-1]) for operand in a)
    values = [", ".join(scope.read(one, kind) for one in row) for row, kind in ((x, "u32"), (y, "u32"), (z, "f32"))]
    rows = f"const Matrices in{{{{{values[0]}}}, {{{values[1]}}}, {{{values[2]}}}}};"
    lines = [assign(scope, one, "f32", f"sum[{i}]") for i, one in enumerate(d)]
    return f"{{ {rows} float sum[4]; multiply(in, sum, {scope.site()}); {' '.join(lines)} }}"


def literal(operand: str, kind: str) -> str | None:
    """Return a number as an expression of its type; None if the operand is not a number."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
        bits = f"0x{operand[2:]}u"
        return f"as_float({bits})" if kind == "f32" else bits
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
        return f"as_double(0x{operand[2:]}ull)"
    if not re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
        return None
    value = int(operand.rstrip("U"), 0)
    return f"({c_type(kind)}){value & (1 << BITS[kind]) - 1}ull"
