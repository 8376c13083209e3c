"""The command line. Every failure is one sentence on the error stream; ``--debug`` adds the traceback.

Exit codes: 0 done, 1 failed, 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import errno
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from modpass.cli import (
    bench,
    build,
    coverage,
    decoder,
    export,
    generate,
    inspect,
    plan,
    plan_report,
    study,
    transform,
    verify,
)
from modpass.errors import ModpassError
from modpass.version import __version__

__all__ = ["app", "main"]

INTERRUPTED = 130
_NO_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR}
# typer does not export the parent of all its complaints about arguments.
UsageError: Any = typer.BadParameter.__base__

HELP = """
Turn any traced transformer into a Mixture-of-Depths model: in some of its blocks only a share of the tokens,
chosen by a router, is computed. Then export it with fixed shapes, build an engine, and measure it beside the
dense model.

MODEL is a bundled model (smollm2-135m, minilm-l6, dinov2-small), a folder written by 'modpass transform', a
Hugging Face folder (with config.json), or package.module:factory, a function without arguments that returns a
torch.nn.Module or a pair (module, example inputs).
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=HELP)

app.command("inspect")(inspect.command)
app.command("transform")(transform.command)
app.command("export")(export.command)
app.command("export-decoder")(decoder.command)
app.command("generate")(generate.command)
app.command("build")(build.command)
app.command("plan-report")(plan_report.command)
app.command("verify")(verify.command)
app.command("bench")(bench.command)
app.command("plan")(plan.command)
app.command("coverage")(coverage.command)
app.add_typer(study.app, name="study")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"modpass {__version__}")
        raise typer.Exit


@app.callback()
def _globals(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and leave.")
    ] = False,
    _debug: Annotated[bool, typer.Option("--debug", help="Show warnings, and tracebacks.")] = False,
) -> None:
    """Declare the options of every command; ``main`` takes ``--debug`` out, wherever it stands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    >>> main(["--version"])
    modpass 0.1.0
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
            code = app([a for a in given if a != "--debug"], prog_name="modpass", standalone_mode=False) or 0
    except UsageError as e:
        code = _complain(f"{_one_line(e.format_message())}{_where_help_is(e)}", 2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except ModpassError as e:
        code = _complain(str(e), 1, debug)
    except OSError as e:
        code = _complain(_of_the_file(e) or f"unexpected error: {_one_line(f'{type(e).__name__}: {e}')}", 1, debug)
    except Exception as e:
        what = _one_line(f"{type(e).__name__}: {e}".rstrip(": "))
        hint = "" if debug else " (run again with --debug for the traceback)"
        code = _complain(f"unexpected error: {what}{hint}", 1, debug)
    return _complain("interrupted", code) if code == INTERRUPTED else int(code)


def _complain(sentence: str, code: int, debug: bool = False) -> int:
    if debug:
        traceback.print_exc()
    print(f"modpass: {sentence}", file=sys.stderr)
    return code


def _of_the_file(error: OSError) -> str | None:
    """What stands in the way of a file, where the system says so."""
    if error.errno not in _NO_PLACE or error.filename is None:
        return None
    return f"'{error.filename}' cannot be written or read: {error.strerror}; check its name, rights and free space"


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _where_help_is(error: Any) -> str:
    return f" (see: {error.ctx.command_path} --help)" if error.ctx is not None else ""
