"""Tests of the draw of texts for the stranger's test: complete, without context, and the same for the same seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import strangers

ROOT = Path(__file__).parent.parent.parent
PAGE = """# A heading

A first sentence of prose. `code` begins the second
sentence, which names [a page](other.md) and holds 0.5 nats.

![an image](image.svg)

<!-- a comment
of two lines -->
| a table | is no prose |
|---|---|

```console
$ this is a command of many words
```

- An item of a list is its own paragraph.
- Too short.

Term
: Its definition is a paragraph of its own. An abbreviation, e.g. This one, ends no sentence.
"""


def test_sentences_are_the_prose_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert strangers.sentences([page], tmp_path) == [
        ("page.md:3", "A first sentence of prose."),
        ("page.md:3", "`code` begins the second sentence, which names [a page] and holds 0.5 nats."),
        ("page.md:17", "An item of a list is its own paragraph."),
        ("page.md:21", "Its definition is a paragraph of its own."),
        ("page.md:21", "An abbreviation, e.g. This one, ends no sentence."),
    ]


def test_docstrings_of_modules_classes_and_functions_have_their_qualified_names(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text('"""The package."""')
    (package / "a.py").write_text(
        'class A:\n    """A class."""\n'
        '    async def f(self):\n        """A method.\n\n        Args: none.\n        """\n'
        'def g():\n    if True:\n        def h():\n            """An inner function."""\n'
    )
    assert strangers.docstrings(package) == [
        ("package", "The package."),
        ("package.a.A", "A class."),
        ("package.a.A.f", "A method.\n\nArgs: none."),
        ("package.a.g.h", "An inner function."),
    ]


def test_a_draw_depends_on_its_seed_alone_and_never_repeats() -> None:
    texts = [strangers.Text(f"place {n}", f"text {n}") for n in range(50)]
    drawn = strangers.draw(texts, 20, seed=3)
    assert drawn == strangers.draw(texts, 20, seed=3) != strangers.draw(texts, 20, seed=4)
    assert len(set(drawn)) == 20
    with pytest.raises(ValueError, match=r"51 texts were requested, but there are only 50: lower --count"):
        strangers.draw(texts, 51, seed=3)


def test_the_readers_see_the_texts_and_the_key_their_places(tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    command = [sys.executable, "-m", "tools.strangers", "--seed", "5", "--count", "4", "--key", str(key)]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    places = json.loads(key.read_text())
    assert list(places) == [str(n) for n in range(1, 9)]
    assert all(f"\n{n}. " in printed for n in places)
    assert all(place.startswith("kvexport") for place in list(places.values())[:4])
    assert not [place for place in places.values() if place in printed]
