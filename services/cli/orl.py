"""`orl`, the customer's command: files, batches, usage.

Exit status: 0 all records completed, 1 some or all failed, 2 a mistake in the command or refused by the
server, 3 no or no valid key, 4 the batch expired or was cancelled, 5 the server cannot be reached.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from cyclopts import App

from services.cli import account, auth, batches, files
from services.cli.client import Exit, Trouble
from services.cli.credentials import BadUrl, NoCredentials
from services.cli.output import say

app = App(
    name="orl",
    help="Run batches of inference requests on an OpenRelay server.",
    version=lambda: version("openrelay-batch"),
)
app.command(auth.app)
app.command(files.app)
app.command(batches.app)
account.add_to(app)


def main() -> None:
    """Entry point: every `Trouble` becomes one sentence and an exit status."""
    for word in sys.argv[1:]:
        try:
            word.encode()
        except UnicodeEncodeError:
            _fail(f"The argument {word!r} is not UTF-8.", Exit.USAGE)
    try:
        app(sys.argv[1:])
    except Trouble as trouble:
        _fail(str(trouble), trouble.exit_status)
    except NoCredentials as missing:
        _fail(str(missing), Exit.AUTHENTICATION)
    except BadUrl as bad:
        _fail(str(bad), Exit.USAGE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left unwritten goes nowhere
        sys.exit(Exit.OK)


def _fail(sentence: str, status: Exit) -> None:
    say(f"orl: {sentence}")
    sys.exit(status)


if __name__ == "__main__":
    main()
