"""Suppression of the output of torch's exporter and transformers on the user's terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Suppress prints, log lines and warnings of torch.export and torch.onnx. Errors are still raised."""
    loggers = [
        logging.getLogger(name)
        for name in (
            "torch.onnx",
            "torch.export",
            "torch._subclasses.fake_tensor",
            "transformers",
            "onnxscript",
            "onnx_ir",
        )
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    bars = _transformers_bars()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            bars.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _transformers_bars() -> Any:
    from transformers.utils import logging as bars

    if not bars.is_progress_bar_enabled():
        return None
    bars.disable_progress_bar()
    return bars
