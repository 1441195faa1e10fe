"""The `pathway` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pathway.cli.parser import make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed, 2 used or configured wrongly, or refused."""
    parser = make_parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.command not in ("demo", "train"):  # whose flags are their own
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    from pathway.cli import commands
    from pathway.errors import ConfigError, PathwayError

    try:
        return commands.run(options, rest)
    except ConfigError as error:
        print(f"pathway {options.command}: {error}", file=sys.stderr)
        return 2
    except PathwayError as error:
        print(f"pathway {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
