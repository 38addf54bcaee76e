"""The version, one number for the package and the distribution."""

from __future__ import annotations

__version__ = "0.1.0"
