"""The command line program `kvexport`: its commands, one file each. Results go to stdout, progress to stderr.

The file of a command imports no large package before the command is called, so that `kvexport --help` answers at once.
"""

from __future__ import annotations

import gc
import sys
from typing import Annotated, Any

import typer

from kvexport.commands.bench import bench
from kvexport.commands.build import build
from kvexport.commands.cached import list_cached, remove
from kvexport.commands.calibrate import calibrate
from kvexport.commands.chat import chat
from kvexport.commands.docs import docs
from kvexport.commands.doctor import doctor
from kvexport.commands.errors import Verbs
from kvexport.commands.eval import evaluate
from kvexport.commands.generate import generate
from kvexport.commands.inspect import inspect
from kvexport.commands.options import Command
from kvexport.commands.plan import plan
from kvexport.commands.process import end_cleanly, open_standard_streams
from kvexport.commands.recipes import recipes, recipes_methods, recipes_show
from kvexport.commands.serve import serve
from kvexport.commands.validate import validate
from kvexport.version import __version__

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "context_settings": {"help_option_names": ["-h", "--help"]}}
app = typer.Typer(cls=Verbs, no_args_is_help=True, pretty_exceptions_enable=False, **PLAIN)
for verb in (build, generate, chat, serve, bench, plan, inspect, validate):
    app.command(cls=Command)(verb)
app.command("eval", cls=Command)(evaluate)
app.command("list", cls=Command)(list_cached)
app.command("rm", cls=Command)(remove)
app.command(cls=Command)(calibrate)
app.command(cls=Command)(doctor)
app.command(cls=Command)(docs)
recipes_app = typer.Typer(help="List the recipes; show one; list the compression methods.", **PLAIN)
recipes_app.callback(invoke_without_command=True)(recipes)
recipes_app.command("show", cls=Command)(recipes_show)
recipes_app.command("methods", cls=Command)(recipes_methods)
app.add_typer(recipes_app, name="recipes")


def main() -> None:
    open_standard_streams()
    end_cleanly()
    try:
        app(prog_name="kvexport")
    finally:
        skip_last_collection()


def skip_last_collection() -> None:
    """Let the process exit without the last garbage collection, which takes long after a build.

    If triton is loaded (PyTorch's CUDA build imports it), the collection runs: otherwise triton's binding library
    nanobind would report every object as a leak.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="KVEXPORT_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn a Hugging Face checkpoint into an engine whose KV cache has a fixed budget.

    Exit codes: 0 ok, 1 internal error, 2 usage or recipe, 3 environment, 4 validation mismatch, 5 artifact damaged.
    """
