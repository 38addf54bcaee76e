"""Loaders of other projects' code from folders outside of this repository: kvpress and code of papers' authors.

No file of these projects is kept in this repository. Their files are imported unchanged, one by one. Their `__init__`
modules are not run: kvpress's patches transformers, others import packages that are not needed. A name that a file
imports at its top, that is missing and that the called functions never use gets a stand-in during the import. The
result lists the stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Peer:
    """The code of another project."""

    name: str  # project's name
    source: str  # repository where it is published
    version: str  # version of the package, or the commit
    stand_ins: tuple[str, ...]  # names that were missing and not needed
    code: SimpleNamespace  # its functions and classes by name

    def to_json(self) -> dict[str, Any]:
        """Return all fields except the code."""
        return {"source": self.source, "version": self.version, "stand_ins": list(self.stand_ins)}


def load_kvpress(folder: Path) -> Peer:
    """Load three presses of the kvpress that ``pip install --no-deps --target folder kvpress`` installed."""
    distribution = next(iter(metadata.distributions(name="kvpress", path=[str(folder)])), None)
    if distribution is None:
        raise FileNotFoundError(f"there is no kvpress in {folder}: pip install --no-deps --target {folder} kvpress")
    with _packages({"kvpress": folder / "kvpress", "kvpress.presses": folder / "kvpress" / "presses"}):
        code = SimpleNamespace(
            SnapKVPress=_from("kvpress.presses.snapkv_press", "SnapKVPress"),
            StreamingLLMPress=_from("kvpress.presses.streaming_llm_press", "StreamingLLMPress"),
            ObservedAttentionPress=_from("kvpress.presses.observed_attention_press", "ObservedAttentionPress"),
        )
    return Peer("kvpress", "NVIDIA/kvpress", distribution.version, (), code)


def load_zeromerge(folder: Path) -> Peer:
    """Load the functions of ZeroMerge's one module.

    The module names attention classes that transformers 5 no longer has. It replaces these classes only on request.
    """
    models = "transformers.models"
    lacking = {
        f"{models}.llama.modeling_llama": ("LlamaSdpaAttention",),
        f"{models}.mistral.modeling_mistral": ("MistralSdpaAttention",),
    }
    with _stand_ins({"dotenv": ("load_dotenv",)}, lacking) as stood_in:
        module = _file("zeromerge_mergekv", folder / "mergekv" / "mergekv.py")
    return Peer("ZeroMerge", "SusCom-Lab/ZeroMerge", commit(folder), stood_in, SimpleNamespace(**vars(module)))


def load_asymkv(folder: Path) -> Peer:
    """Load AsymKV's cache without the forward functions of its models, which were written for transformers 4.44."""
    forward = {
        f"asymkv.method.asymkv_forward.asymkv_{family}": (f"enable_{name}_asymkv_attention{tail}",)
        for family, name, tail in (
            ("mistral", "mistral", ""),
            ("llama", "llama_pos_shift", "_442"),
            ("qwen2", "qwen2", ""),
            ("gemma", "gemma", ""),
        )
    }
    with _packages(_asymkv(folder)), _stand_ins(forward, {}) as stood_in:
        code = SimpleNamespace(AsymKVCache=_from("asymkv.method.asymkv", "AsymKVCache"))
    return Peer("AsymKV", "the-scale-lab/Asymkv", commit(folder), stood_in, code)


def load_kvslimmer(folder: Path, asymkv: Path) -> Peer:
    """Load KVSlimmer's cache, its weights, and the function of its prediction script that makes their input."""
    unused = {"datasets": ("load_dataset",), "kvslimmer.patch": ("enable_kvslimmer_attention",)}
    with _packages({"kvslimmer": folder / "kvslimmer", **_asymkv(asymkv)}), _stand_ins(unused, {}) as stood_in:
        code = SimpleNamespace(
            KVSlimmerCache=_from("kvslimmer.cache", "KVSlimmerCache"),
            optimal_merge_k_from_alpha_d=_from("kvslimmer.merge", "optimal_merge_k_from_alpha_d"),
            build_hessian_proxy_from_ratio=_file("kvslimmer_pred", folder / "pred.py").build_hessian_proxy_from_ratio,
        )
    return Peer("KVSlimmer", "lianjunl13-sudo/KVSlimmer", commit(folder), stood_in, code)


def load_keepkv(folder: Path) -> Peer:
    """Load KeepKV's merging attention class, whose `KV_update` is called on tensors."""
    module = _file("keepkv_modify_llama_oursk", folder / "utils_hh" / "modify_llama_oursk.py")
    code = SimpleNamespace(KV_update=module.LlamaAttention_heavy_hitter_our_sketch.KV_update)
    return Peer("KeepKV", "kkvcache/KeepKV", commit(folder), (), code)


def commit(folder: Path) -> str:
    """Return the commit of a clone's HEAD."""
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no clone"


def _asymkv(folder: Path) -> dict[str, Path]:
    root = folder / "asymkv"
    return {"asymkv": root, "asymkv.streaming_llm": root / "streaming_llm", "asymkv.method": root / "method"}


def _from(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _packages(folders: Mapping[str, Path]) -> Iterator[None]:
    """Register packages with a folder and without an `__init__`, until the end of the context.

    Objects that were imported from them remain usable.
    """
    for name, path in folders.items():
        if not path.is_dir():
            raise FileNotFoundError(f"there is no {path}")
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    try:
        yield
    finally:
        roots = {name.split(".")[0] for name in folders}
        for name in [n for n in sys.modules if n.split(".")[0] in roots]:
            del sys.modules[name]


@contextlib.contextmanager
def _stand_ins(
    modules: Mapping[str, tuple[str, ...]], lacking: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:
    """Register modules of functions that do nothing, and add such functions to existing modules that lack a name."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    nothing.forward = None  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in modules}
    added = [
        (importlib.import_module(m), name)
        for m, names in lacking.items()
        for name in names
        if not hasattr(importlib.import_module(m), name)
    ]
    for name, names in modules.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(names, nothing))
    for module, name in added:
        setattr(module, name, nothing)
    try:
        yield (*modules, *(f"{module.__name__}.{name}" for module, name in added))
    finally:
        for module, name in added:
            delattr(module, name)
        for name, module_before in before.items():
            if module_before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module_before
