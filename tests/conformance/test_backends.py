"""Tests of the list of implementations that the conformance suite runs."""

from collections.abc import Callable

import pytest

from tests.conformance.backends import BACKENDS, Backend, chosen, reached
from tests.conformance.cases import MERGE_PROFILES


def test_every_requested_backend_is_known_and_unavailable_ones_are_named(
    record_property: Callable[[str, object], None],
) -> None:
    known = {backend.name: backend for backend in BACKENDS}
    assert len(known) == len(BACKENDS), "two backends have one name"
    unknown = [name for name in chosen() if name not in known]
    assert not unknown, f"KVEXPORT_BACKENDS names {', '.join(unknown)}; known: {', '.join(known)}"
    reasons = {name: known[name].available() for name in known}
    for name, reason in reasons.items():
        if reason is not None:
            record_property("not reached", f"{name}: {reason}")
            print(f"conformance: {name} was not reached: {reason}")
    assert {backend.name for backend in reached()} == {name for name in chosen() if reasons[name] is None}


def test_backends_requested_by_name_must_be_available() -> None:
    import os

    if os.environ.get("KVEXPORT_BACKENDS"):
        missing = {b.name: b.available() for b in BACKENDS if b.name in chosen() and b.available() is not None}
        assert not missing, f"asked for and not reached: {missing}"


def test_the_reference_backends_are_always_reached() -> None:
    always = {backend.name for backend in BACKENDS if backend.name in ("torch", "onnx-function")}
    assert always == {"torch", "onnx-function"}
    assert {b.name for b in reached()} >= always & set(chosen())


# The methods without a native kernel, and why. Their graphs run as ONNX functions. A new method needs a kernel or an
# entry here.
WITHOUT_NATIVE_KERNEL = {
    "kvmerger": "the method kvmerger has no native kernel: it has no merge policy",
    "cam": "the method cam has no native kernel: it has no merge policy",
    "d2o": "the method d2o has no native kernel: it has no merge policy",
    "random": "the method random has no native kernel: it has no merge policy",
    "asymkv": "share_pairs has no native kernel",
}


@pytest.mark.parametrize(
    "backend", [b for b in reached() if b.name.startswith("native")], ids=lambda backend: backend.name
)
def test_the_missing_operators_of_a_native_backend_are_listed(backend: Backend) -> None:
    lacking = {profile.method: backend.lacks(profile.attributes(1)) for profile in MERGE_PROFILES}
    assert {method: why for method, why in lacking.items() if why} == WITHOUT_NATIVE_KERNEL
