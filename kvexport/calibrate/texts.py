"""The texts on which budgets are measured: several kinds of text in several languages, or the user's own files."""

from collections.abc import Mapping
from pathlib import Path

from kvexport.errors import UsageError
from kvexport.evaluate.language import Ids
from kvexport.language.tokenizer import FILE_NAME, Tokenizer
from kvexport.paths import PACKAGE, TEXT

FOLDER = Path(__file__).parent / "texts"
FILES = {
    "prose": TEXT, "manual": FOLDER / "manual.txt", "chat": FOLDER / "chat.txt", "german": FOLDER / "german.txt",
    "french": FOLDER / "french.txt", "python": PACKAGE / "export" / "weights" / "code_sample.txt",
    "c++": FOLDER / "code.txt", "tables": FOLDER / "table.txt",
}  # fmt: skip
LENGTH = 1024  # the most tokens of a text
SHORTEST = 256  # a shorter text has too few tokens for caches of several budgets


def read_kinds(folder: Path | None = None) -> dict[str, str]:
    if folder is None:
        return {kind: path.read_text(encoding="utf-8") for kind, path in FILES.items()}
    files = sorted(path for path in folder.glob("*") if path.suffix in (".txt", ".md") and path.is_file())
    if not files:
        raise UsageError(f"{folder} has no file NAME.txt or NAME.md", "--texts FOLDER with a text file for each kind")
    try:
        return {path.stem: path.read_text(encoding="utf-8") for path in files}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"a file of {folder} cannot be read: {error}", "--texts FOLDER with UTF-8 files") from error


def tokenized(checkpoint: Path, kinds: Mapping[str, str], length: int = LENGTH) -> dict[str, Ids]:
    if not (checkpoint / FILE_NAME).is_file():
        raise UsageError(f"{checkpoint} has no {FILE_NAME}, without which no text can be read", "put it there")
    tokenizer, texts = Tokenizer.from_folder(checkpoint), dict[str, Ids]()
    start = tokenizer.encode("")
    for kind, text in kinds.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids).split() != text.split():
            raise UsageError(
                f"the tokenizer of {checkpoint} does not know the words of the text '{kind}'",
                "--texts FOLDER with texts of the kind that the model was trained on",
            )
        if len(ids) < SHORTEST:
            raise UsageError(
                f"the text '{kind}' has {len(ids)} tokens, expected at least {SHORTEST}", "a longer text of this kind"
            )
        texts[kind] = [*start, *ids][:length]
    return texts
