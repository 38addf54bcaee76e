"""The PTX of the CUDA kernels, run on the host.

The runner finds mutants that lack an instruction that orders memory. The kernels take no more instructions and no more
round trips than plugins/cuda/instructions.json records.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plugins.building import make, resources
from plugins.building.ptx import instructions, read, translate, trips
from tests.conformance.cuda_library import CudaPtx, PtxCaller
from tests.conformance.ptx_mutants import CALLS, MULTIPROCESSORS, found, without, writes_early
from tests.plugins import instruction_counts

needs_library = pytest.mark.skipif(CudaPtx().available() is not None, reason=f"not reached: {CudaPtx().available()}")
MODULE = """
.version 9.0
.extern .shared .align 16 .b8 all[];
.visible .entry _Z3run(.param .align 8 .b8 _Z3run_param_0[12])
{
	.reg .b32 %r<3>;
	.loc	1 7 3
	ld.param.u32 	%r1, [_Z3run_param_0+8];
	$L__one: add.s32 %r2, %r1, -2; // a comment
	LINE
	ret;
}
.file 1 "/somewhere/kernel.h"
"""


def test_a_kernel_becomes_a_function() -> None:
    module = read.module(MODULE.replace("LINE", "st.shared.u32 [all+4], %r2;"))
    (kernel,) = module.kernels
    assert (kernel.parameter_bytes, module.files) == (12, {1: "kernel.h"})
    text = translate.source(module, kernel, "Run")
    assert "r_r2 = (uint32_t)((uint32_t)(r_r1) + (uint32_t)4294967294ull);" in text
    assert f"write(at, row, sizeof row, {1 << 16 | 7});" in text
    assert 'known{"Run", kernel_main, kShared, kParameters, {{1, "kernel.h"}}}' in text


@pytest.mark.parametrize("line", ["elect.sync %r1, %r2;", "shfl.sync.up.b32 %r1, %r2, 1, 0, -1;", "bar.sync 1, 64;"])
def test_unknown_ptx_instructions_are_named(line: str) -> None:
    module = read.module(MODULE.replace("LINE", line))
    with pytest.raises(instructions.Unknown, match=line.split()[0]):
        translate.source(module, module.kernels[0], "Run")


@needs_library
@pytest.mark.parametrize("kind", ["wait", "fence"])
def test_mutants_of_a_decode_step_are_detected(kind: str, tmp_path: Path) -> None:
    message = found("Decode<float, 4>", without(kind), tmp_path / "mutant.so")
    assert {"wait": "an asynchronous copy is filling", "fence": "nothing orders the two"}[kind] in message


@needs_library
def test_a_merge_without_barriers_is_detected(tmp_path: Path) -> None:
    assert "in the same phase" in found("Order", without("barrier"), tmp_path / "mutant.so")


@needs_library
@pytest.mark.parametrize(
    ("alter", "report"),
    [
        (without("earlier"), "reads global bytes before it has waited for earlier launches"),
        (writes_early, "writes global bytes before it has waited for earlier launches"),
    ],
    ids=["no wait", "a write before"],
)
def test_kernels_that_begin_before_earlier_ones_have_ended_are_detected(
    alter: Callable[[str], str], report: str, tmp_path: Path
) -> None:
    assert report in found("Order", alter, tmp_path / "mutant.so")


@needs_library
@pytest.mark.parametrize("program", CALLS)
def test_the_kernels_as_they_are_give_one_result_in_every_order(program: str) -> None:
    caller, results = PtxCaller(make.build("cuda-ptx")), []
    for order, late in ((0, False), (2, True)):
        caller.set_order(order, late=late, multiprocessors=MULTIPROCESSORS)
        results.append({name: x.tobytes() for name, x in CALLS[program](caller).items()})
    caller.set_order(2, late=True)
    assert results[0] == results[1]


@needs_library
def test_kernels_take_no_more_instructions_than_recorded() -> None:
    recorded = json.loads(instruction_counts.RECORD.read_text())
    caller = PtxCaller(make.build("cuda-ptx"))
    caller.set_order(0, late=False, multiprocessors=1)
    measured, allowed = instruction_counts.measured(caller), recorded["instructions of a warp"]
    caller.set_order(2, late=True)
    assert measured.keys() == allowed.keys()
    if resources.compiler_version() != recorded["compiler"]:
        pytest.skip("not reached: another nvcc than the recorded one makes other instructions")
    more = {name: f"{count}, not {allowed[name]}" for name, count in measured.items() if count > 1.001 * allowed[name]}
    assert not more, f"{more}; if that is meant: python -m tests.plugins.instruction_counts"


@needs_library
def test_steps_and_merges_in_per_head_budgets_take_the_instructions_of_those_in_equal_budgets() -> None:
    """KV heads of several capacities take at most 1.03 times the instructions of heads of one capacity."""
    caller = PtxCaller(make.build("cuda-ptx"))
    measured = instruction_counts.measured_budgets(caller)
    caller.set_order(2, late=True)
    assert measured and max(measured.values()) <= 1.03, measured


LOOP = """
.visible .entry _Z3run(.param .u64 _Z3run_param_0)
{
	ld.param.u64 %rd1, [_Z3run_param_0];
	mov.b32 %r1, 0;
	$L__one:
	BODY
	add.s64 %rd1, %rd1, 64;
	setp.lt.s32 %p1, %r1, 8;
	@%p1 bra $L__one;
	ret;
}
"""
FROM_HALF = "cvt.f32.f16 %f1, %rs1; fma.rn.f32 %f0, %f1, %f1, %f0;"


@pytest.mark.parametrize(
    ("body", "trips_of_loop", "narrow"),
    [
        (f"ld.global.u16 %rs1, [%rd1]; {FROM_HALF}", 1, True),
        (f"ld.global.u16 %rs1, [%rd1]; {FROM_HALF} @%p2 bra $L__two; ld.global.u16 %rs1, [%rd1+2]; {FROM_HALF} "
         "$L__two:", 2, True),
        ("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1]; add.s32 %r1, %r2, %r3;", 1, False),
        # Loads of one stretch are in flight together, and an unused load costs no trip.
        ("ld.global.u16 %rs1, [%rd1]; ld.global.u16 %rs2, [%rd1+2]; add.s16 %rs3, %rs1, %rs2;", 1, False),
        ("ld.global.u32 %r2, [%rd1];", 0, False),
        # A loaded address, a copy with a later wait, and a fence.
        ("ld.global.u64 %rd2, [%rd1]; ld.global.u32 %r2, [%rd2]; add.s32 %r3, %r2, 1;", 2, False),
        ("ld.global.u32 %r2, [%rd1]; add.s32 %r3, %r2, 1; membar.gl;", 2, True),
    ],
)  # fmt: skip
def test_round_trips_of_a_loop_are_counted(body: str, trips_of_loop: int, narrow: bool) -> None:
    (kernel,) = read.module(LOOP.replace("BODY", body)).kernels
    (loop,) = trips.loops(trips.stretches(kernel))
    assert (loop.trips, loop.is_narrow) == (trips_of_loop, narrow)


def test_copies_cost_a_trip_where_they_are_waited_for() -> None:
    copy = "cp.async.cg.shared.global [%r9], [%rd1], 16; cp.async.commit_group;"
    for body, expected in ((f"{copy} cp.async.wait_group 0;", 1), (f"{copy} cp.async.wait_group 1;", 0)):
        (kernel,) = read.module(LOOP.replace("BODY", f"ld.global.u32 %r2, [%rd1]; {body}")).kernels
        parts = trips.stretches(kernel)
        assert trips.along(parts, range(len(parts.all))) == expected


@needs_library
def test_kernels_wait_for_no_more_round_trips_than_recorded() -> None:
    recorded = json.loads(instruction_counts.RECORD.read_text())
    if resources.compiler_version() != recorded["compiler"]:
        pytest.skip("not reached: another nvcc than the recorded one makes other instructions")
    caller = PtxCaller(make.build("cuda-ptx"))
    caller.set_order(0, late=False, multiprocessors=1)
    calls, allowed = instruction_counts.measured_trips(caller), recorded["round trips of a call"]
    caller.set_order(2, late=True)
    assert calls.keys() == allowed.keys()
    again = "if that is meant: python -m tests.plugins.instruction_counts"
    assert not {name: count for name, count in calls.items() if count > allowed[name]}, again
