"""`rhotrain COMMAND ...`: finds the command and turns mistakes into one message and exit code 2.

Exit codes: 0 done, 1 doctor found a problem, audit a cause, or a run met numbers that must not reach the weights, 2 a
wrong input, 130 stopped by Ctrl-C, 141 the reader of a pipe has gone.
With RHOTRAIN_DEBUG=1 a wrong input shows its traceback as well. Imports no torch, so that `--help` is fast.
"""

import os
import sys
from collections.abc import Sequence
from importlib import metadata

from rhotrain.train.commands import COMMANDS
from rhotrain.train.config import ConfigError
from rhotrain.train.settings import nearest


def usage() -> str:
    """What `rhotrain --help` prints."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:{width}}  {entry.command.summary}" for name, entry in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rhotrain COMMAND [flags]",
            "",
            "GRPO and CISPO for language models, with an importance ratio that can be trusted.",
            "",
            *lines,
            "",
            "`rhotrain train` alone trains tiny-sums; `rhotrain COMMAND --help` shows a command's flags.",
        ]
    )


def is_ours(error: Exception) -> bool:
    """True for errors that the package raises on purpose (ConfigError, LoadError, CheckpointError).

    Their message is for the user. A bare ValueError is a bug, or comes from somebody's reward, and keeps its traceback.
    """
    return type(error).__module__.startswith("rhotrain.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Raises SystemExit(2) on a wrong input."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(f"rhotrain {metadata.version('rhotrain')}")
        return 0
    name = f"rhotrain {words[0]}" if words[0] in COMMANDS else "rhotrain"
    try:
        if words[0] not in COMMANDS:
            raise ConfigError(f"{words[0]}: unknown command; {nearest(words[0], COMMANDS)}")
        return COMMANDS[words[0]].run(words[1:])
    except ValueError as error:
        if not is_ours(error) or os.environ.get("RHOTRAIN_DEBUG") == "1":
            raise
        print(f"{name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except FloatingPointError as error:
        if not is_ours(error) or os.environ.get("RHOTRAIN_DEBUG") == "1":
            raise
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # the reader of a pipe has gone (`| head`); stdout must not be flushed again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
