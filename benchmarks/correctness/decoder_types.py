"""Export of every decoder type of transformers, compared with transformers.

    python benchmarks/correctness/decoder_types.py [TYPE...]

Every type of AutoModelForCausalLM or AutoModelForImageTextToText gets a tiny random config (`decoder_configs.py`). Its
artifact has a budget that holds the whole sequence. It reads two sequences in chunks and then token by token. The
logits are compared with those of transformers' own model, which reads a whole sequence at once. The results are

    equal      logits within 1e-4 of the largest, and the same most likely next tokens
    refused    kvexport gives the reason in a UsageError
    not made   transformers itself cannot make the tiny model here
    no text    transformers does not run the model on tokens alone
    different  none of these: a silent fault
    leaked     an exception of torch or transformers reached the caller

Results are written to benchmarks/results/decoder-types.json after every type. Types with a result are left out unless
they are named. `tables.py` writes the tables of the page.
"""

from __future__ import annotations

import argparse
import logging
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from benchmarks import common
from benchmarks.correctness.decoder_configs import tiny
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.export.model.hf_model import decoder_class, is_composite
from tests.support import models

NAME = "decoder-types"
TOLERANCE = 1e-4
SECONDS = 100  # seconds of processor time for one type


def checkpoint_class(config: Any) -> Any:
    """Return the class of transformers to which checkpoints of a config belong: the wrapper if the type has one."""
    wrapper = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    return wrapper if wrapper is not None and is_composite(config) else decoder_class(config)


def save(config: Any, folder: Path) -> None:
    """Save a checkpoint of random weights, biases and norms included."""
    torch.manual_seed(0)
    model = checkpoint_class(config)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)


def reference_logits(config: Any, folder: Path, sequences: Any) -> Any:
    """Return the logits of transformers' own model for each sequence; None if it does not run on tokens alone."""
    model = checkpoint_class(config).from_pretrained(folder, dtype=torch.float32).eval()
    try:
        with torch.no_grad():
            logits = [model(input_ids=torch.from_numpy(x)[None]).logits[0].numpy() for x in sequences]
    except Exception:
        return None
    return logits if all(np.isfinite(x).all() for x in logits) else None


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Return the result of one type: its `result`, and either the `reason` or the `error` of the logits."""
    config_class = CONFIG_MAPPING[name]
    try:
        config = config_class(**tiny(config_class))
        config.architectures = [checkpoint_class(config).__name__]
        save(config, folder / "checkpoint")
    except Exception as error:
        return {"result": "not made", "reason": _line(error)}
    export = {"logits": "all", "prefill_chunk": 32}
    cache = {} if hasattr(config.get_text_config(), "num_attention_heads") else {"method": "full"}
    recipe = models.make_recipe(folder / "checkpoint", cache=cache, export=export, limits={"max_length": 160})
    try:
        read_model(recipe)  # finds every reason to refuse
        ids = models.random_ids(0, 90, 60, vocabulary=90)
        right = reference_logits(config, folder / "checkpoint", ids)
        if right is None:
            return {"result": "no text", "reason": "transformers does not run the model on tokens alone"}
        engine = load(build(recipe, folder / "artifact"))
    except UsageError as error:
        return {"result": "refused", "reason": " ".join(error.problem.replace(f"{folder}/", "").split())[:400]}
    except Exception as error:
        return {"result": "leaked", "reason": _line(error)}
    own_logits = models.given_tokens_logits(engine, ids, (50, 20))
    pairs = list(zip(own_logits, right, strict=True))
    error = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    same = all((a.argmax(-1) == b.argmax(-1)).all() or np.abs(a - b).max() < 1e-6 * np.abs(b).max() for a, b in pairs)
    return {"result": "equal" if error < TOLERANCE and same else "different", "error": error}


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


class _Late(Exception):
    """The exception for a type that takes longer than `SECONDS`."""


def _stop(*_: Any) -> None:
    raise _Late


def all_types() -> list[str]:
    """Return every decoder type, text models first."""
    names = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        for config in mapping:
            names[config.model_type] = None
    return [name for name in names if name in CONFIG_MAPPING]


def main() -> None:
    """Measure the named types, or those without a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "types", nargs="*", metavar="TYPE", help="a type to measure; default: all types without a result"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGPROF, _stop)
    known = common.earlier(NAME).get("types", {})
    for name in options.types or [x for x in all_types() if x not in known]:
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                result = measure(name, Path(folder))
            except _Late:
                result = {"result": "not made", "reason": f"longer than {SECONDS} s of processor time"}
            except Exception as error:
                result = {"result": "leaked", "reason": _line(error)}
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        known[name] = result
        print(f"{name}, {time.process_time() - begin:.1f} s:", result, flush=True)
        common.save(NAME, {"all": len(all_types()), "types": dict(sorted(known.items()))})


if __name__ == "__main__":
    main()
