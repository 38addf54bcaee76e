"""The interface between the engine and a backend, which runs an artifact's ONNX graphs.

Importing this module needs only the standard library, so that `kvexport doctor` can use it on a machine where packages
are missing.
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
    from kvexport.plan.cache import CachePlan
    from kvexport.recipe.fields import Recipe
    from kvexport.report.sections import Section
    from kvexport.terminal import Progress

# A function that opens the bytes of an ONNX model of one node with a number of threads; the result has `run` and
# `get_inputs`.
NodeOpener = Callable[[bytes, int], Any]
# A function that adds a backend's files to a staged artifact and returns the manifest with these files.
Preparation = Callable[["Path", "Manifest", Callable[[str, "int | None"], "Progress"]], "Manifest"]


@dataclass(frozen=True)
class LoadOptions:
    """Run-time settings that override an artifact's recipe while its model is loaded; None keeps the recipe's setting.

    A backend ignores settings that it does not have.

    Attributes:
        threads: The number of threads.
        device: The device to run on.
        cuda_graph: Whether calls are replayed as CUDA graphs.
        float_input: Whether packed weights are multiplied with unrounded inputs, even if the ONNX graph allows
            rounding.
        adapters: The LoRA adapters, for a decoder that was built for adapters.
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
        broken: Packages that are installed but unusable, with the reason.
        provided: Packages whose module is provided by another package.
        lacks: Other missing requirements, without which nothing runs.
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
    """Runners of an exported model's ONNX graphs, with which `kvexport validate` compares them with PyTorch.

    Past and present have separate buffers. Each runner is a context manager with `infer(feed) -> outputs`, like those
    of polygraphy.

    Attributes:
        decode: The decoder for calls of one token of each lane.
        prefill: The decoder for calls of several tokens.
        merge: The merge graph, or None if no layer merges.
        open_decoder: A function that opens an ONNX Runtime session of another decoder, from the bytes of its ONNX
            graph, over the same weights. None if the backend does not run ONNX graphs.
    """

    decode: Any
    prefill: Any
    merge: Any
    open_decoder: Callable[[bytes], Any] | None = None


class Backend(ABC):
    """Base class of a backend: a library that runs an exported model's ONNX graphs.

    kvexport uses backends only through this class. A folder's `backend.py` has one subclass.

    Attributes:
        name: The name, which is that of the folder.
        packages: The packages that it needs.
        devices: The devices that a caller can choose from; (None,) without a choice.
        prepared: The files that `preparation` may add to an artifact; empty if the ONNX graphs are enough.
        verified: The files whose digests `load` compares itself, when it reads them.
        runs_adapters: Whether the backend runs decoders that take LoRA adapters.
        runs_images: Whether the backend runs image encoders, and decoders that take rows of images.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[Package, ...]] = ()
    devices: ClassVar[tuple[str | None, ...]] = (None,)
    prepared: ClassVar[frozenset[str]] = frozenset()
    verified: ClassVar[frozenset[str]] = frozenset()
    runs_adapters: ClassVar[bool] = False
    runs_images: ClassVar[bool] = False

    @abstractmethod
    def problems(self, recipe: Recipe) -> list[tuple[str, str]]:
        """Return why this machine cannot run the artifact of `recipe`, as (reason, fix) pairs; empty if it can."""

    @abstractmethod
    def load(self, path: Path, manifest: Manifest, options: LoadOptions) -> LoadedModel:
        """Load an exported model from its artifact folder, ready to run.

        Args:
            path: The folder of the artifact.
            manifest: Its manifest.
            options: Settings that replace those of the recipe.

        Raises:
            EnvironmentProblem: If this machine lacks something that the backend needs.
            ArtifactError: If the artifact lacks files that `preparation` adds.
            UsageError: If an option has an impossible value.
        """

    @abstractmethod
    def runners(self, model: Any, manifest: Manifest) -> Runners:
        """Return runners of a loaded model's ONNX graphs, which `kvexport validate` compares with PyTorch.

        Args:
            model: The result of `load`.
            manifest: The manifest of the artifact.
        """

    def device(self, recipe: Recipe) -> str | None:
        """Return the device that the recipe chooses, such as "cuda"; None if the backend offers no choice."""
        return None

    def needs_gpu(self, recipe: Recipe) -> bool:
        """Return whether the artifact of a recipe runs only on a machine with an NVIDIA GPU."""
        return self.device(recipe) == "cuda"

    def preparation(self, recipe: Recipe) -> Preparation | None:
        """Return the function that a build calls after it wrote the ONNX graphs, or None; TensorRT's builds engines.

        A build calls this method before all other work, so that missing packages are reported at once.

        Raises:
            EnvironmentProblem: If this machine lacks something that the preparation needs.
        """
        return None

    def advice(self, recipe: Recipe, cache: CachePlan, weight_bytes: int) -> Mapping[str, str]:
        """Return the notes of `kvexport plan` about the machines that will run a recipe, by subject.

        Args:
            recipe: The recipe.
            cache: The caches of the model.
            weight_bytes: Bytes of the weights, packed or in the recipe's dtype.
        """
        return {}

    def operator_problem(self, recipe: Recipe, operator: str) -> tuple[str, str] | None:
        """Return why the backend cannot run an operator, and the setting that avoids it; None if it can.

        Args:
            recipe: The recipe.
            operator: Experts or LinearAttention, which are outside the cache.
        """
        return None

    def library_products(self, recipe: Recipe) -> bool:
        """Return whether products are operators of ONNX Runtime, and packed weights in their layout.

        ONNX Runtime's CUDA provider runs them; it has no kernels of kvexport's operators outside the cache.
        """
        return False

    def positive_scales(self, recipe: Recipe) -> bool:
        """Return whether the scales of weights that a build rounds must be above 0."""
        return False

    def packing_problem(
        self, recipe: Recipe, dtype: str, group: int, *, has_offset: bool, has_table: bool, picked: bool
    ) -> tuple[str, str] | None:
        """Return why the backend cannot run a packed (4- to 8-bit) weight and the setting that avoids it, or None.

        If there is a reason, the build stores the weight in floats.

        Args:
            recipe: The recipe.
            dtype: The type of the numbers, such as int4 or uint6.
            group: The number of inputs that share a scale.
            has_offset: Whether the scales are accompanied by zero points or minima.
            has_table: Whether the numbers are indices into a table.
            picked: Whether single rows of the weight are read, as from an embedding.
        """
        return None

    def node_opener(self, operators: Sequence[str], method: Method) -> NodeOpener | None:
        """Return a function that opens models of single nodes with this machine's native kernels.

        Args:
            operators: The names of kvexport's operators that must have a native kernel.
            method: The compression method.

        Returns:
            The function, or None if the backend has no native kernel of one of the operators here.
        """
        return None

    def operators(self, manifest: Manifest, device: str | None) -> dict[str, str]:
        """Return for each custom operator of the artifact's graphs how this machine runs it, in words.

        Args:
            manifest: The manifest of the artifact.
            device: The device, if it is not the recipe's.
        """
        return {op: how for op, how in manifest.operators.items() if how}

    def diagnose(self) -> Diagnosis:
        """Return the state of the backend's installation on this machine for `kvexport doctor`; never raises."""
        return Diagnosis()

    def describe(self, path: Path, manifest: Manifest) -> Description:
        """Return the backend's report about an artifact, for `kvexport inspect`."""
        return Description()
