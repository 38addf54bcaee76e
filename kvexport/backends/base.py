"""The interface between kvexport's engine and a backend: the library that runs an artifact's ONNX graphs.

This module imports only the standard library, so that `kvexport doctor` works on a machine that lacks packages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from kvexport.artifact.manifest import Manifest
    from kvexport.backends.adapters import Adapters
    from kvexport.backends.model_state import LoadedModel
    from kvexport.methods.base import Method
    from kvexport.packages import Package
    from kvexport.recipe.fields import Recipe
    from kvexport.report import Section
    from kvexport.terminal import Progress

# A function that opens an ONNX model of one node, given as bytes, with a number of threads. The opened model has the
# methods `run` and `get_inputs` of an ONNX Runtime session.
NodeOpener = Callable[[bytes, int], Any]
# A function that adds the files of a backend, such as TensorRT engines, to an artifact that is being built. It returns
# the manifest with these files.
Preparation = Callable[["Path", "Manifest", Callable[[str, "int | None"], "Progress"]], "Manifest"]


@dataclass(frozen=True)
class LoadOptions:
    """Settings that replace those of an artifact's recipe while its model is loaded; None keeps the recipe's setting.

    A backend ignores settings that do not apply to it.

    Attributes:
        threads: The number of CPU threads.
        device: The device to run on.
        cuda_graph: Whether decode steps and merges are replayed as CUDA graphs.
        float_input: Whether packed (quantized) weights are multiplied with unrounded inputs, even if the ONNX graph
            allows kernels to round the inputs.
        adapters: The LoRA adapters, for a decoder that was built to take adapters.
    """

    threads: int | None = None
    device: str | None = None
    cuda_graph: bool | None = None
    float_input: bool = False
    adapters: Adapters | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The state of a backend's installation on this machine, as `kvexport doctor` reports it.

    Attributes:
        rows: The rows of the report, as text.
        data: The same content as JSON values.
        broken: Packages that are installed but cannot be used, each with the reason.
        provided: Packages whose Python module another package provides.
        lacks: Missing requirements, other than packages, without which the backend runs nothing.
    """

    rows: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    provided: frozenset[str] = frozenset()
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """The report of a backend about an exported model, as `kvexport inspect` prints it.

    Attributes:
        sections: The sections of the report, as text.
        data: The same content as JSON values.
    """

    sections: tuple[Section, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Runners:
    """Objects that run an exported model's ONNX graphs, so that `kvexport validate` can compare them with PyTorch.

    Past and present state have separate buffers. Each runner is a context manager with `infer(feed) -> outputs`, as the
    runners of the package polygraphy are.

    Attributes:
        decode: Runs the decoder for calls with one token of each batch lane.
        prefill: Runs the decoder for calls with several tokens of each batch lane.
        merge: Runs the merge graph, which compresses KV caches. None if no layer merges.
        open_decoder: A function that takes the bytes of another decoder's ONNX graph and opens an ONNX Runtime session
            of it over the same weights. None if the backend does not run ONNX graphs.
    """

    decode: Any
    prefill: Any
    merge: Any
    open_decoder: Callable[[bytes], Any] | None = None


class Backend(ABC):
    """Base class of a backend: a library that runs an exported model's ONNX graphs.

    kvexport uses backends only through this class. Each backend's folder has one subclass, in `backend.py`.

    Attributes:
        name: The backend's name, which is also the name of its folder.
        packages: The Python packages that the backend needs.
        prepared: The files that the backend's `preparation` may add to an artifact; empty if it adds none.
        verified: The files whose SHA-256 the backend checks itself when `load` reads them.
        runs_adapters: Whether the backend runs decoders that take LoRA adapters.
        runs_images: Whether the backend runs image encoders, and decoders that take embeddings of images.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[Package, ...]] = ()
    prepared: ClassVar[frozenset[str]] = frozenset()
    verified: ClassVar[frozenset[str]] = frozenset()
    runs_adapters: ClassVar[bool] = False
    runs_images: ClassVar[bool] = False

    @abstractmethod
    def problems(self, recipe: Recipe) -> list[tuple[str, str]]:
        """Return why this machine cannot run a recipe's model, as (reason, fix) pairs; empty if it can."""

    @abstractmethod
    def load(self, path: Path, manifest: Manifest, options: LoadOptions) -> LoadedModel:
        """Load an exported model from its artifact folder, ready to run.

        Raises:
            EnvironmentProblem: If this machine lacks something that the backend needs.
            ArtifactError: If the artifact lacks files that `preparation` adds, such as TensorRT engines.
            UsageError: If an option has an impossible value.
        """

    @abstractmethod
    def runners(self, model: Any, manifest: Manifest) -> Runners:
        """Return objects that run a loaded model's ONNX graphs, for `kvexport validate` to compare with PyTorch.

        Args:
            model: The model that `load` returned.
            manifest: The manifest of the artifact.
        """

    def device(self, recipe: Recipe) -> str | None:
        """Return the device that a recipe chooses, such as "cuda"; None if the backend has no choice of devices."""
        return None

    def needs_gpu(self, recipe: Recipe) -> bool:
        """Return whether the artifact of a recipe runs only on a machine with an NVIDIA GPU."""
        return self.device(recipe) == "cuda"

    def preparation(self, recipe: Recipe) -> Preparation | None:
        """Return a function that a build calls after it wrote the ONNX graphs, or None if the backend needs none.

        A build calls this method before all other work, so that missing packages are reported at once, as an
        EnvironmentProblem.
        """
        return None

    def operator_problem(self, recipe: Recipe, operator: str) -> tuple[str, str] | None:
        """Return why the operator Experts or LinearAttention cannot run, and the setting that avoids it; or None."""
        return None

    def library_products(self, recipe: Recipe) -> bool:
        """Return whether matrix products stay ONNX Runtime's operators: true on CUDA, which has no Linear kernel."""
        return False

    def positive_scales(self, recipe: Recipe) -> bool:
        """Return whether the scales of weights that a build rounds to 4 or 8 bits must all be above 0."""
        return False

    def packing_problem(
        self, recipe: Recipe, dtype: str, group: int, *, has_offset: bool, has_table: bool, picked: bool
    ) -> tuple[str, str] | None:
        """Return why a packed (quantized) weight cannot run, and the setting that avoids it; None if it can run.

        A build stores a weight that cannot run as floats. Args: recipe: The recipe.
            dtype: The type of the weight's integer codes, such as int4 or uint6.
            group: The number of consecutive inputs that share a scale.
            has_offset: Whether each scale has a zero point or a minimum.
            has_table: Whether the codes are indices into a table of values.
            picked: Whether single rows of the weight are read, as from an embedding.
        """
        return None

    def node_opener(self, operators: Sequence[str], method: Method) -> NodeOpener | None:
        """Return a function that opens ONNX models of one node with native kernels; None if a kernel is missing."""
        return None

    def operators(self, manifest: Manifest) -> dict[str, str]:
        """Return how this machine runs each operator of an artifact, in words, by operator name."""
        return {op: how for op, how in manifest.operators.items() if how}

    def diagnose(self) -> Diagnosis:
        """Return the state of the backend's installation on this machine, for `kvexport doctor`; never raise."""
        return Diagnosis()

    def describe(self, path: Path, manifest: Manifest) -> Description:
        """Return the backend's report about an artifact, for `kvexport inspect`."""
        return Description()
