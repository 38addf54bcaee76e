"""Loads other people's code from folders outside of this repository: kvpress's presses and functions of the papers'
authors.

Nothing of theirs is kept here. Their files are imported as they are, one by one. What an ``__init__`` would do is left
out (kvpress's patches transformers, others import what they do not need), and a name that a file imports at its top,
that is not there, and that what is called never uses, gets a stand-in for the time of the import. The result lists
these.
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
    """Somebody's code. source: where it is published; version: of the package, or commit; stand_ins: what was missing
    and not needed;
    code: its functions and classes by name."""

    name: str
    source: str
    version: str
    stand_ins: tuple[str, ...]
    code: SimpleNamespace

    def to_json(self) -> dict[str, Any]:
        """All but the code."""
        return {"source": self.source, "version": self.version, "stand_ins": list(self.stand_ins)}


def load_kvpress(folder: Path) -> Peer:
    """Three presses of the kvpress that ``pip install --no-deps --target folder kvpress`` put there."""
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
    """The functions of its one module. It names attention classes that transformers 5 no longer has, and replaces them
    only when asked."""
    models = "transformers.models"
    lacking = {
        f"{models}.llama.modeling_llama": ("LlamaSdpaAttention",),
        f"{models}.mistral.modeling_mistral": ("MistralSdpaAttention",),
    }
    with _stand_ins({"dotenv": ("load_dotenv",)}, lacking) as stood_in:
        module = _file("zeromerge_mergekv", folder / "mergekv" / "mergekv.py")
    return Peer("ZeroMerge", "SusCom-Lab/ZeroMerge", commit(folder), stood_in, SimpleNamespace(**vars(module)))


def load_asymkv(folder: Path) -> Peer:
    """Its cache; the models' forward functions, written for transformers 4.44, are left out."""
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
    """Its cache, its weights, and what its prediction script feeds them with."""
    unused = {"datasets": ("load_dataset",), "kvslimmer.patch": ("enable_kvslimmer_attention",)}
    with _packages({"kvslimmer": folder / "kvslimmer", **_asymkv(asymkv)}), _stand_ins(unused, {}) as stood_in:
        code = SimpleNamespace(
            KVSlimmerCache=_from("kvslimmer.cache", "KVSlimmerCache"),
            optimal_merge_k_from_alpha_d=_from("kvslimmer.merge", "optimal_merge_k_from_alpha_d"),
            build_hessian_proxy_from_ratio=_file("kvslimmer_pred", folder / "pred.py").build_hessian_proxy_from_ratio,
        )
    return Peer("KVSlimmer", "lianjunl13-sudo/KVSlimmer", commit(folder), stood_in, code)


def load_keepkv(folder: Path) -> Peer:
    """The attention class that merges; its `KV_update` is called on tensors."""
    module = _file("keepkv_modify_llama_oursk", folder / "utils_hh" / "modify_llama_oursk.py")
    code = SimpleNamespace(KV_update=module.LlamaAttention_heavy_hitter_our_sketch.KV_update)
    return Peer("KeepKV", "kkvcache/KeepKV", commit(folder), (), code)


def commit(folder: Path) -> str:
    """HEAD of a clone."""
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
    """Packages with a folder and no `__init__`, until the end of the context; what was imported from them lives on in
    its holder."""
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
    """Modules of these names that hold functions which do nothing, and such functions where a module that is there
    lacks a name."""

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
