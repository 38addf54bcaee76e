"""Tests of GGUF files: their blocks equal ggml's bit for bit, damage is reported, and a file becomes an artifact."""

import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvexport
from kvexport.errors import UsageError
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.model.ggml_blocks import LAYOUTS
from kvexport.export.model.gguf import TYPES, GgufWeight, read_gguf
from kvexport.export.model.tensors import dense_values
from kvexport.export.weights.computed import ComputedSpec
from kvexport.language.tokenizer import Tokenizer
from kvexport.recipe.fields import Recipe
from kvexport.tensor_files.casting import load_tensor
from kvexport.validate.runner import validate_artifact
from tests.support.gguf_files import Q8_0, entry, gguf, q8_0, text, tiny_gguf
from tests.support.tiny_model import RECIPE


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(folder: Path, data: bytes) -> Path:
    file = folder / "model.gguf"
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("kind", LAYOUTS)
def test_dequantized_blocks_equal_ggmls(tmp_path: Path, kind: str) -> None:
    """Random blocks have the values that the reference of llama.cpp's authors computes."""
    reference = pytest.importorskip("gguf", reason="not reached: pip install gguf")
    number, size = next((number, size) for number, (name, _, size) in TYPES.items() if name == kind)
    rng = np.random.default_rng(0)
    layout = LAYOUTS[kind]
    blocks = rng.integers(0, 256, (24, 512 // TYPES[number][1] * size), dtype=np.uint8)
    fields = blocks.reshape(-1, size).view(layout.block)
    if kind == "MXFP4":
        fields["exponent"][::7] %= 3  # numbers below the smallest normal one
    for name in {"scale", "least"} & set(layout.block.names or ()):
        fields[name] = rng.standard_normal(fields[name].shape).astype(np.float16)
    file = written(tmp_path, gguf({}, {"w": ((512, 24), number, blocks.tobytes())}))
    tensor = read_gguf(file).tensors["w"]
    actual = dense_values(GgufWeight(tensor))
    expected = reference.dequantize(blocks, reference.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))
    turned = expected.reshape(3, 4, 2, 512).swapaxes(1, 2).reshape(24, 512)
    np.testing.assert_array_equal(dense_values(GgufWeight(tensor, heads=3)), turned)
    nbytes = layout.packing.nbytes(24, 512) - 16 * bool(layout.packing.table)
    assert tensor.nbytes <= nbytes <= tensor.nbytes * 1.03


def test_metadata_and_floats_are_read_as_they_are(tmp_path: Path) -> None:
    plain, half = np.arange(6, dtype=np.float32), np.array([1.5, -1], np.float16)
    nested = (9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2B", 0, 2, 8, 9))
    entries = {"one": entry(7), "words": entry(["a", "ü"]), "yes": entry(True), "nested": nested}
    tensors = {"plain": ((3, 2), 0, plain.tobytes()), "half": ((2,), 1, half.tobytes())}
    for version in (2, 3):
        data = gguf(entries, tensors)
        file = read_gguf(written(tmp_path, data[:4] + struct.pack("<I", version) + data[8:]))
        assert file.metadata == {"one": 7, "words": ["a", "ü"], "yes": True, "nested": [[8, 9]]}
        np.testing.assert_array_equal(load_tensor(file.tensors["plain"], "float32"), plain.reshape(2, 3))
        np.testing.assert_array_equal(load_tensor(file.tensors["half"], "float32"), half)


WHOLE = gguf({"a": entry("b")}, {"t": ((2,), 0, bytes(8)), "u": ((2,), 0, bytes(8))})


@pytest.mark.parametrize(("data", "message"), [
    (b"PK\3\4" + bytes(60), "no GGUF file"), (b"GGUF", "no GGUF file: it has 4 bytes"),
    (WHOLE[:4] + struct.pack("<I", 1) + WHOLE[8:], "no GGUF file of version 2 or 3"), (WHOLE[:30], "ends early"),
    (WHOLE[:8] + struct.pack("<Q", 1 << 60) + WHOLE[16:], "ends early.*promises"),
    (WHOLE[:24] + struct.pack("<Q", 1 << 40) + WHOLE[32:], "ends early.*promises"),
    (WHOLE[:-32], "ends within tensor 'u'"),
    (WHOLE.replace(struct.pack("<Q", 32), struct.pack("<Q", 0), 1), "offset 0, which overlaps"),
    (WHOLE.replace(struct.pack("<Q", 32), struct.pack("<Q", 33), 1), "offset 33, which is no multiple of 32"),
    (WHOLE.replace(struct.pack("<Q", 32), struct.pack("<Q", 1 << 50), 1), "ends within tensor 'u'"),
    (WHOLE.replace(text("u"), text("t")), "tensor 't' twice"), (gguf({}, {"t": ((32,), 99, bytes(18))}), "type 99"),
    (gguf({}, {"t": ((33,), 2, bytes(36))}), r"shape \[33\], which Q4_0 cannot hold"),
    (gguf({"a": (77, b"")}, {}), "unknown type 77"), (gguf({"general.alignment": entry(24)}, {}), "alignment of '24'"),
    (gguf({"a": (9, struct.pack("<IQ", 0, 5 << 20) + bytes(5 << 20))}, {}), "5242881 entries .* at most 4194304"),
])  # fmt: skip
def test_damaged_files_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_gguf(written(tmp_path, data))


MANY = 1 << 20
NESTED = struct.pack("<IQ", 9, MANY) + struct.pack("<IQ", 0, 0) * MANY


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (WHOLE[:8] + struct.pack("<Q", 1 << 60) + WHOLE[16:], f"promises {1 << 60} more entries"),
        (WHOLE[:24] + struct.pack("<Q", 1 << 62) + WHOLE[32:], f"promises {1 << 62} more bytes"),
        (gguf({"a": (9, struct.pack("<IQ", 8, 1 << 62))}, {}), f"promises {1 << 62} more entries"),
        (gguf({"a": (9, NESTED)}, {}), f"promises {64 * MANY + 1} entries of its header, expected at most 4194304"),
        (WHOLE.replace(struct.pack("<Q", 32), struct.pack("<Q", 0), 1), "offset 0, which overlaps"),
        (WHOLE.replace(struct.pack("<Q", 32), struct.pack("<Q", 1 << 62), 1), "ends within tensor 'u'"),
    ],
    ids=["tensors", "a string", "an array", "arrays in an array", "overlapping tensors", "an offset"],
)
def test_damage_is_found_within_a_second_of_processor_time(tmp_path: Path, data: bytes, message: str) -> None:
    file, begin = written(tmp_path, data), time.process_time()
    with pytest.raises(UsageError, match=message):
        read_gguf(file)
    assert time.process_time() - begin < 1


def test_a_model_in_several_files_is_read_by_any_of_them(tmp_path: Path) -> None:
    def write(number: int, count: int = 2, **entries: Any) -> Path:
        numbers = {"split.no": entry(number), "split.count": entry(count), "split.tensors.count": entry(2)}
        tensor = {f"t{number}": ((2,), 0, struct.pack("<2f", number, 1))}
        file = tmp_path / f"m-{number + 1:05}-of-00002.gguf"
        file.write_bytes(gguf({**numbers, **{name: entry(value) for name, value in entries.items()}}, tensor))
        return file

    parts = (write(0, own="kept"), write(1))
    for part in parts:
        whole = read_gguf(part)
        assert whole.metadata["own"] == "kept" and whole.files == parts
        assert [load_tensor(whole.tensors[f"t{i}"], "float32")[0] for i in (0, 1)] == [0, 1]
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(UsageError, match="do not belong together"):
        read_gguf(parts[0])
    parts[1].unlink()
    with pytest.raises(UsageError, match=r"1 others are missing, such as m-00002-of-00002\.gguf"):
        read_gguf(parts[0])
    with pytest.raises(UsageError, match="does not end in"):
        read_gguf(parts[0].rename(tmp_path / "other.gguf"))


def test_no_damage_ends_in_another_error(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """A damaged file, cut anywhere or with changed bytes in its header, is read, or refused with a message."""
    file, rng = tmp_path / "model.gguf", random.Random(0)
    tiny_gguf(tiny_checkpoint, file)
    whole = file.read_bytes()
    refused = 0
    for i in range(150):
        data = bytearray(whole[: rng.randrange(len(whole))] if i % 3 == 0 else whole)
        for _ in range(0 if i % 3 == 0 else 3):
            data[rng.randrange(3000)] = rng.choice([0, 1, 4, 8, 9, 127, 255])
        file.write_bytes(data)
        try:
            read_checkpoint(file)
        except UsageError as error:
            refused += 1
            assert len(str(error)) < 1000
    assert refused > 60


def test_a_file_becomes_an_artifact_as_it_is(tmp_path: Path, tiny_checkpoint: Path) -> None:
    file = tmp_path / "tiny.gguf"
    values = tiny_gguf(tiny_checkpoint, file, **{"tokenizer.chat_template": "{{ messages[0].content }}"})
    checkpoint = read_checkpoint(file)
    assert {**checkpoint.tensors, **checkpoint.computed}.keys() == values.keys()
    for name, source in checkpoint.computed.items():
        np.testing.assert_array_equal(dense_values(source), values[name])
    artifact = kvexport.build(Recipe.model_validate({**RECIPE, "model": {"path": str(file)}}), tmp_path / "artifact")
    assert validate_artifact(artifact, length=60, batch=1).passed
    matrices = sum(x.size for x in values.values() if x.ndim == 2)
    assert (artifact / "decoder.weights").stat().st_size < matrices * 34 / 32 + 8192
    assert Tokenizer.from_folder(artifact).encode("abc")[:3] == [0, 3, 4]
    assert kvexport.load(artifact).chat([{"role": "user", "content": "abc"}], max_new_tokens=2).token_ids


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K"])
def test_an_engine_computes_with_numbers_of_few_bits(tmp_path: Path, kind: str) -> None:
    """A file of 2- or 3-bit blocks becomes an artifact of its size, whose engine computes with the blocks' values."""
    import transformers

    reference = pytest.importorskip("gguf", reason="not reached: pip install gguf")
    number, size = next((number, size) for number, (name, _, size) in TYPES.items() if name == kind)
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "floats")
    rng = np.random.default_rng(0)

    def random_blocks(weight: np.ndarray[Any, Any]) -> tuple[bytes, np.ndarray[Any, Any]]:
        blocks = rng.integers(0, 256, (len(weight), weight.shape[1] // 256 * size), np.uint8)
        fields = blocks.reshape(-1, size).view(LAYOUTS[kind].block)
        for name, value in {"scale": 0.002, "least": 0.003}.items():
            if name in (fields.dtype.names or ()):
                fields[name] = value * (1 + rng.random(fields[name].shape))
        return blocks.tobytes(), reference.dequantize(blocks, reference.GGMLQuantizationType[kind])

    values = tiny_gguf(tmp_path / "floats", tmp_path / "tiny.gguf", matrices=(number, random_blocks))
    for name, source in read_checkpoint(tmp_path / "tiny.gguf").computed.items():
        np.testing.assert_array_equal(dense_values(source), values[name])
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(tmp_path / "tiny.gguf")}})
    artifact = kvexport.build(recipe, tmp_path / "artifact")
    assert validate_artifact(artifact, length=60, batch=1).passed
    weights, file = (path.stat().st_size for path in (artifact / "decoder.weights", tmp_path / "tiny.gguf"))
    assert weights < file * 1.03 + 65536  # small tensors begin at multiples of 64 bytes


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_other_architectures_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    import transformers

    from kvexport.export.build import read_model
    from kvexport.export.weights.specs import weight_specs

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        **({"head_dim": 32} if kind == "Qwen3" else {}),
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(tmp_path / "floats")
    represented = tiny_gguf(tmp_path / "floats", tmp_path / "tiny.gguf")
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(tmp_path / "tiny.gguf")}})
    shape = read_model(recipe)
    specs = {spec.name: spec for spec in weight_specs(shape.checkpoint, shape.model, recipe)}
    assert (
        {name.removeprefix("model.") for name in specs}
        == {n for n, _ in model.named_parameters()}
        == represented.keys()
    )
    for name, spec in specs.items():
        computed = isinstance(spec, ComputedSpec)
        values = dense_values(spec.source) if computed else load_tensor(spec.entry, "float32")
        np.testing.assert_array_equal(values, represented[name.removeprefix("model.")])
    assert type(shape.model) is type(model)


def test_sentencepiece_merges_the_pair_of_highest_score(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """A first token is added if the file has no setting for it, as in llama.cpp."""
    from kvexport.export.model.gguf_model import write_texts

    tokens = [
        "<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab", *(chr(i) for i in range(ord("c"), ord("c") + 56)),
    ]  # fmt: skip
    scores = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, *(-9.0 for _ in range(56))]
    more = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": [2, 3, 3, *[1] * 61]}
    more |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    entries = {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    tiny_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", **entries)
    gguf = read_gguf(tmp_path / "tiny.gguf")
    for key in ("add_bos_token", "merges", "pre"):
        del gguf.metadata[f"tokenizer.ggml.{key}"]
    write_texts(gguf, tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("ab a") == [1, 3, 7, 6]
    assert tokenizer.decode([1, 3, 7, 6]) == "ab a"


@pytest.mark.parametrize(("more", "message"), [
    ({"general.architecture": "rwkv7"}, "holds a 'rwkv7', expected one of llama"),
    ({"general.architecture": "clip"}, "no model but the encoder of images"),
    ({"general.type": "adapter"}, "no model but a LoRA adapter"),
    ({"general.type": "imatrix"}, "no model but an importance matrix"),
    ({"general.type": "mmproj"}, "no model but the encoder of images"),
    ({"llama.attention.head_count": 5}, "5 heads do not share"),
    ({"llama.rope.scaling.type": "longrope"}, "scales rotary frequencies by 'longrope'"),
    ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert'"),
    ({"tokenizer.ggml.pre": "unheard"}, "splits text as 'unheard'"),
    ({"tokenizer.ggml.bos_token_id": 99}, "unusable metadata"),
    ({"llama.context_length": "long"}, "max_position_embeddings"),
    ({"llama.block_count": 1 << 31}, "block_count should be from 1 to 1024, found 2147483648"),
])  # fmt: skip
def test_unusable_files_are_named(tmp_path: Path, tiny_checkpoint: Path, more: dict[str, Any], message: str) -> None:
    from kvexport.export.build import read_model

    file = tmp_path / "tiny.gguf"
    tiny_gguf(tiny_checkpoint, file, **more)
    with pytest.raises(UsageError, match=message):
        read_model(Recipe.model_validate({**RECIPE, "model": {"path": str(file)}}))


def test_a_file_without_a_number_of_heads_is_named(tmp_path: Path, tiny_checkpoint: Path) -> None:
    from kvexport.export.model.gguf_model import tensors_of, write_texts

    tiny_gguf(tiny_checkpoint, tmp_path / "tiny.gguf")
    gguf = read_gguf(tmp_path / "tiny.gguf")
    del gguf.metadata["llama.attention.head_count"]
    with pytest.raises(UsageError, match="None heads do not share"):
        tensors_of(gguf)
    with pytest.raises(UsageError, match=r"has no llama.attention.head_count"):
        write_texts(gguf, tmp_path)


def test_commands_that_change_a_config_refuse_gguf(tmp_path: Path, tiny_checkpoint: Path) -> None:
    tiny_gguf(tiny_checkpoint, tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match="--layers takes a checkpoint of safetensors"):
        read_checkpoint(tmp_path / "tiny.gguf").require_folder("--layers")
    read_checkpoint(tiny_checkpoint).require_folder("--layers")


def test_types_and_tensors_that_are_not_read_are_named(tmp_path: Path, tiny_checkpoint: Path) -> None:
    block, _ = q8_0(np.ones((1, 32), np.float32))
    head = {"general.architecture": entry("llama"), "llama.attention.head_count": entry(2)}
    for name, kind, data, message in (
        ("blk.0.ffn_up.weight", 24, bytes(32), "is I8, expected one of F32"),
        ("blk.0.ffn_gate_exps.weight", Q8_0, block, "which no llama that is read here has"),
    ):
        file = written(tmp_path, gguf(head, {name: ((32, 1), kind, data)}))
        with pytest.raises(UsageError, match=message):
            read_checkpoint(file)
