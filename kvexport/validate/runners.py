"""polygraphy's runners of an engine's two graphs, past and present in buffers of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvexport.errors import ArtifactError, EnvironmentProblem
from kvexport.runtime.engine import Engine, load

BACKENDS: tuple[tuple[str, str | None], ...] = (("onnxruntime", "cpu"), ("onnxruntime", "cuda"), ("tensorrt", None))


class Runners:
    """Of one engine. merge: None where no layer merges."""

    def __init__(self, engine: Engine) -> None:
        from polygraphy.logger import G_LOGGER

        G_LOGGER.module_severity = G_LOGGER.CRITICAL
        sessions: Any = engine.sessions
        if hasattr(sessions, "trt"):
            from polygraphy.backend.trt import TrtRunner

            from kvexport.backends.tensorrt.engines import DECODE, PREFILL

            several = engine.manifest.limits.prefill_chunk > 1
            self.decode = TrtRunner(sessions.decoder, name="engine", optimization_profile=DECODE)
            self.prefill = (
                TrtRunner(sessions.decoder, name="engine", optimization_profile=PREFILL) if several else self.decode
            )
            self.merge = TrtRunner(sessions.merge, name="engine", optimization_profile=0) if sessions.merge else None
        else:
            from polygraphy.backend.onnxrt import OnnxrtRunner

            self.decode = self.prefill = OnnxrtRunner(sessions.decoder, name="engine")
            self.merge = OnnxrtRunner(sessions.merge, name="engine") if sessions.merge else None


def backends_here(path: Path) -> tuple[list[tuple[str, str | None]], dict[str, str]]:
    """The backends, and devices of ONNX Runtime, that run the artifact at `path` on this machine, and why each other
    one does not."""
    here, missing = [], {}
    for name, device in BACKENDS:
        try:
            load(path, backend=name, device=device, verify=False)
            here.append((name, device))
        except (EnvironmentProblem, ArtifactError) as error:
            missing[f"{name} {device or ''}".rstrip()] = error.problem
    return here, missing
