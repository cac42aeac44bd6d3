"""`python -m sampling.distill`: make a drafter for any target, out of text that the target writes itself."""

import json
import signal
import sys

from sampling.distill.options import read_order
from utils.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Carry out the order of the command line; the exit status: 0, 1 for what a user can mend, 130 interrupted."""
    from utils.screen.renderer import make_renderer

    renderer = make_renderer(interactive=False, plain=False)
    try:
        order = read_order(argv)
        from sampling.distill.pipeline import Workshop

        workshop = Workshop(order, renderer.note)
        if order.measure:
            workshop.measure()
        else:
            workshop.make()
    except KeyboardInterrupt:
        renderer.note("Interrupted: --out FOLDER --resume goes on from here, where pages were to be written.")
        return 130
    except Exception as error:
        if not (why := explained_failure(error)):
            raise  # a bug
        renderer.error(why)
        return 1
    return 0


def explained_failure(error: Exception) -> str:
    """A sentence for what a user can mend; nothing for a bug."""
    from safetensors import SafetensorError

    from utils.models.load_errors import is_out_of_memory

    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return "Out of memory: fewer --rows or a smaller --batch need less; --resume goes on with what is written."
    if isinstance(error, OSError):
        return f"The work cannot be read or written: {error.strerror or error}. Make room, or choose another --out."
    if isinstance(error, SafetensorError | json.JSONDecodeError):
        return f"A file of the work is damaged ({error}): delete the folder's work and begin again."
    return ""


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the shell that started this had it ignored
    sys.exit(main())
