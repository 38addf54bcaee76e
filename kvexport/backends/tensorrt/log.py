"""Classes that receive TensorRT's log messages and build progress.

The classes derive from TensorRT's own classes, so they are defined after TensorRT is imported.
"""

from typing import Any

from kvexport.terminal import Task

STEPS = 1000  # the number to which a progress bar of a build counts


def make_log(trt: Any) -> Any:
    """Return a `tensorrt.ILogger` with the `lines` of all messages that are not verbose, and the `errors`."""
    severities = trt.ILogger.Severity

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity == severities.VERBOSE:
                return
            self.lines.append(f"[{severity.name}] {msg}")
            if severity in (severities.INTERNAL_ERROR, severities.ERROR):
                self.errors.append(msg)

    return Log()


def make_monitor(trt: Any, task: Task) -> Any:
    """Return a `tensorrt.IProgressMonitor` that advances `task` to `STEPS`, and stops if `interrupted` is set."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interrupted = False
            self._phases: dict[str, tuple[float, int]] = {}  # share of one step in the whole, finished steps
            self._shown = 0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            # A phase is one step of its parent. A phase without a parent starts from the beginning.
            share = self._phases[parent_phase][0] if parent_phase in self._phases else 1.0
            self._phases[phase_name] = (share / num_steps, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._phases:
                self._phases[phase_name] = (self._phases[phase_name][0], step + 1)
                self._show()
            return not self.interrupted

        def phase_finish(self, phase_name: str) -> None:
            self._phases.pop(phase_name, None)

        def _show(self) -> None:
            done = min(STEPS, int(STEPS * sum(share * steps for share, steps in self._phases.values())))
            if done > self._shown:
                task.advance(done - self._shown)
                self._shown = done

    return Monitor()
