"""`python -m sampling.distill`: train a drafter for any target on text that the target generates itself."""

import json
import signal
import sys

from sampling.distill.options import parse_options
from utils.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for an error that the user can correct, 130 if interrupted."""
    from utils.screen.renderer import make_renderer

    renderer = make_renderer(interactive=False, plain=False)
    try:
        options = parse_options(argv)
        from sampling.distill.pipeline import Distillation

        Distillation(options, renderer.announce).run()
    except KeyboardInterrupt:
        renderer.note("Interrupted. If generation had started, --out FOLDER --resume continues.")
        return 130
    except Exception as error:
        if not (message := error_message(error)):
            raise  # a bug
        renderer.error(message)
        return 1
    return 0


def error_message(error: Exception) -> str:
    """One sentence for an error that the user can correct; an empty string for a bug."""
    from safetensors import SafetensorError

    from utils.models.load_errors import is_out_of_memory

    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return (
            "Out of memory. A smaller --page, --batch or --length needs less; --resume keeps what is already generated."
        )
    if isinstance(error, OSError):
        return f"Reading or writing failed: {error.strerror or error}. Free disk space or choose a different --out."
    if isinstance(error, SafetensorError | json.JSONDecodeError):
        return f"A file in the work folder is damaged ({error}). Delete the work folder and start again."
    return ""


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent shell may have ignored it
    sys.exit(main())
